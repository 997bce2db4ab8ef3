"""The largest ``|f'|`` and ``|f''|`` of each activation over the real line, known without torch."""

from __future__ import annotations

from math import inf, pi, sqrt
from typing import NamedTuple


class Extrema(NamedTuple):
    """Rounded up in the last digit; infinite if unbounded."""

    slope: float
    bend: float


EXTREMA = {
    "relu": Extrema(1.0, 0.0),
    "relu_squared": Extrema(inf, 2.0),
    "gelu": Extrema(1.1289042, 2 / sqrt(2 * pi)),
    "gelu_tanh": Extrema(1.1289931, 2 / sqrt(2 * pi)),
    "silu": Extrema(1.0998394, 0.5),
    "tanh": Extrema(1.0, 4 / (3 * sqrt(3))),
}
