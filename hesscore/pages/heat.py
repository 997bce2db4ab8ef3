"""How steep each component of each layer is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hesscore.pages import Content
from hesscore.pages.style import INK, norm_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECADES = 6
"""That the colours tell apart."""

NUMBERED = 16
"""Layers up to which the numbers themselves fit."""


def heat(content: Content) -> Figure | None:
    """Spectral norms of the Hessian's blocks: a line for each component, a column for each layer."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    norms = {(row["layer"], f"{row['component']}.{row['parameter']}"): norm_of(row) for row in content["rows"]}
    known = [norm for norm in norms.values() if norm]
    if not known:
        return None
    layers = sorted({layer for layer, _ in norms if layer is not None})
    within = list(dict.fromkeys(name for layer, name in norms if layer is not None))
    around = list(dict.fromkeys(name for layer, name in norms if layer is None))
    most = max(known)
    scale = LogNorm(max(min(known), most * 10.0**-DECADES) * (1 - 1e-9), most)
    panels = [(within, layers)] * bool(layers) + [(around, [None])] * bool(around)
    width = 1.8 * len(panels) + 0.45 * sum(len(columns) for _, columns in panels) + 1.2
    drawn = Figure((width, 1.0 + 0.22 * max(len(names) for names, _ in panels)), layout="constrained")
    ratios = [len(columns) for _, columns in panels]
    axes = drawn.subplots(1, len(panels), squeeze=False, width_ratios=ratios)[0]
    for panel, (names, columns) in zip(axes, panels, strict=True):
        grid = np.array([[norms.get((column, name)) or np.nan for column in columns] for name in names])
        image = panel.imshow(grid, cmap="cividis", norm=scale, aspect="auto")
        panel.set_yticks(range(len(names)), names)
        panel.set_xticks(range(len(columns)), ["" if column is None else str(column) for column in columns])
        panel.set_xlabel("layer" if columns != [None] else "around the blocks")
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        if len(columns) <= NUMBERED:
            _number(panel, grid, scale)
    bar = drawn.colorbar(image, ax=axes, label="spectral norm of the block", aspect=30)
    bar.outline.set_visible(False)
    return drawn


def _number(panel: Any, grid: np.ndarray[Any, np.dtype[np.float64]], scale: Any) -> None:
    for (i, j), value in np.ndenumerate(grid):
        ink = INK if np.isnan(value) else "black" if scale(value) > 0.5 else "white"
        text = "0" if np.isnan(value) else f"{value:.1e}" if value < 0.01 or value >= 1e4 else f"{value:.3g}"
        panel.text(j, i, text, color=ink, ha="center", va="center", fontsize=5.5)
