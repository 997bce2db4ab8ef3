"""Two-sided enclosures of eigenvalues and spectral norms of a Kronecker sum, without the matrix.

Let ``Q`` have orthonormal columns, ``P = I - Q Q^T``, ``T = Q^T H Q`` and ``P H Q = W S`` with orthonormal ``W``.  The
eigenvalues of ``T`` are Rayleigh quotients, so that ``lambda_max(T) <= lambda_max(H)``; and ``|H Q| <= |H|``.  For a
unit ``x = Q y + z`` with ``z = P z``

    x^T H x  =  y^T T y + 2 z^T W S y + z^T H z  <=  lambda_max [T, S^T; S, f I],    f >= |P H P|                   (3)

where ``|P H P|_F`` will do for ``f``: ``f^2 = |H|_F^2 - |T|_F^2 - 2 |S|_F^2``.  Where the spectrum falls off, a few
columns leave little.  Where it does not, another bound is tight if the maps are near to multiples of the identity:

    -lambda_max(sum_n b_n^- phi_n phi_n^T)  <=  sum_n phi_n phi_n^T (x) B_n  <=  lambda_max(sum_n b_n^+ phi_n phi_n^T)

as ``-b_n^- <= B_n <= b_n^+`` with ``b_n^-, b_n^+ >= 0``.  The upper number is the smaller of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from hesscore.explicit.kronecker import KroneckerSum, Place, Term

COLUMNS = 64
"""Of ``Q``: as many products, for both ends of the spectrum."""

AT_ONCE = 4
"""Columns of one product: many are faster together, and reach less far."""

TINY = torch.finfo(torch.float64).tiny

ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Of a number computed here, over the sum of the norms of all ``(phi_n psi_n^T) (x) B_n``."""


class Enclosure(NamedTuple):
    """``lower <= number <= upper``, rounding included."""

    lower: float
    upper: float


def enclose_ends(matrix: KroneckerSum) -> tuple[Enclosure, Enclosure]:
    """The smallest and the largest eigenvalue of a symmetric matrix of finite factors."""
    return _ends(matrix, [slice(matrix.shape[0])])


def enclose_norm(matrix: KroneckerSum) -> Enclosure:
    """The spectral norm of any matrix of finite factors: the largest eigenvalue of ``[0, H; H^T, 0]``."""
    rows, columns = matrix.shape
    n = rows + columns
    terms = [replace(t, by=t.by._replace(start=t.by.start + rows), mirrored=True) for t in matrix.all_terms]
    lower, upper = _ends(KroneckerSum((n, n), matrix.dtype, terms), [slice(rows), slice(rows, n)])[1]
    return Enclosure(max(lower, 0.0), upper)


def _ends(matrix: KroneckerSum, parts: Sequence[slice]) -> tuple[Enclosure, Enclosure]:
    """In float64, in units of the ``size`` of the factors.  Of two ``parts``, the matrix moves each to the other."""
    size = sum(_size(term) for term in matrix.all_terms)
    if size == 0:
        return Enclosure(0.0, 0.0), Enclosure(0.0, 0.0)
    if not isfinite(size):  # beyond the range of floats, so that nothing is known
        return Enclosure(-inf, inf), Enclosure(-inf, inf)
    terms = [_scaled(term, size) for term in matrix.terms if _size(term)]  # what is zero has no unit
    matrix = KroneckerSum(matrix.shape, torch.float64, terms)
    basis, moved = _krylov(matrix, parts)
    inside = basis.T @ moved
    inside = (inside + inside.T) / 2
    across = torch.linalg.qr(moved - basis @ inside).R
    square = matrix.frobenius() ** 2 - float(inside.square().sum() + 2 * across.square().sum())
    outside = (max(square, 0.0) + ROUNDING) ** 0.5
    paired = len(parts) == 2  # then with each eigenvalue, of P H P too, its negative is one
    if paired:
        outside /= 2**0.5
    if len(inside) == len(basis):
        across = across[:0]
    ends = []
    for sign, dominated in zip((1, -1), _domination(matrix), strict=True):
        ritz = torch.linalg.matrix_norm(moved, 2) if paired else torch.linalg.eigvalsh(sign * inside)[-1]
        rest = outside * torch.eye(len(across), dtype=torch.float64)
        extended = torch.cat([torch.cat([sign * inside, across.T], 1), torch.cat([across, rest], 1)])
        upper = min(float(torch.linalg.eigvalsh(extended)[-1]), dominated)
        ends.append(Enclosure((float(ritz) - ROUNDING) * size, (upper + ROUNDING) * size))
    top, bottom = ends
    return Enclosure(-bottom.upper, -bottom.lower), top


def _krylov(matrix: KroneckerSum, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of a block Krylov space, each column within one part, and its product with the matrix."""
    n, k = matrix.shape[0], len(parts)
    ahead = torch.randn(n, AT_ONCE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = moved = ahead.new_zeros(n, k, 0)
    most = min(COLUMNS // k, *(len(ahead[part]) for part in parts))
    while (known := basis.shape[2]) < most:
        new = ahead.new_zeros(n, k, min(AT_ONCE, most - known))
        for i, part in enumerate(parts):  # these columns of Q are orthogonal even where nothing new is ahead
            q = torch.linalg.qr(torch.cat([basis[part, i], ahead[part]], 1)).Q
            new[part, i] = q[:, known : known + new.shape[2]]
        product = (matrix @ new.flatten(1)).view_as(new)
        basis, moved, ahead = torch.cat([basis, new], 2), torch.cat([moved, product], 2), product.sum(1)
    return basis.flatten(1), moved.flatten(1)


def _domination(matrix: KroneckerSum) -> tuple[float, float]:
    """Upper bounds of the largest eigenvalue and of minus the smallest one.

    With ``t_i`` the norm of what ``x`` has on the cells ``i``, and bounds ``b_ij`` of the pieces between them,
    ``x^T H x <= t^T b t <= lambda_max(b) |t|^2``, and ``|t|^2 <= shared |x|^2`` if so many cells share an entry.
    """
    pieces: dict[tuple[Place, Place], list[Term]] = defaultdict(list)
    for term in matrix.all_terms:
        pieces[term.at, term.by].append(term)
    places = {place.cells: place for pair in pieces for place in pair}
    number = {cells: i for i, cells in enumerate(places)}
    bounds = torch.zeros(2, len(places), len(places), dtype=torch.float64)
    for (at, by), terms in pieces.items():
        bounds[:, number[at.cells], number[by.cells]] += _piece(terms)
    shared = torch.zeros(matrix.shape[0], 1)
    for place in places.values():
        place.view(shared).add_(1)
    top, bottom = torch.linalg.eigvalsh((bounds + bounds.mT) / 2)[:, -1] * shared.max()
    return float(top), float(bottom)


def _piece(terms: list[Term]) -> Tensor:
    """Bounds ``(2,)`` of the top and of minus the bottom of a sum of terms at one place.

    For unit ``U`` and ``V``, by Cauchy and Schwarz, with unit features and ``w_n = |B_n| |phi_n| |psi_n|``,

        (sum_n w_n |U^T phi_n| |V^T psi_n|)^2 <= lambda_max(sum_n w_n phi_n phi_n^T) lambda_max(sum_n w_n psi_n psi_n^T)
    """
    phi, psi = torch.cat([term.phi for term in terms]), torch.cat([term.psi for term in terms])
    lengths = phi.norm(dim=1), psi.norm(dim=1)
    roots = (torch.cat([_strength(term) for term in terms], 1) * lengths[0] * lengths[1]).sqrt()
    norms = [
        torch.linalg.matrix_norm(roots[..., None] * (features / length.clamp(min=TINY)[:, None]), 2)
        for features, length in zip((phi, psi), lengths, strict=True)
    ]
    return norms[0] * norms[1]


def _strength(term: Term) -> Tensor:
    """``(2, N)``: how far each map is positive and how far negative if ``phi = psi``, else its norm twice."""
    if term.at == term.by and torch.equal(term.phi, term.psi):
        ends = torch.linalg.eigvalsh((term.maps + term.maps.mT) / 2)
        return torch.stack([ends[:, -1], -ends[:, 0]]).clamp(min=0)
    return torch.linalg.matrix_norm(term.maps, 2).expand(2, -1)


def _size(term: Term) -> float:
    (phi, psi, maps), factor = _in_units(term)
    return factor * float((phi.norm(dim=1) * psi.norm(dim=1) * torch.linalg.matrix_norm(maps)).sum())


def _scaled(term: Term, size: float) -> Term:
    """Over ``size``; equal features stay equal."""
    (phi, psi, maps), factor = _in_units(term)
    return replace(term, phi=phi, psi=psi, maps=maps * (factor / size))


def _in_units(term: Term) -> tuple[list[Tensor], float]:
    """The factors, each with 1 for its largest entry, whose squares are neither lost nor infinite; and what is left."""
    factors = [factor.double() for factor in (term.phi, term.psi, term.maps)]
    most = [float(factor.abs().max()) or 1.0 for factor in factors]
    low, middle, high = sorted(most)
    return [factor / unit for factor, unit in zip(factors, most, strict=True)], low * high * middle
