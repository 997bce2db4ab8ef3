"""Embedding: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, randn


@dataclass(frozen=True)
class Embedding(Component):
    """``y = table[ids]``, ``table`` is ``(vocabulary, d)``.  Linear in the table."""

    def value(self, table: Tensor, ids: Tensor) -> tuple[Tensor, Any]:
        return table[ids], (ids, len(table))

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (ids, _), table = kept, tangents[0]
        return table[:, ids]

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        ids, rows = kept
        by_token = cotangent.flatten(1, ids.ndim)
        table = by_token.new_zeros(len(by_token), rows, by_token.shape[-1])
        return (table.index_add_(1, ids.flatten(), by_token),)

    def norms(self, kept: Any) -> Norms:
        """The square root of how often the most frequent row is used."""
        ids, rows = kept
        return Norms((float(torch.bincount(ids.flatten(), minlength=rows).max()) ** 0.5,))

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls(), (randn(rng, 5, 3), torch.tensor([[0, 4, 4], [1, 0, 4]]))
        yield cls(), (randn(rng, 2, 4), torch.tensor([1, 1, 0]))
