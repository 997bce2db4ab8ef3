"""Matrices that act on each token alone, row-wise vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hesscore.explicit.kronecker import Place, check_vectors


def block_diagonal(blocks: Tensor) -> Tensor:
    """``(N, a, b)`` as ``(N a, N b)``: a block for each token, zeros elsewhere."""
    n, a, b = blocks.shape
    matrix = blocks.new_zeros(n * a, n * b)
    matrix.as_strided((n, a, b), (a * n * b + b, n * b, 1)).copy_(blocks)
    return matrix


class Factor(NamedTuple):
    """``phi_n^T (x) M_n`` at the columns ``by``: ``features (N, p)`` and ``maps (N, z, m)``."""

    by: Place
    features: Tensor
    maps: Tensor


class TokenJacobian(NamedTuple):
    """``dY/d theta`` of outputs ``Y (N, z)`` by parameters, ``shape (N z, n)``: ``dY_n = sum_t phi_tn^T (x) M_tn``.

    A feature and a small map for each token are all that a weight does to it.
    """

    shape: tuple[int, int]
    factors: Sequence[Factor]

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """``dY`` for a tangent ``(n,)`` or, many at once, ``(n, k)``."""
        check_vectors(vectors, self.shape, self.factors[0].maps.dtype)
        many = (vectors if vectors.ndim == 2 else vectors[:, None]).contiguous()
        moved = (
            torch.stack(
                [
                    torch.einsum("np,nzm,pmk->nzk", factor.features, factor.maps, factor.by.view(many))
                    for factor in self.factors
                ]
            )
            .sum(0)
            .flatten(0, 1)
        )
        return moved if vectors.ndim == 2 else moved[:, 0]

    def dense(self) -> Tensor:
        """``(N z, n)``."""
        n, (count, z) = self.shape[1], self.factors[0].maps.shape[:2]
        whole = len(self.factors) == 1 and self.factors[0].maps.shape[2] * self.factors[0].features.shape[1] == n
        # one weight and nothing beside it is written once
        matrix = (torch.empty if whole else torch.zeros)(self.shape, dtype=self.factors[0].maps.dtype)
        for by, features, maps in self.factors:
            (p, feature), (m, output) = by.features, by.outputs
            target = matrix.as_strided((count, z, p, m), (z * n, n, feature, output), by.start)
            features, maps = features.view(count, 1, p, 1), maps.unsqueeze(2)
            if whole:
                torch.mul(features, maps, out=target)
            else:
                target.addcmul_(features, maps)
        return matrix
