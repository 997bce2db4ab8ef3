"""What bounds say beside what is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hesscore.pages import Content
from hesscore.pages.style import INK, KINDS, faint_grid, norm_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bounds(content: Content) -> Figure | None:
    """The spectral norm of each block, in the order of the model, under its bound from the norms of the maps."""
    from matplotlib.figure import Figure

    found = [(row, norm) for row in content["rows"] if (norm := norm_of(row)) and row["bound_upper"]]
    if not found:
        return None
    rows, norms = zip(*found, strict=True)
    drawn = Figure((7.2, 3.0), layout="constrained")
    axes = drawn.subplots()
    places = range(len(rows))
    uppers = [row["bound_upper"] for row in rows]
    axes.vlines(places, norms, uppers, color=INK, alpha=0.15)
    axes.scatter(places, uppers, marker="v", s=14, color=KINDS["product"], label="upper bound")
    axes.scatter(places, norms, s=14, color=KINDS["loss"], label="measured")
    axes.set_yscale("log")
    firsts = [i for i in places if i == 0 or rows[i]["layer"] != rows[i - 1]["layer"]]
    labels = [f"layer {rows[i]['layer']}" if rows[i]["layer"] is not None else rows[i]["component"] for i in firsts]
    axes.set_xticks(firsts, labels, rotation=30, ha="right")
    axes.set_ylabel("spectral norm")
    faint_grid(axes, "y")
    axes.legend(frameon=False)
    return drawn
