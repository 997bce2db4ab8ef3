"""Elementwise activations: each is three functions, ``f``, ``f'`` and ``f''``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn

Function = Callable[[Tensor], Tensor]


class Facts(NamedTuple):
    """``f``, ``f'`` and ``f''``; how large they get, ``hesscore.extrema`` states."""

    value: Function
    slope: Function
    bend: Function


def step(x: Tensor) -> Tensor:
    """1 where ``x`` is positive, else 0: the slope of ReLU, at whose kink we take 0, as autograd does."""
    return x.sign().clamp(min=0)


def normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """``Phi`` and ``phi``, the distribution and density of the standard normal, with all digits in their tails."""
    return 0.5 * torch.erfc(-x / sqrt(2)), torch.exp(-0.5 * x * x) / sqrt(2 * pi)


def gelu_slope(x: Tensor) -> Tensor:
    """Of ``x Phi``: ``Phi + x phi``."""
    cdf, pdf = normal(x)
    return cdf + x * pdf


def gelu_bend(x: Tensor) -> Tensor:
    """``(2 - x^2) phi``"""
    return (2 - x * x) * normal(x)[1]


def gelu_tanh_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``s = sigma(2u)``, ``s'`` and ``s''`` for ``u = sqrt(2/pi) (x + 0.044715 x^3)``; GELU is ``x s``.

    The sigmoid, because ``(1 + tanh u)/2`` would be left without digits where ``tanh u`` is near to -1.
    """
    b, c = 2 * sqrt(2 / pi), 0.044715
    u, du, ddu = b * x * (1 + c * x * x), b * (1 + 3 * c * x * x), 6 * b * c * x
    s, complement = torch.sigmoid(u), torch.sigmoid(-u)
    ds = s * complement * du
    return s, ds, ds * (complement - s) * du + s * complement * ddu


def gelu_tanh_slope(x: Tensor) -> Tensor:
    s, ds, _ = gelu_tanh_parts(x)
    return s + x * ds


def gelu_tanh_bend(x: Tensor) -> Tensor:
    _, ds, dds = gelu_tanh_parts(x)
    return 2 * ds + x * dds


def silu_slope(x: Tensor) -> Tensor:
    """Of ``x sigma``: ``sigma + x sigma'``, with ``sigma' = sigma (1 - sigma)``."""
    sigma = torch.sigmoid(x)
    return sigma + x * sigma * torch.sigmoid(-x)


def silu_bend(x: Tensor) -> Tensor:
    """``sigma' (2 + x (1 - 2 sigma))``"""
    sigma, complement = torch.sigmoid(x), torch.sigmoid(-x)
    return sigma * complement * (2 + x * (complement - sigma))


def tanh_slope(x: Tensor) -> Tensor:
    """``1 / cosh^2``: ``1 - tanh^2`` would be left without digits."""
    return torch.cosh(x).square().reciprocal()


def tanh_bend(x: Tensor) -> Tensor:
    return -2 * torch.tanh(x) * tanh_slope(x)


ACTIVATIONS = {
    "relu": Facts(F.relu, step, torch.zeros_like),
    # f'' jumps from 0 to 2 at the origin, where we take 0
    "relu_squared": Facts(lambda x: F.relu(x).square(), lambda x: 2 * F.relu(x), lambda x: 2 * step(x)),
    "gelu": Facts(lambda x: x * normal(x)[0], gelu_slope, gelu_bend),
    "gelu_tanh": Facts(lambda x: x * gelu_tanh_parts(x)[0], gelu_tanh_slope, gelu_tanh_bend),
    "silu": Facts(F.silu, silu_slope, silu_bend),
    "tanh": Facts(torch.tanh, tanh_slope, tanh_bend),
}
"""By name.  ReLU has no curvature almost everywhere."""


@dataclass(frozen=True)
class Activation(Component):
    """``y = f(x)`` elementwise: ``J = diag(f')``, ``<delta, D^2 f> = diag(delta f'')``."""

    name: str

    kind = "activation"

    def value(self, x: Tensor) -> tuple[Tensor, Any]:
        f = ACTIVATIONS[self.name]
        return f.value(x), (f.slope(x), f.bend(x))

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        return kept[0] * tangents[0]

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (kept[0] * cotangent,)

    def bend(self, kept: Any, delta: Tensor) -> Tensor:
        return kept[1] * delta

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return (bent * tangents[0],)

    def pull(self, kept: Any, cotangent: Tensor, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        (curved,) = self.curvature(kept, bent, tangents, needs)
        assert curved is not None
        return (curved.addcmul_(kept[0], cotangent),)

    def norms(self, kept: Any) -> Norms:
        slope, bend = kept
        return Norms((float(slope.abs().max()),), {(0, 0): float(bend.abs().max())})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        for name in ACTIVATIONS:
            yield cls(name), (2 * randn(rng, 3, 4),)
            yield cls(name), (randn(rng, 2, 3, 2),)
