"""How a number grows: the exponent of a power law through measured points."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np


class Exponent(NamedTuple):
    """``y ~ x^value``; the standard error is NaN where there are no more points than the fit has numbers."""

    value: float
    stderr: float

    def __str__(self) -> str:
        """
        >>> str(Exponent(2.0, 0.125)), str(Exponent(-1.5, float("nan")))
        ('2.00 ± 0.13', '-1.50')
        """
        return f"{self.value:.2f}" + (f" ± {ceil(100 * self.stderr) / 100:.2f}" if self.stderr >= 0.005 else "")


def exponent(x: Sequence[float], y: Sequence[float], draws: Sequence[int] | None = None) -> Exponent | None:
    """``log y = height + value log x``, by least squares; ``None`` if a number is not positive and finite.

    Points of the same draw, which ``draws`` names for each point, have a height of their own: how it differs from draw
    to draw says nothing of the slope, nor of its error.  With ``u`` and ``v`` the logarithms less their means in each
    draw, ``value = u.v / u.u`` and ``stderr^2 = |v - value u|^2 / (points - draws - 1) / u.u``.  There is no slope
    where no draw has two different ``x``.

    >>> exponent([1, 2, 4], [3, 12, 48])
    Exponent(value=2.0, stderr=0.0)
    >>> exponent([1, 2, 1, 2], [3, 12, 5, 20], draws=[0, 0, 1, 1])
    Exponent(value=2.0, stderr=0.0)
    """
    xs, ys, labels = np.array(x, dtype=float), np.array(y, dtype=float), np.array(draws or [0] * len(x), dtype=int)
    same = [labels == label for label in np.unique(labels)]
    positive = bool((xs > 0).all() and (ys > 0).all() and np.isfinite(xs).all() and np.isfinite(ys).all())
    if not positive or not any(np.ptp(xs[of]) for of in same):
        return None
    u, v = np.log(xs), np.log(ys)
    for of in same:
        u[of] -= u[of].mean()
        v[of] -= v[of].mean()
    slope = float(u @ v / (u @ u))
    left = v - slope * u
    freedom = len(u) - len(same) - 1
    stderr = float(np.sqrt(left @ left / freedom / (u @ u))) if freedom else float("nan")
    return Exponent(round(slope, 12), round(stderr, 12))
