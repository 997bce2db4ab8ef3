"""Product: linear layers, attention scores and mixing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn
from hesscore.contraction import K, contract


@dataclass(frozen=True)
class Product(Component):
    """``Y = scale * A B``, contracted as an einsum ``equation`` of two operands says.

    Bilinear, so one equation states everything: ``dY = c (dA B + A dB)``, and the curvature ``<delta, dA dB>`` is the
    same contraction with ``delta`` in the place of ``Y``.  Each lower-case letter must stand in exactly two or three
    of the places ``A, B, Y``.
    """

    equation: str
    scale: float = 1.0

    kind = "product"

    @cached_property
    def terms(self) -> tuple[str, str, str]:
        operands, y = self.equation.split("->")
        a, b = operands.split(",")
        return a, b, y

    def contract(self, left: str, x: Tensor, right: str, y: Tensor, out: str, onto: Tensor | None = None) -> Tensor:
        if self.scale != 1.0:  # the smaller operand is never larger than the result
            x, y = (x * self.scale, y) if x.numel() <= y.numel() else (x, y * self.scale)
        return contract(left, x, right, y, out, onto)

    def value(self, a: Tensor, b: Tensor) -> tuple[Tensor, Any]:
        left, right, out = self.terms
        return self.contract(left, a, right, b, out), (a, b)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (a, b), (da, db), (left, right, out) = kept, tangents, self.terms
        if db is None:
            return self.contract(K + left, da, right, b, K + out)
        moved = None if da is None else self.contract(K + left, da, right, b, K + out)
        return self.contract(left, a, K + right, db, K + out, moved)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs, onto: Cotangents = (None, None)) -> Cotangents:
        (a, b), (left, right, out) = kept, self.terms
        return (
            self.contract(K + out, cotangent, right, b, K + left, onto[0]) if needs[0] else None,
            self.contract(left, a, K + out, cotangent, K + right, onto[1]) if needs[1] else None,
        )

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        (da, db), (left, right, out) = tangents, self.terms
        return (
            self.contract(out, bent, K + right, db, K + left) if needs[0] and db is not None else None,
            self.contract(K + left, da, out, bent, K + right) if needs[1] and da is not None else None,
        )

    def pull(self, kept: Any, cotangent: Tensor, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return self.vjp(kept, cotangent, needs, self.curvature(kept, bent, tangents, needs))

    def norms(self, kept: Any) -> Norms:
        """``|dY/dA| = |c| |B|_2`` (over the batch, the largest) and the other way round; curvature ``|c|``."""
        (a, b), (left, right, out) = kept, self.terms
        return Norms(
            jacobian=(self.factor_norm(right, b, left, out), self.factor_norm(left, a, right, out)),
            curvature={(0, 1): abs(self.scale)},
        )

    def factor_norm(self, mine: str, factor: Tensor, other: str, out: str) -> float:
        batch = [c for c in mine if c in other and c in out]
        contracted = [c for c in mine if c in other and c not in out]
        free = [c for c in mine if c not in other]
        sizes = dict(zip(mine, factor.shape, strict=True))
        rows = torch.Size([sizes[c] for c in contracted]).numel()
        matrices = torch.einsum(f"{mine}->{''.join(batch + contracted + free)}", factor)
        matrices = matrices.reshape(*(sizes[c] for c in batch), rows, -1)
        return abs(self.scale) * float(torch.linalg.matrix_norm(matrices, 2).max())

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls("ab,bc->ac"), (randn(rng, 3, 4), randn(rng, 4, 2))
        yield cls("bld,de->ble"), (randn(rng, 2, 3, 4), randn(rng, 4, 5))
        yield cls("bigqk,bjgk->bgqij", 0.5), (randn(rng, 2, 3, 2, 2, 4), randn(rng, 2, 3, 2, 4))
        yield cls("bgqij,bjgk->bigqk"), (randn(rng, 1, 2, 1, 3, 3), randn(rng, 1, 3, 2, 4))
        yield cls("bld,vd->blv"), (randn(rng, 1, 4, 3), randn(rng, 6, 3))
