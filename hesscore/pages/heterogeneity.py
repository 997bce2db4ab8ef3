"""Gradient against curvature, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hesscore.pages import Content
from hesscore.pages.style import PARTS, faint_grid, name_of, norm_error, norm_of, part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED = 6
"""The steepest blocks, by name."""


def heterogeneity(content: Content) -> Figure | None:
    """A dot for each block, with the error of its curvature, on logarithmic axes."""
    from matplotlib.figure import Figure

    found = [(row, norm) for row in content["rows"] if (norm := norm_of(row)) and row["grad_norm"]]
    if len(found) < 2:
        return None
    drawn = Figure((5.6, 4.2), layout="constrained")
    axes = drawn.subplots()
    for name, colour in PARTS.items():
        own = [(row, norm) for row, norm in found if part(row) == name]
        if own:
            x, y, errors = zip(*((row["grad_norm"], norm, norm_error(row)) for row, norm in own), strict=True)
            axes.errorbar(x, y, errors, fmt="o", markersize=4.5, alpha=0.85, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for i, (row, norm) in enumerate(sorted(found, key=lambda pair: -pair[1])[:LABELLED]):
        side = -1 if i % 2 else 1  # neighbours by turns, or their names would overlap
        place, beside = (row["grad_norm"], norm), "left" if side > 0 else "right"
        axes.annotate(
            name_of(row), place, (5 * side, 0), textcoords="offset points", ha=beside, va="center", fontsize=6.5
        )
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * (right / left) ** 0.25)
    axes.set_xlabel("norm of the gradient")
    axes.set_ylabel("spectral norm of the block")
    correlation = (content["heterogeneity"] or {}).get("correlation")
    if correlation is not None:
        axes.set_title(f"rank correlation {correlation:.2f}", fontsize=8)
    faint_grid(axes, "both")
    axes.legend(frameon=False, loc="lower right")
    return drawn
