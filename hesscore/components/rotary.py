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
    """Rotate feature ``i`` against feature ``i + d/2`` by the angle of the token's position.  Linear, orthogonal.

    ``x`` is ``(batch, length, *heads, d)``; ``cos`` and ``sin`` are ``(length, d/2)`` constants.
    """

    def value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Any]:
        length, half = cos.shape
        beside_heads = (length, *(1,) * (x.ndim - 3), half)
        kept = cos.reshape(beside_heads), sin.reshape(beside_heads)
        return self.rotate(x, *kept), kept

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (cos, sin), dx = kept, tangents[0]
        return self.rotate(dx, cos, sin)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        cos, sin = kept
        return (self.rotate(cotangent, cos, -sin),)

    def norms(self, kept: Any) -> Norms:
        return Norms((1.0,))

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        for shape in (1, 3, 1, 4), (2, 5, 2, 2, 6):
            angle = randn(rng, shape[1], shape[-1] // 2)
            yield cls(), (randn(rng, *shape), angle.cos(), angle.sin())
