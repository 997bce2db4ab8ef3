"""Both ends of a spectrum from one Krylov space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""``(n, k) -> (n, k)``: a symmetric matrix times ``k`` vectors."""


@dataclass(frozen=True)
class Krylov:
    """An orthonormal ``basis (m, n)`` of rows, in which the matrix has this ``diagonal``, and the ends of its spectrum:
    the smallest and largest Ritz ``values (2,)`` with their ``vectors (n, 2)``.
    """

    basis: Tensor
    diagonal: Tensor
    values: Tensor
    vectors: Tensor


def lanczos(product: Product, start: Tensor, tolerance: float, max_steps: int) -> Krylov:
    """Lanczos with full re-orthogonalisation from ``start (n,)``.

    It stops when the residual estimates of both ends are within ``tolerance`` times the largest absolute Ritz value,
    when the space is invariant, or after ``max_steps`` products.  Re-orthogonalising costs ``8 n m`` operations a step,
    far less than a product, and keeps ghosts (false copies of converged eigenvalues) out.
    """
    steps = min(len(start), max_steps)
    basis = start.new_empty(steps, len(start))  # rows that are never reached take no memory
    alpha, beta = start.new_zeros(steps), start.new_zeros(steps)
    vector = start / start.norm()
    for m in range(steps):
        basis[m] = vector
        moved = product(vector[:, None])[:, 0]
        alpha[m] = vector @ moved
        known = basis[: m + 1]
        for _ in range(2):  # one pass loses digits along pairs that have converged
            moved = moved - known.T @ (known @ moved)
        beta[m] = moved.norm()
        off_diagonal = beta[:m]
        ritz, inside = torch.linalg.eigh(alpha[: m + 1].diag() + off_diagonal.diag(1) + off_diagonal.diag(-1))
        residuals = beta[m] * inside[-1, [0, -1]].abs()
        if (residuals <= tolerance * ritz.abs().max()).all():
            break
        vector = moved / beta[m]
    return Krylov(known, alpha[: m + 1], ritz[[0, -1]], known.T @ inside[:, [0, -1]])
