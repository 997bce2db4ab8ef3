"""The spectral density of every weight, by component, and of the whole model."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hesscore.pages import Content
from hesscore.pages.style import INK, faint_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR_ZERO = 1e-3
"""Eigenvalues up to so much of the largest are drawn on a linear axis, the others on a logarithmic one."""

WIDTH = 0.25
"""Of the Gaussian that stands for each eigenvalue, on that axis."""

LOWEST = 1e-5
"""The least density that is drawn."""

COLUMNS = 3


def spectra(content: Content) -> Figure | None:
    """A panel for each component whose weight is a matrix, a line for each layer, from light to dark."""
    from matplotlib.figure import Figure

    groups: dict[str, list[tuple[int | None, Any]]] = defaultdict(list)
    for row in content["rows"]:
        within = "" if row["layer"] is None else f"blocks.{row['layer']}."
        spectrum = content["spectra"].get(f"{within}{row['component']}.{row['parameter']}")
        if spectrum and "x" in row["shape"]:
            groups[row["component"]].append((row["layer"], spectrum))
    if model := content["spectra"].get("model"):
        groups = {"whole model": [(None, model)], **groups}
    if not groups:
        return None
    lines = -(-len(groups) // COLUMNS)
    drawn = Figure((3 * COLUMNS, 0.4 + 1.9 * lines), layout="constrained")
    panels = list(drawn.subplots(lines, COLUMNS, squeeze=False).flat)
    count = max((layer or 0 for members in groups.values() for layer, _ in members), default=0) + 1
    for panel, (component, members) in zip(panels, groups.items(), strict=False):
        _panel(panel, component, members, count)
    for panel in panels[len(groups) :]:
        panel.set_visible(False)
    return drawn


def _panel(panel: Axes, component: str, members: list[tuple[int | None, Any]], layers: int) -> None:
    from matplotlib import colormaps

    top = max(abs(value) for _, spectrum in members for value in spectrum["eigenvalues"]) or 1.0
    unit = NEAR_ZERO * top
    for layer, spectrum in members:
        shade = colormaps["viridis"](0.85 if layers == 1 else 0.9 - 0.8 * (layer or 0) / max(1, layers - 1))
        axis, density = smooth(spectrum, unit)
        panel.semilogy(axis, density, color=shade, linewidth=1.2, label="" if layer is None else str(layer))
    ends = np.array(
        [value for _, spectrum in members for value in (min(spectrum["eigenvalues"]), max(spectrum["eigenvalues"]))]
    )
    most = np.arcsinh(np.abs(ends).max() / unit)
    panel.set_xlim(-most - 3 * WIDTH, most + 3 * WIDTH)
    panel.set_ylim(LOWEST, 3)
    ticks = [-1.0, -0.01, 0.0, 0.01, 1.0]
    panel.set_xticks([np.arcsinh(tick / NEAR_ZERO) for tick in ticks], [_short(tick * top) for tick in ticks])
    panel.set_title(component, fontsize=8)
    faint_grid(panel, "both")
    panel.axvline(0, color=INK, linewidth=0.6, alpha=0.5)
    if len(members) > 1:
        panel.legend(
            title="layer", fontsize=6, title_fontsize=6, frameon=False, loc="upper right", ncols=1 + len(members) // 7
        )


def smooth(spectrum: Any, unit: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The density of ``asinh(lambda/unit)``: a Gaussian for each eigenvalue, by its weight."""
    centres = np.arcsinh(np.array(spectrum["eigenvalues"]) / unit)
    axis = np.linspace(centres.min() - 4 * WIDTH, centres.max() + 4 * WIDTH, 400)
    bells = np.exp(-0.5 * ((axis[:, None] - centres) / WIDTH) ** 2) / (WIDTH * np.sqrt(2 * np.pi))
    return axis, bells @ np.array(spectrum["weights"])


def _short(number: float) -> str:
    """Two digits."""
    return f"{float(f'{number:.2g}'):g}"
