"""Elementwise activations: each is three functions, ``f``, ``f'`` and ``f''``, and their extrema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn

Triple = tuple[Tensor, Tensor, Tensor]


def relu(x: Tensor) -> Triple:
    """``f'' = 0`` almost everywhere; at the kink we take ``f' = 0``, as autograd does."""
    on = (x > 0).to(x.dtype)
    return x * on, on, torch.zeros_like(x)


def relu_squared(x: Tensor) -> Triple:
    """``max(x, 0)^2``; ``f''`` jumps from 0 to 2 at the origin, where we take 0."""
    on = (x > 0).to(x.dtype)
    r = x * on
    return r * r, 2 * r, 2 * on


def gelu(x: Tensor) -> Triple:
    """``x Phi``; ``f' = Phi + x phi``, ``f'' = (2 - x^2) phi``."""
    cdf = 0.5 * (1 + torch.erf(x / sqrt(2)))
    pdf = torch.exp(-0.5 * x * x) / sqrt(2 * pi)
    return x * cdf, cdf + x * pdf, (2 - x * x) * pdf


def gelu_tanh(x: Tensor) -> Triple:
    """``x (1 + t)/2`` with ``t = tanh(u)``, ``u = sqrt(2/pi) (x + 0.044715 x^3)``."""
    b, c = sqrt(2 / pi), 0.044715
    t = torch.tanh(b * x * (1 + c * x * x))
    du, ddu = b * (1 + 3 * c * x * x), 6 * b * c * x
    dt = (1 - t * t) * du
    ddt = (1 - t * t) * ddu - 2 * t * dt * du
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * dt), dt + 0.5 * x * ddt


def silu(x: Tensor) -> Triple:
    """``x sigma``; ``f' = sigma + x sigma'``, ``f'' = 2 sigma' + x sigma''``."""
    sigma = torch.sigmoid(x)
    slope = sigma * (1 - sigma)
    return x * sigma, sigma + x * slope, slope * (2 + x * (1 - 2 * sigma))


def tanh(x: Tensor) -> Triple:
    """``f' = 1 - t^2``, ``f'' = -2 t (1 - t^2)``."""
    t = torch.tanh(x)
    slope = 1 - t * t
    return t, slope, -2 * t * slope


class Facts(NamedTuple):
    """A function with the largest ``|f'|`` and ``|f''|`` over the real line (infinite where unbounded)."""

    triple: Callable[[Tensor], Triple]
    max_slope: float
    max_bend: float


ACTIVATIONS = {
    "relu": Facts(relu, 1.0, 0.0),
    "relu_squared": Facts(relu_squared, float("inf"), 2.0),
    "gelu": Facts(gelu, 1.1289042, 2 / sqrt(2 * pi)),
    "gelu_tanh": Facts(gelu_tanh, 1.1289931, 2 / sqrt(2 * pi)),
    "silu": Facts(silu, 1.0998394, 0.5),
    "tanh": Facts(tanh, 1.0, 4 / (3 * sqrt(3))),
}


@dataclass(frozen=True)
class Activation(Component):
    """``y = f(x)`` elementwise: ``J = diag(f')``, ``<delta, D^2 f> = diag(delta f'')``."""

    name: str

    kind = "activation"

    def value(self, x: Tensor) -> tuple[Tensor, Any]:
        y, slope, bend = ACTIVATIONS[self.name].triple(x)
        return y, (slope, bend)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        return kept[0] * tangents[0]

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (kept[0] * cotangent,)

    def bend(self, kept: Any, delta: Tensor) -> Tensor:
        return kept[1] * delta

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return (bent * tangents[0],)

    def pull(self, kept: Any, cotangent: Tensor, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return ((bent * tangents[0]).addcmul_(kept[0], cotangent),)

    def norms(self, kept: Any) -> Norms:
        slope, bend = kept
        return Norms((float(slope.abs().max()),), {(0, 0): float(bend.abs().max())})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        for name in ACTIVATIONS:
            yield cls(name), (2 * randn(rng, 3, 4),)
            yield cls(name), (randn(rng, 2, 3, 2),)
