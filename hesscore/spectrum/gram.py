"""The singular values of a pair of blocks, as eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from hesscore.curvature import Block, Curvature


@dataclass(frozen=True)
class Gram:
    """``A^T A`` of a block ``unit A``, or ``A A^T`` if that is smaller: its eigenvalues are the squares of A's values.

    The ``unit`` keeps the squares of small numbers.
    """

    block: Block
    unit: float

    @property
    def pair(self) -> tuple[Block, Block]:
        a = self.block
        both = a, replace(a, rows=a.columns, columns=a.rows)
        return both if a.shape[1] <= a.shape[0] else both[::-1]

    @property
    def owner(self) -> Curvature:
        return self.block.owner

    @property
    def shape(self) -> tuple[int, int]:
        n = min(self.block.shape)
        return n, n

    @property
    def at_once(self) -> int:
        return self.block.at_once

    def __matmul__(self, vectors: Tensor) -> Tensor:
        there, back = self.pair
        return back @ (there @ vectors / self.unit) / self.unit


def size_of(block: Block, rng: Generator) -> float:
    """About the size of a block."""
    start = torch.randn(block.shape[1], 1, generator=rng, dtype=torch.float64).to(block.owner.loss)
    return float((block @ start).abs().max()) or 1.0
