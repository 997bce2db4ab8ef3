"""The block-heterogeneity picture: the Frobenius norm of every pair of parameters, in each part of the Hessian."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hesscore.blocks import FLAT, PARTS, WHOLE, BlockRow
from hesscore.picture import style, written

DECADES = 6
"""Of norms that the colours tell apart; what is smaller has the lightest one."""


def draw(rows: Sequence[BlockRow], title: str, path: str) -> bytes:
    """A picture in the format of ``path``: one line of panels a layer, one scale for all.

    A pair without curvature beyond rounding is grey, and one without a row is white.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    pairs = [row for row in rows if row.row != WHOLE]
    layers = list(dict.fromkeys(row.layer for row in pairs))
    if not layers:
        return b""
    names = list(dict.fromkeys(name for row in pairs for name in (row.row, row.column)))
    norms = [row.frobenius for row in pairs if row.frobenius and row.note != FLAT]
    most = max(norms, default=1.0)
    least, lowest = min(norms, default=1.0), most * 10.0**-DECADES
    scale = LogNorm(max(least, lowest) * (1 - 1e-9), most)
    side = 1.2 + 0.2 * len(names)
    clear = ConstrainedLayoutEngine(h_pad=0.1)  # inches, between the titles too
    with style():
        figure = Figure((3 * side + 2.2, len(layers) * (side - 0.5) + 1.7), layout=clear)
        figure.suptitle(title, fontsize=10)
        panels = figure.subplots(len(layers), len(PARTS), sharex=True, sharey=True, squeeze=False)
        for line, layer in zip(panels, layers, strict=True):
            for panel, part in zip(line, PARTS, strict=True):
                own = [row for row in pairs if (row.layer, row.part) == (layer, part)]
                panel.imshow(_grid(own, names, flat=True), cmap="Greys", vmin=0, vmax=8)
                image = panel.imshow(_grid(own, names, flat=False), cmap="YlGnBu", norm=scale)
                panel.set_title(f"block {layer}: {part}", fontsize=9)
                panel.set_xticks(range(len(names)), names, rotation=90)
                panel.set_yticks(range(len(names)), names)
                panel.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
                panel.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
                panel.grid(which="minor", color="white", linewidth=1)
                panel.tick_params(which="both", length=0)
                panel.spines[:].set_visible(False)
        below = "min" if least < lowest else "neither"
        bar = figure.colorbar(image, ax=panels, label="Frobenius norm", shrink=0.8, aspect=40, extend=below)
        bar.outline.set_visible(False)
        return written(figure, path, bbox_inches="tight")


def _grid(
    rows: Sequence[BlockRow], names: Sequence[str], flat: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Norms of the pairs that have curvature, or ones where there is none; NaN elsewhere."""
    grid = np.full((len(names), len(names)), np.nan)
    for row in rows:
        if (row.note == FLAT) == flat:
            value = 1.0 if flat else row.frobenius
            i, j = names.index(row.row), names.index(row.column)
            grid[i, j] = grid[j, i] = np.nan if value is None else value
    return grid
