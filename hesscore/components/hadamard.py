"""Hadamard product: gates (SwiGLU, GEGLU) and the gain of a norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, align, randn, unbroadcast


@dataclass(frozen=True)
class Hadamard(Component):
    """``y = a * b`` elementwise; ``b`` may be broadcast to the shape of ``a``.  Bilinear."""

    kind = "product"

    def value(self, a: Tensor, b: Tensor) -> tuple[Tensor, Any]:
        return a * b, (a, b)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (a, b), (da, db) = kept, tangents
        if db is None:
            return da * b
        turned = a * align(db, a.ndim)
        return turned if da is None else turned.addcmul_(da, b)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        a, b = kept
        return cotangent * b if needs[0] else None, unbroadcast(cotangent * a, b.shape) if needs[1] else None

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        (a, b), (da, db) = kept, tangents
        return (
            bent * align(db, a.ndim) if needs[0] and db is not None else None,
            unbroadcast(bent * da, b.shape) if needs[1] and da is not None else None,
        )

    def norms(self, kept: Any) -> Norms:
        a, b = kept
        spread = unbroadcast(a.square()[None], b.shape).max().sqrt()
        return Norms((float(b.abs().max()), float(spread)), {(0, 1): 1.0})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls(), (randn(rng, 2, 3, 4), randn(rng, 2, 3, 4))
        yield cls(), (randn(rng, 2, 3, 4), randn(rng, 4))
        yield cls(), (randn(rng, 2, 3), randn(rng, 2, 1))
