"""Mean squared error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, align, randn


@dataclass(frozen=True)
class SquaredError(Component):
    """``loss = sum_i w_i |f_i - t_i|^2 / (d sum_i w_i)``: the mean over the entries of the scored tokens.

    ``f`` and ``t`` are ``(..., d)``, the token weights ``w`` are ``(...)``.  Gradient ``2 w (f - t)/(d sum w)``,
    curvature ``2 w/(d sum w)`` times the identity.
    """

    kind = "loss"

    def value(self, prediction: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Any]:
        weights = weights.to(prediction.dtype)
        weights = (weights / (weights.sum() * prediction.shape[-1]))[..., None]
        error = prediction - target
        return (weights * error.square()).sum(), (2 * weights * error, 2 * weights)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        return (kept[0] * tangents[0]).flatten(1).sum(1)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (align(cotangent, kept[0].ndim) * kept[0],)

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return (bent * kept[1] * tangents[0],)

    def norms(self, kept: Any) -> Norms:
        gradient, bend = kept
        return Norms((float(gradient.norm()),), {(0, 0): float(bend.max())})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls(), (randn(rng, 2, 3, 4), randn(rng, 2, 3, 4), randn(rng, 2, 3).abs())
        yield cls(), (randn(rng, 3, 2), randn(rng, 3, 2), (randn(rng, 3) > -2).double())
