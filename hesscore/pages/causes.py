"""What causes the top eigenvalue of the sharpest blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hesscore.pages import Content
from hesscore.pages.style import INK, KINDS, faint_grid, name_of, norm_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARPEST = 24
"""Blocks that are drawn."""


def causes(content: Content) -> Figure | None:
    """Stacked bars in percent of ``lambda_max``: parts of both signs, which add up to 100."""
    from matplotlib.figure import Figure

    rows = [row for row in content["rows"] if row["gauss_newton_share"] is not None and norm_of(row)]
    rows = sorted(rows, key=lambda row: -row["lambda_max"])[:SHARPEST]
    if (model := content.get("model")) and model["gauss_newton_share"] is not None:
        rows = [model, *rows]
    if not rows:
        return None
    drawn = Figure((7.2, 1.1 + 0.22 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    for line, row in enumerate(rows):
        ends = {True: 0.0, False: 0.0}
        for kind, colour in KINDS.items():
            share = 100 * row[f"from_{kind}"] / row["lambda_max"]
            axes.barh(line, share, left=ends[share > 0], color=colour, height=0.72)
            ends[share > 0] += share
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.axvline(100, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [f"{name_of(row)}   {row['lambda_max']:.3g}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("percent of the top eigenvalue (beside each name)")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    faint_grid(axes, "x")
    handles = [axes.barh(0, 0, color=colour, label=kind) for kind, colour in KINDS.items()]
    drawn.legend(handles=handles, loc="outside upper center", ncols=len(KINDS), frameon=False)
    return drawn
