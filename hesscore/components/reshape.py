"""Reshape: splitting the features into heads, and joining them again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn


@dataclass(frozen=True)
class Reshape(Component):
    """``y = x`` with its trailing axes ``before`` seen as ``after``.  Linear and orthogonal."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def value(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.reshape(x, self.before, self.after), None

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (dx,) = tangents
        return self.reshape(dx, self.before, self.after)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (self.reshape(cotangent, self.after, self.before),)

    @staticmethod
    def reshape(x: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
        return x.reshape(*x.shape[: x.ndim - len(old)], *new)

    def norms(self, kept: Any) -> Norms:
        return Norms((1.0,))

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls((6,), (3, 2)), (randn(rng, 2, 6),)
        yield cls((2, 1, 2), (4,)), (randn(rng, 2, 3, 2, 1, 2),)
