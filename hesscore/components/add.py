"""Sum: residual connections, biases, position embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, align, randn, unbroadcast


@dataclass(frozen=True)
class Add(Component):
    """``y = a + b``; ``b`` may be broadcast to the shape of ``a``.  Linear: it only transports."""

    def value(self, a: Tensor, b: Tensor) -> tuple[Tensor, Any]:
        return a + b, (a.shape, b.shape)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (shape, _), (da, db) = kept, tangents
        if db is None:
            return da
        db = align(db, len(shape))
        return db.expand(-1, *shape) if da is None else da + db

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return cotangent if needs[0] else None, unbroadcast(cotangent, kept[1]) if needs[1] else None

    def norms(self, kept: Any) -> Norms:
        shape, shape_b = kept
        return Norms((1.0, (prod(shape) / prod(shape_b)) ** 0.5))

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls(), (randn(rng, 2, 3, 4), randn(rng, 2, 3, 4))
        yield cls(), (randn(rng, 2, 3, 4), randn(rng, 4))
        yield cls(), (randn(rng, 2, 3, 4), randn(rng, 3, 4))
