"""Prepend: learned tokens before those of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn


@dataclass(frozen=True)
class Prepend(Component):
    """``y = (a; x)`` along the tokens: ``a (n, d)`` is the same for every sequence of ``x (b, l, d)``.  Linear."""

    def value(self, a: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        return torch.cat((a.expand(len(x), *a.shape), x), 1), (a.shape, x.shape)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (n, d), (batch, length, _) = kept
        da, dx = tangents
        given = da if dx is None else dx
        y = given.new_zeros(len(given), batch, n + length, d)
        if da is not None:
            y[:, :, :n] = da[:, None]
        if dx is not None:
            y[:, :, n:] = dx
        return y

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        (n, _), _ = kept
        return (
            cotangent[:, :, :n].sum(1) if needs[0] else None,
            cotangent[:, :, n:] if needs[1] else None,
        )

    def norms(self, kept: Any) -> Norms:
        _, (batch, _, _) = kept
        return Norms((batch**0.5, 1.0))

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls(), (randn(rng, 1, 4), randn(rng, 2, 3, 4))
        yield cls(), (randn(rng, 2, 3), randn(rng, 1, 1, 3))
