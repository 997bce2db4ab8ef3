"""Both ends of a spectrum from one Krylov space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""``(n, k) -> (n, k)``: a symmetric matrix times ``k`` vectors."""

MISSED = 1e-4
"""The chance that a spectrum ends further out than is said."""


@dataclass(frozen=True)
class Krylov:
    """An orthonormal ``basis (m, n)`` of rows, in which the matrix has this ``diagonal``, and the ends of its spectrum:
    the smallest and largest Ritz ``values (2,)`` with their ``vectors (n, 2)``.

    A residual says that an eigenvalue is near, not that it is the last one.  ``beyond (2,)`` does: the spectrum ends
    within it of each Ritz value, but for a chance of ``MISSED`` if the start was random.
    """

    basis: Tensor
    diagonal: Tensor
    values: Tensor
    vectors: Tensor
    beyond: Tensor


def lanczos(product: Product, start: Tensor, tolerance: float, max_steps: int) -> Krylov:
    """Lanczos with full re-orthogonalisation from ``start (n,)``.

    It stops when the residual estimates of both ends, and what may lie ``beyond`` them, are within ``tolerance`` times
    the largest absolute Ritz value, when the space is invariant, or after ``max_steps`` products.

    Re-orthogonalising costs ``12 n m`` operations a step, far less than a product, and keeps ghosts (false copies of
    converged eigenvalues) out.
    """
    steps = min(len(start), max_steps)
    basis = start.new_empty(steps, len(start))  # rows that are never reached take no memory
    alpha, beta = torch.zeros(2, steps, dtype=torch.float64)  # float32 would lose digits in sums over millions
    vector = unit(start)
    for m in range(steps):
        basis[m] = vector
        moved = product(vector[:, None])[:, 0]
        alpha[m] = (vector * moved).sum(dtype=torch.float64)
        known = basis[: m + 1]
        for _ in range(2):  # one pass loses digits along pairs that have converged
            moved = _orthogonal(moved, known)
        beta[m] = torch.linalg.vector_norm(moved, dtype=torch.float64)
        off_diagonal = beta[:m]
        ritz, inside = torch.linalg.eigh(alpha[: m + 1].diag() + off_diagonal.diag(1) + off_diagonal.diag(-1))
        residuals = beta[m] * inside[-1, [0, -1]].abs()
        limit, growth = tolerance * ritz.abs().max(), _growth(beta[: m + 1], len(start))
        if (residuals <= limit).all() and (_reached(ritz, limit) >= growth).all():
            break
        vector = unit(_orthogonal(unit(moved), known))  # where beta is small, rounding is most of what moved
    vectors = known.T @ inside[:, [0, -1]].to(known)
    return Krylov(known, alpha[: m + 1], ritz[[0, -1]], vectors, _beyond(ritz, growth))


def unit(vectors: Tensor) -> Tensor:
    """Columns, or one vector, over their norms in float64."""
    return vectors / torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float64).to(vectors)


def _orthogonal(vector: Tensor, basis: Tensor) -> Tensor:
    """What of ``vector`` is orthogonal to the rows of ``basis``; products go in parts, as long sums lose digits."""
    parts = zip(basis.split(2**16, 1), vector.split(2**16), strict=True)
    return vector - basis.T @ torch.stack([rows @ part for rows, part in parts]).sum(0)


def _growth(beta: Tensor, n: int) -> Tensor:
    """The logarithm of ``prod |mu - ritz|`` at which an eigenvalue ``mu`` outside the Ritz values is ruled out.

    Along its eigenvector ``u``, the next basis vector is ``prod (mu - ritz)/prod beta`` times the start.  As neither is
    longer than 1, the start has at most the inverse of that along ``u``; a random one has so little with a chance below
    ``sqrt(2 n/pi)`` times it.  (Van Dorsselaer, Hochstenbach, van der Vorst, SIAM J. Matrix Anal. Appl. 22, 2000.)
    """
    return beta.log().sum() + log(2 * n / pi) / 2 - log(MISSED)


def _reached(ritz: Tensor, outside: Tensor) -> Tensor:
    """``log prod |mu - ritz|`` for ``mu`` that lie ``outside`` the smallest and the largest Ritz value."""
    return (torch.stack([ritz - ritz[0], ritz[-1] - ritz], 1) + outside).log().sum(0)


def _beyond(ritz: Tensor, growth: Tensor) -> Tensor:
    """How far outside both ends ``growth`` is reached, by bisection."""
    low, high = torch.zeros(2, dtype=torch.float64), (growth / len(ritz)).exp().repeat(2)
    for _ in range(100):
        middle = (low + high) / 2
        ruled_out = _reached(ritz, middle) >= growth
        low, high = torch.where(ruled_out, low, middle), torch.where(ruled_out, middle, high)
    return high
