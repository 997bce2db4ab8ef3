"""Both ends of a spectrum from one Krylov space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor

from hesscore.budget import NEVER, Stop

Product = Callable[[Tensor], Tensor]
"""``(n, k) -> (n, k)``: a symmetric matrix times ``k`` vectors."""

MISSED = 1e-4
"""The chance that a spectrum ends further out than is said."""


@dataclass(frozen=True)
class Krylov:
    """An orthonormal ``basis (m, n)`` of rows, in which the matrix is tridiagonal, with this ``diagonal (m,)`` and
    ``off_diagonal (m - 1,)``; and the ends of its spectrum: the smallest and largest Ritz ``values (2,)`` with their
    ``vectors (n, 2)``.

    ``coupling`` is what the matrix does from the last row of the basis to the space outside: all that it does there.

    A residual says that an eigenvalue is near, not that it is the last one.  ``beyond (2,)`` does: the spectrum ends
    within it of each Ritz value, but for a chance of ``MISSED`` if the start was random.
    """

    basis: Tensor
    diagonal: Tensor
    off_diagonal: Tensor
    coupling: float
    values: Tensor
    vectors: Tensor
    beyond: Tensor

    @property
    def matrix(self) -> Tensor:
        """The matrix in the basis, ``(m, m)``."""
        return tridiagonal(self.diagonal, self.off_diagonal)


def lanczos(product: Product, start: Tensor, tolerance: float, max_steps: int, stop: Stop = NEVER) -> Krylov:
    """Lanczos with full re-orthogonalisation from ``start (n,)``.

    It stops when the residual estimates of both ends, and what may lie ``beyond`` them, are within ``tolerance`` times
    the largest absolute Ritz value, when the space is invariant, after ``max_steps`` products, or when told to.

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
            moved = orthogonal(moved, known)
        beta[m] = torch.linalg.vector_norm(moved, dtype=torch.float64)
        off_diagonal = beta[:m]
        ritz, inside = torch.linalg.eigh(tridiagonal(alpha[: m + 1], off_diagonal))
        residuals = beta[m] * inside[-1, [0, -1]].abs()
        limit, growth = tolerance * ritz.abs().max(), _growth(beta[: m + 1], len(start))
        if (residuals <= limit).all() and (_reached(ritz, limit) >= growth).all():
            break
        if stop():
            break
        vector = unit(orthogonal(unit(moved), known))  # where beta is small, rounding is most of what moved
    vectors = known.T @ inside[:, [0, -1]].to(known)
    coupling = float(beta[m]) if m + 1 < len(start) else 0.0
    beyond = ruled_out(ritz, beta[: m + 1], len(start))
    return Krylov(known, alpha[: m + 1], beta[:m], coupling, ritz[[0, -1]], vectors, beyond)


def unit(vectors: Tensor) -> Tensor:
    """Columns, or one vector, over their norms in float64."""
    return vectors / torch.linalg.vector_norm(vectors, dim=0, dtype=torch.float64).to(vectors)


def orthogonal(vectors: Tensor, basis: Tensor) -> Tensor:
    """What of ``vectors (n,)`` or ``(n, k)`` is orthogonal to the rows of ``basis``.

    Products go in parts, as long sums lose digits.
    """
    parts = zip(basis.split(2**16, 1), vectors.split(2**16), strict=True)
    return vectors - basis.T @ torch.stack([rows @ part for rows, part in parts]).sum(0)


def lockstep(
    product: Product, starts: Tensor, steps: int, least: float, outside: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Lanczos with full re-orthogonalisation from each column of ``starts (n, k)``, outside the rows of a basis.

    Each step yields ``alpha`` and ``beta (k, m)``: the diagonals of the matrices in the ``k`` spaces so far, and what
    is beside them, the last entry of which leads out.  What is no longer than ``least`` is rounding: it becomes zero,
    as its space is exhausted.
    """

    def rest(vectors: Tensor) -> Tensor:
        return vectors if outside is None else orthogonal(vectors, outside)

    vectors, known = unit(starts), list[Tensor]()
    alpha, beta = starts.new_zeros(2, starts.shape[1], max(steps, 0), dtype=torch.float64)
    for m in range(steps):
        known.append(vectors)
        moved = rest(product(vectors))
        alpha[:, m] = (vectors * moved).sum(0, dtype=torch.float64)
        for _ in range(2):
            for earlier in known:
                moved = moved - earlier * (earlier * moved).sum(0, dtype=torch.float64).to(moved)
            moved = rest(moved)
        norms = torch.linalg.vector_norm(moved, dim=0, dtype=torch.float64)
        beta[:, m] = torch.where(norms > least, norms, 0.0)
        yield alpha[:, : m + 1], beta[:, : m + 1]
        vectors = torch.where(norms > least, moved / norms.to(moved), 0.0)


def tridiagonal(alpha: Tensor, beta: Tensor) -> Tensor:
    """The matrices ``(..., m, m)`` with these diagonals ``(..., m)``, and ``(..., m - 1)`` beside them."""
    return torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)


def ruled_out(ritz: Tensor, beta: Tensor, n: int) -> Tensor:
    """How far outside the Ritz values ``(m,)`` the spectrum may go on, at either end: see ``Krylov``."""
    return _beyond(ritz, _growth(beta, n))


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
