"""Matrices that act on each token alone, row-wise vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hesscore.explicit.kronecker import Place


def block_diagonal(blocks: Tensor) -> Tensor:
    """``(N, a, b)`` as ``(N a, N b)``: a block for each token, zeros elsewhere."""
    n, a, b = blocks.shape
    matrix = blocks.new_zeros(n, a, n, b)
    matrix.diagonal(dim1=0, dim2=2).copy_(blocks.permute(1, 2, 0))
    return matrix.view(n * a, n * b)


@dataclass(frozen=True)
class Factor:
    """``phi_n^T (x) M_n`` at the columns ``by``: ``features (N, p)`` and ``maps (N, z, m)``."""

    by: Place
    features: Tensor
    maps: Tensor

    @property
    def product(self) -> Tensor:
        """``(N, z, p, m)``"""
        return self.features[:, None, :, None] * self.maps[:, :, None, :]


@dataclass(frozen=True)
class TokenJacobian:
    """``dY/d theta`` of outputs ``Y (N, z)`` by parameters, ``shape (N z, n)``: ``dY_n = sum_t phi_tn^T (x) M_tn``.

    A feature and a small map for each token are all that a weight does to it.
    """

    shape: tuple[int, int]
    factors: Sequence[Factor]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """``dY (N z, k)`` for tangents ``(n, k)``."""
        vectors = vectors.contiguous()
        return (
            torch.stack(
                [
                    torch.einsum("np,nzm,pmk->nzk", factor.features, factor.maps, factor.by.view(vectors))
                    for factor in self.factors
                ]
            )
            .sum(0)
            .flatten(0, 1)
        )

    def dense(self) -> Tensor:
        """``(N z, n)``."""
        n, (tokens, z) = self.shape[1], self.factors[0].maps.shape[:2]
        if len(self.factors) == 1:  # of one weight: written once, without zeros before it
            return self.factors[0].product.reshape(self.shape)
        matrix = self.factors[0].maps.new_zeros(self.shape)
        for factor in self.factors:
            (p, feature), (m, output) = factor.by.features, factor.by.outputs
            target = matrix.as_strided((tokens, z, p, m), (z * n, n, feature, output), factor.by.start)
            target += factor.product
        return matrix
