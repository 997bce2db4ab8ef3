"""The bounds that Petrov, Kiselev, Meshkov and Grabovoy print (arXiv 2510.16927, appendix), for comparison alone.

For one head of attention without its output map, under ``|F - T|^2 / (L d_V)``.  They rest on ``|dA/dS| <= 1/L`` for
the attention ``A`` by its scores ``S``, which holds only where attention is uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np

from hesscore.bounds.apriori import Bound
from hesscore.bounds.jets import Pair
from hesscore.spec import Spec


def published(spec: Spec, scalars: Mapping[str, float], length: int) -> dict[Pair, Bound]:
    """Of the pairs they are printed for, as printed; ``|X|_2`` is the spread times ``sqrt(L)``.

    Infinite beyond the range of floats.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return {pair: Bound(*map(float, bound)) for pair, bound in _printed(spec, scalars, length).items()}


def _printed(spec: Spec, scalars: Mapping[str, float], length: int) -> dict[Pair, tuple[Any, Any]]:
    q, k, v = (np.float64(scalars[f"attn.{part}.weight"]) for part in "qkv")
    x, target = (np.float64(sqrt(length) * scalars[name]) for name in ("input.spread", "target.norm"))
    width = float(spec.head_width)
    rho = sqrt(min(length, width)) * (length * x * v + target)

    def scores(a: float, b: float) -> float:
        """Outer, of two of the weights that make scores; the other two are ``a`` and ``b``."""
        return 2 * a * b * v**2 * x**6 / (length**3 * width**2)

    def bent(a: float, b: float) -> float:
        return 12 * rho * v * a * b * x**5 / (length * width**2)

    mixed = 2 * rho * v * x**3 / (length**2 * width)
    return {
        ("attn.v.weight", "attn.v.weight"): (2 * length / width * x**2, 0.0),
        ("attn.q.weight", "attn.q.weight"): (scores(k, k), length * bent(k, k)),
        ("attn.k.weight", "attn.q.weight"): (scores(k, q), bent(k, q) + mixed),
        ("attn.q.weight", "attn.v.weight"): (
            2 * v * k * x**4 / (length * width**1.5),
            2 * rho * k * x**3 / (length**2 * width),
        ),
    }
