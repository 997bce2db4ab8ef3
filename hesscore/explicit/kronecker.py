"""Token-wise Kronecker sums: what the Hessian of one block is made of, as an operator.

A weight moves every token ``n`` through a feature ``phi_n`` and a small map, so that a block of the Hessian is

    H_ab = sum_n  (phi_n psi_n^T) (x) B_n                                                 (2)

with features ``phi_n (p_a)`` and ``psi_n (p_b)`` and maps ``B_n (m_a, m_b)``.  Products, trace, diagonal and Frobenius
norm follow from the factors.  A plain matrix is such a sum of one token with one feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hesscore import memory
from hesscore.checks import check_tensor
from hesscore.curvature import pool
from hesscore.errors import UsageError

TILE = 2**17
"""Elements of ``dense`` that are computed at once: 1 MiB in float64, which stays in the cache."""


class Place(NamedTuple):
    """Where a matrix of features by outputs stands in a flat vector: its first entry, and both counts and strides."""

    start: int
    features: tuple[int, int]
    outputs: tuple[int, int]

    @property
    def cells(self) -> tuple[int, frozenset[tuple[int, int]]]:
        """The same for the same entries, whichever index is called the feature."""
        return self.start, frozenset((self.features, self.outputs))

    def view(self, vectors: Tensor) -> Tensor:
        """The entries of contiguous ``vectors (n, k)`` that stand here, as ``(p, m, k)``, sharing their memory."""
        (p, feature), (m, output), k = self.features, self.outputs, vectors.shape[1]
        start = vectors.storage_offset() + self.start * k  # they may be a slice of more
        return vectors.as_strided((p, m, k), (feature * k, output * k, 1), start)


@dataclass(frozen=True)
class Term:
    """``sum_n (phi_n psi_n^T) (x) B_n`` at the rows ``at`` and the columns ``by`` of a larger matrix.

    ``phi (N, p_a)``, ``psi (N, p_b)``, ``maps (N, m_a, m_b)``.
    """

    at: Place
    by: Place
    phi: Tensor
    psi: Tensor
    maps: Tensor
    mirrored: bool = False
    """Whether its transpose belongs to the matrix as well."""

    @property
    def cells(self) -> object:
        """The same for terms that stand on the same entries."""
        return self.at.cells, self.by.cells

    @property
    def numel(self) -> int:
        return self.phi.shape[1] * self.psi.shape[1] * self.maps[0].numel()

    @property
    def T(self) -> Term:
        return Term(self.by, self.at, self.psi, self.phi, self.maps.mT)

    def symmetric(self) -> list[Term]:
        """It and its transpose: as one term, unless both stand on the same cells."""
        return [self, self.T] if self.at.cells == self.by.cells else [replace(self, mirrored=True)]

    def place(self, matrix: Tensor) -> Tensor:
        """Where it stands in a contiguous ``matrix``: ``(p_a, m_a, p_b, m_b)``, sharing its memory."""
        n, at, by = matrix.shape[1], self.at, self.by
        return matrix.as_strided(
            (at.features[0], at.outputs[0], by.features[0], by.outputs[0]),
            (at.features[1] * n, at.outputs[1] * n, by.features[1], by.outputs[1]),
            at.start * n + by.start,
        )

    def tile(self, like: Term, rows: slice) -> Tensor:
        """Its entries at some features of ``like``, which stands on the same cells, in the axes of ``like.place``.

        One matrix product over the tokens.
        """
        a, b = self.at.features == like.at.features, self.by.features == like.by.features
        phi, maps = (self.phi[:, rows], self.maps) if a else (self.phi, self.maps[:, rows])
        pairs = (phi[:, :, None] * self.psi[:, None]).flatten(1)
        tile = (pairs.T @ maps.flatten(1)).view(phi.shape[1], self.psi.shape[1], *maps.shape[1:])
        return tile.permute(*((0, 2) if a else (2, 0)), *((1, 3) if b else (3, 1)))

    def inner(self, other: Term) -> float:
        """``<self, other>``, entry by entry, of two terms that stand on the same cells."""
        a, b = self.at.features == other.at.features, self.by.features == other.by.features
        if not a and b:
            return self.T.inner(other.T)
        if a and b:
            same = torch.einsum("nij,mij->nm", self.maps, other.maps)
            return float((self.phi @ other.phi.T * (self.psi @ other.psi.T) * same).sum())
        if a:  # the other has its columns the other way round
            mine = torch.einsum("nij,mj->nmi", self.maps, other.psi)
            theirs = torch.einsum("mij,nj->nmi", other.maps, self.psi)
            return float((self.phi @ other.phi.T * (mine * theirs).sum(-1)).sum())
        mine = torch.einsum("mi,nij,mj->nm", other.phi, self.maps, other.psi)
        theirs = torch.einsum("ni,mij,nj->nm", self.phi, other.maps, self.psi)
        return float((mine * theirs).sum())


@dataclass(frozen=True)
class KroneckerSum:
    """A matrix of ``shape`` as a sum of terms.  Any two of them stand on the same cells or on none in common."""

    shape: tuple[int, int]
    dtype: torch.dtype
    terms: Sequence[Term]

    @property
    def all_terms(self) -> Iterator[Term]:
        """Those that are mirrored, and their transposes, apart."""
        for term in self.terms:
            yield term
            if term.mirrored:
                yield term.T

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Product with ``(n,)`` or, many at once, ``(n, k)``."""
        check_vectors(vectors, self.shape, self.dtype)
        many = (vectors if vectors.ndim == 2 else vectors[:, None]).contiguous()
        out = many.new_zeros(self.shape[0], many.shape[1])
        for term in self.all_terms:
            small = torch.einsum("nq,qbk->nbk", term.psi, term.by.view(many))
            term.at.view(out).add_(torch.einsum("np,nak->pak", term.phi, term.maps @ small))
        return out.reshape(self.shape[0], *vectors.shape[1:])

    def dense(self) -> Tensor:
        """The whole matrix.  Its size is logged before it is formed, and refused beyond the free memory.

        Its cells are written once, tile by tile, by several threads.
        """
        n, m = self.shape
        memory.check(n * m * self.dtype.itemsize, f"a dense matrix of {n} x {m}")
        groups = _by_cells(self.terms)
        covered = sum(terms[0].numel * (1 + terms[0].mirrored) for terms in groups) == n * m
        make = torch.empty if covered else torch.zeros  # to touch fresh memory twice takes twice as long
        matrix = make(n, m, dtype=self.dtype)

        def fill(terms: Sequence[Term]) -> None:
            first = terms[0]
            target = first.place(matrix)
            features = len(target)
            at_once = max(1, TILE * features // target.numel())
            for start in range(0, features, at_once):
                part = slice(start, start + at_once)
                tile = first.tile(first, part)
                for term in terms[1:]:
                    tile += term.tile(first, part)
                target[part] = tile
                if first.mirrored:
                    first.T.place(matrix)[:, :, part] = tile.permute(2, 3, 0, 1)

        list(pool(len(groups)).map(fill, groups))
        return matrix

    def diagonal(self) -> Tensor:
        """The diagonal of a square matrix, exactly."""
        if self.shape[0] != self.shape[1]:
            raise UsageError(f"a matrix of {self.shape} has no diagonal")
        out = torch.zeros(self.shape[0], 1, dtype=self.dtype)
        for term in self.all_terms:
            if term.at == term.by:
                maps = term.maps.diagonal(dim1=1, dim2=2)
                term.at.view(out)[..., 0] += (term.phi * term.psi).T @ maps
            elif term.at.cells == term.by.cells:  # with the indices of one side crossed
                term.at.view(out)[..., 0] += torch.einsum("np,na,nap->pa", term.phi, term.psi, term.maps)
        return out[:, 0]

    def trace(self) -> float:
        """``sum_n <phi_n, psi_n> tr B_n``, exactly."""
        return float(self.diagonal().sum())

    def frobenius(self) -> float:
        """``|H|_F``, from ``|sum_n phi_n psi_n^T (x) B_n|^2 = sum_nm <phi_n, phi_m> <psi_n, psi_m> <B_n, B_m>``."""
        square = sum(a.inner(b) for terms in _by_cells(self.all_terms) for a in terms for b in terms)
        return max(square, 0.0) ** 0.5

    def block(self, rows: range, columns: range) -> KroneckerSum:
        """The part with these rows and columns, which must be whole parameters."""
        for entries, n in (rows, self.shape[0]), (columns, self.shape[1]):
            if entries.step != 1 or not 0 <= entries.start <= entries.stop <= n:
                raise UsageError(f"{entries} of {n}: give a range of rows or columns that there are, one by one")
        terms = []
        for term in self.all_terms:
            at, phi, by_a = _within(term.at, rows, term.phi)
            by, psi, by_b = _within(term.by, columns, term.psi)
            if at and by:
                terms.append(Term(at, by, phi, psi, term.maps[:, by_a][:, :, by_b]))
        return KroneckerSum((len(rows), len(columns)), self.dtype, terms)


def check_vectors(vectors: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """``UsageError`` unless ``vectors`` are ``(n,)`` or ``(n, k)``, of the matrix' dtype."""
    check_tensor(vectors, "what a matrix is applied to")
    if vectors.ndim not in (1, 2) or len(vectors) != shape[1] or vectors.dtype != dtype:
        raise UsageError(f"a matrix of {shape} in {dtype} does not take {tuple(vectors.shape)} in {vectors.dtype}")


def _by_cells(terms: Iterable[Term]) -> list[list[Term]]:
    """Terms that stand on the same cells, together; the largest first."""
    found: dict[object, list[Term]] = {}
    for term in terms:
        found.setdefault(term.cells, []).append(term)
    return sorted(found.values(), key=lambda terms: -terms[0].numel)


def _within(place: Place, entries: range, features: Tensor) -> tuple[Place | None, Tensor, slice]:
    """The part of a place within ``entries``, which cut the matrix it is part of by rows; its features and outputs."""
    (p, feature), (m, output) = place.features, place.outputs
    by_feature = (feature, p) >= (output, m)  # which index runs over the rows: an axis of one may have any stride
    (count, stride), (width, step) = (place.features, place.outputs) if by_feature else (place.outputs, place.features)
    span = (width - 1) * step
    for cut in entries.start - place.start, entries.stop - place.start:
        if 0 < cut <= (count - 1) * stride + span and 0 < cut % stride <= span:
            raise UsageError(f"{entries} cuts through a row of a weight: give whole parameters")
    first = max(0, -(-(entries.start - place.start) // stride))
    stop = min(count, -(-(entries.stop - place.start) // stride))
    if first >= stop:
        return None, features, slice(0)
    start = place.start + first * stride - entries.start
    if by_feature:
        return Place(start, (stop - first, feature), (m, output)), features[:, first:stop], slice(None)
    return Place(start, (p, feature), (stop - first, output)), features, slice(first, stop)
