"""Colours and axes that the pictures share, for light and dark pages alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from hesscore.picture import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
"""Of text and axes: black, and told from every other colour, so that a page may use its own."""

KINDS = {
    "loss": "#0072b2",
    "softmax": "#e69f00",
    "norm": "#009e73",
    "activation": "#cc79a7",
    "product": "#d55e00",
}
"""What causes curvature, in the colours of Okabe and Ito, which the colour-blind can tell apart."""

PARTS = {"attention": "#0072b2", "feed-forward": "#d55e00", "norms": "#009e73", "around the blocks": "#cc79a7"}
"""Where a block stands."""


@contextmanager
def drawing() -> Iterator[None]:
    """In which a figure is made and written."""
    from matplotlib import rc_context

    with (
        style(),
        rc_context(
            {
                "text.color": INK,
                "axes.labelcolor": INK,
                "axes.edgecolor": INK,
                "xtick.color": INK,
                "ytick.color": INK,
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        ),
    ):
        yield


def part(row: dict[str, Any]) -> str:
    """Of ``PARTS``, that of a row's component."""
    component = row["component"]
    if component.startswith("attn"):
        return "attention"
    if component.startswith("mlp"):
        return "feed-forward"
    return "around the blocks" if row["layer"] is None and "norm" not in component else "norms"


def name_of(row: dict[str, Any]) -> str:
    """``3.attn.q.weight``, or ``model``."""
    if row["component"] == "model":
        return "model"
    return f"{'' if row['layer'] is None else str(row['layer']) + '.'}{row['component']}.{row['parameter']}"


def norm_of(row: dict[str, Any]) -> float | None:
    """The larger absolute eigenvalue of a row, where there is curvature beyond its error."""
    ends = row["lambda_max"], row["lambda_min"]
    if None in ends:
        return None
    norm: float = max(map(abs, ends))
    return norm if norm > norm_error(row) else None


def norm_error(row: dict[str, Any]) -> float:
    return max(row["lambda_max_error"], row["lambda_min_error"])


def faint_grid(axes: Axes, axis: Literal["x", "y", "both"]) -> None:
    axes.grid(axis=axis, color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
