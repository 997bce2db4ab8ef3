"""The two ends of a block's spectrum and its trace, each number with its error."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Generator, Tensor

from hesscore.curvature import Block
from hesscore.spectrum.lanczos import lanczos
from hesscore.spectrum.trace import Trace, deflated_hutchinson

EXACT_UP_TO = 64
"""Rows up to which a block is formed whole: that costs no more products than the estimates do."""

MAX_STEPS = 200
PROBES = 16


class NonFiniteError(ArithmeticError):
    """A product with the block overflowed or is not a number."""


@dataclass(frozen=True)
class Ends:
    """Smallest and largest eigenvalue, as Rayleigh quotients ``values`` of the unit ``vectors (n, 2)``.

    An error is the residual norm ``|H v - lambda v|``, which bounds the distance to the nearest eigenvalue of a
    symmetric ``H``, plus, where the block was formed whole, ``|H - H^T|/2``: the rounding of its products, measured.
    """

    values: tuple[float, float]
    errors: tuple[float, float]
    vectors: Tensor
    trace: Trace
    converged: bool


def ends(block: Block, tolerance: float, rng: Generator) -> Ends:
    """Exact for a small block; else by Lanczos to ``tolerance`` times the spectral norm, the trace by random probes."""
    return _whole(block) if block.shape[0] <= EXACT_UP_TO else _iterated(block, tolerance, rng)


def _whole(block: Block) -> Ends:
    matrix = _finite(block.dense())
    symmetric = (matrix + matrix.T) / 2
    values, vectors = torch.linalg.eigh(symmetric)
    values, vectors = values[[0, -1]], vectors[:, [0, -1]]
    errors = (matrix @ vectors - vectors * values).norm(dim=0) + torch.linalg.matrix_norm(matrix - symmetric, 2)
    return Ends(_pair(values), _pair(errors), vectors, Trace(float(matrix.trace()), 0.0), True)


def _iterated(block: Block, tolerance: float, rng: Generator) -> Ends:
    def product(vectors: Tensor) -> Tensor:
        return _finite(block @ vectors)

    n, like = block.shape[0], block.owner.loss
    affordable = psutil.virtual_memory().available // (2 * n * like.element_size())
    start = torch.randn(n, generator=rng, dtype=torch.float64).to(like)
    krylov = lanczos(product, start, tolerance, max(2, min(MAX_STEPS, affordable)))
    vectors = krylov.vectors / krylov.vectors.norm(dim=0)
    moved = product(vectors)
    values = (vectors * moved).sum(0)
    errors = (moved - vectors * values).norm(dim=0)
    converged = bool((errors <= tolerance * values.abs().max()).all())
    trace = deflated_hutchinson(product, krylov, PROBES, block.at_once, rng)
    return Ends(_pair(values), _pair(errors), vectors, trace, converged)


def _finite(products: Tensor) -> Tensor:
    if not torch.isfinite(products).all():
        raise NonFiniteError
    return products


def _pair(both: Tensor) -> tuple[float, float]:
    return float(both[0]), float(both[1])
