"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn


@dataclass(frozen=True)
class Rotary(Component):
    """Rotate feature ``i < r/2`` against feature ``i + r/2`` by the angle of the token's position.  Linear.

    ``x`` is ``(batch, length, *heads, d)`` with ``d >= r``; ``cos`` and ``sin`` are ``(length, r/2)`` constants, which
    may have a factor.
    """

    def value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Any]:
        length, half = cos.shape
        beside_heads = (length, *(1,) * (x.ndim - 3), half)
        kept = cos.reshape(beside_heads), sin.reshape(beside_heads), x.shape[-1] > 2 * half
        return self.rotate(x, *kept[:2]), kept

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (cos, sin, _), dx = kept, tangents[0]
        return self.rotate(dx, cos, sin)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        cos, sin, _ = kept
        return (self.rotate(cotangent, cos, -sin),)

    def norms(self, kept: Any) -> Norms:
        """The largest factor; what is not rotated has 1."""
        cos, sin, rest = kept
        return Norms((max(float(cos.hypot(sin).max()), float(rest)),))

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        for shape in (1, 3, 1, 4), (2, 5, 2, 2, 6):
            angle = randn(rng, shape[1], shape[-1] // 2)
            yield cls(), (randn(rng, *shape), angle.cos(), angle.sin())
        yield cls(), (randn(rng, 1, 3, 2, 5), 2 * angle[:3, :2].cos(), 2 * angle[:3, :2].sin())
