"""A block in other coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hesscore.curvature import Block, Curvature


@dataclass(frozen=True)
class Scaled:
    """``S H S`` of a block ``H`` and the diagonal ``S`` with these entries ``(n,)``."""

    block: Block
    scale: Tensor

    @property
    def owner(self) -> Curvature:
        return self.block.owner

    @property
    def shape(self) -> tuple[int, int]:
        return self.block.shape

    @property
    def at_once(self) -> int:
        return self.block.at_once

    def __matmul__(self, vectors: Tensor) -> Tensor:
        scale = self.scale[:, None]
        return scale * (self.block @ (scale * vectors))

    def attribution(self, vectors: Tensor) -> dict[str, Tensor]:
        """Of the block that is scaled."""
        return self.block.attribution(self.scale[:, None] * vectors)
