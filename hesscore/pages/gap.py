"""Curvature at activations, through the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hesscore.pages import Content
from hesscore.pages.style import faint_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SITES = {"norm1": "#009e73", "attn": "#0072b2", "norm2": "#e69f00", "mlp": "#d55e00"}


def gap(content: Content) -> Figure | None:
    """Mean over tokens, with its interval, and the peak, of each site of a layer."""
    from matplotlib.figure import Figure

    found = [site for site in (content.get("activations") or {}).get("sites", ()) if site["layer"] is not None]
    found = [site for site in found if None not in (site["mean"], site["mean_stderr"], site["peak"])]
    found = [site for site in found if site["mean"] > 0]
    if not found:
        return None
    drawn = Figure((7.2, 3.2), layout="constrained")
    axes = drawn.subplots()
    for shift, (name, colour) in enumerate(SITES.items()):
        own = [site for site in found if site["site"] == name]
        if not own:
            continue
        places = [site["layer"] + 0.08 * (shift - 1.5) for site in own]
        means = [site["mean"] for site in own]
        errors = [
            [min(1.96 * site["mean_stderr"], 0.99 * site["mean"]) for site in own],
            [1.96 * site["mean_stderr"] for site in own],
        ]
        axes.errorbar(places, means, errors, fmt="o", markersize=4.5, color=colour, capsize=2, label=f"after {name}")
        axes.scatter(places, [site["peak"] for site in own], marker="_", s=60, color=colour)
    axes.set_yscale("log")
    axes.set_xticks(sorted({site["layer"] for site in found}))
    axes.set_xlabel("layer")
    axes.set_ylabel("top eigenvalue by one token's\nactivation: mean (dot), peak (dash)")
    faint_grid(axes, "y")
    axes.legend(frameon=False, ncols=2)
    return drawn
