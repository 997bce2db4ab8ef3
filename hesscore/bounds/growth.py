"""How a number grows: the exponent of a power law through measured points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Exponent(NamedTuple):
    """``y ~ x^value``, by least squares on the logarithms; ``stderr`` is NaN where two points leave nothing over."""

    value: float
    stderr: float


def exponent(x: Sequence[float], y: Sequence[float]) -> Exponent | None:
    """``None`` where no line goes through: fewer than two different ``x``, or a number that is not positive and finite.

    >>> exponent([1, 2, 4], [3, 12, 48])
    Exponent(value=2.0, stderr=0.0)
    """
    xs, ys = np.array(x, dtype=float), np.array(y, dtype=float)
    positive = bool((xs > 0).all() and (ys > 0).all() and np.isfinite(xs).all() and np.isfinite(ys).all())
    if not positive or len(set(x)) < 2:
        return None
    u, v = np.log(xs), np.log(ys)
    u = u - u.mean()
    slope = float(u @ (v - v.mean()) / (u @ u))
    left = v - v.mean() - slope * u
    freedom = len(u) - 2
    stderr = float(np.sqrt(left @ left / freedom / (u @ u))) if freedom else float("nan")
    return Exponent(round(slope, 12), round(stderr, 12))
