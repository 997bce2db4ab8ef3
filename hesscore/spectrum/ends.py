"""The two ends of a block's spectrum and its trace, each number with its error."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Generator, Tensor

from hesscore.curvature import Block
from hesscore.spectrum.lanczos import Product, lanczos, unit
from hesscore.spectrum.trace import Trace, deflated_hutchinson

EXACT_UP_TO = 64
"""Rows up to which a block is formed whole: that costs no more products than the estimates do."""

MAX_STEPS = 200
PROBES = 16

ROUNDING = 64
"""Rounding that may go unseen, over what is seen of it; on trained models it was up to 20."""


class NonFiniteError(ArithmeticError):
    """A product with the block overflowed or is not a number."""


@dataclass(frozen=True)
class Ends:
    """Smallest and largest eigenvalue, as Rayleigh quotients ``values`` of the unit ``vectors (n, 2)``.

    An error bounds the distance to the end of the spectrum.  It is the residual norm ``|H v - lambda v|`` or, where
    that is more, what may lie ``beyond`` (see ``Krylov``); plus ``ROUNDING`` times what is seen of rounding, which is
    how far ``3 H (v/3)`` is from ``H v``.  A block is ``flat`` if there is nothing in it but rounding.
    """

    values: tuple[float, float]
    errors: tuple[float, float]
    vectors: Tensor
    trace: Trace
    converged: bool
    flat: bool


def ends(block: Block, tolerance: float, rng: Generator) -> Ends:
    """Exact for a small block; else by Lanczos to ``tolerance`` times the spectral norm, the trace by random probes."""

    def product(vectors: Tensor) -> Tensor:
        return _finite(block @ vectors)

    n = block.shape[0]
    return _whole(product, block) if n <= EXACT_UP_TO else _iterated(product, block, tolerance, rng)


def _whole(product: Product, block: Block) -> Ends:
    matrix = _finite(block.dense())
    vectors = torch.linalg.eigh((matrix + matrix.T).double() / 2).eigenvectors[:, [0, -1]].to(matrix)
    values, residuals, rounding = _measured(product, vectors)
    errors = residuals + rounding
    flat = bool(values.abs().max() <= errors.max())
    return Ends(_pair(values), _pair(errors), vectors, Trace(float(matrix.trace()), 0.0), True, flat)


def _iterated(product: Product, block: Block, tolerance: float, rng: Generator) -> Ends:
    n, like = block.shape[0], block.owner.loss
    start = unit(torch.randn(n, 1, generator=rng, dtype=torch.float64).to(like))
    value, residual, rounding = _measured(product, start)
    flat = bool(value.hypot(residual) <= rounding)  # |H v|: Lanczos would chase it for ever
    affordable = psutil.virtual_memory().available // (2 * n * like.element_size())
    steps = 2 if flat else max(2, min(MAX_STEPS, affordable))
    krylov = lanczos(product, start[:, 0], tolerance / 2, steps)  # half of it is left for rounding
    vectors = unit(krylov.vectors)
    values, residuals, rounding = _measured(product, vectors)
    errors = residuals.maximum(krylov.beyond) + rounding
    order = values.argsort()  # the same eigenvalue twice may come out the wrong way round
    values, errors, vectors = values[order], errors[order], vectors[:, order]
    converged = flat or bool((errors <= tolerance * values.abs().max()).all())
    trace = deflated_hutchinson(product, krylov, PROBES, block.at_once, rng)
    return Ends(_pair(values), _pair(errors), vectors, trace, converged, flat)


def _measured(product: Product, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rayleigh quotients of unit vectors, their residual norms and the rounding in these.

    In float64, because sums over millions of float32 lose digits.
    """
    moved, again = product(torch.cat([vectors, vectors / 3], 1)).double().tensor_split(2, 1)
    vectors = vectors.double()
    values = (vectors * moved).sum(0)
    return values, (moved - vectors * values).norm(dim=0), ROUNDING * (3 * again - moved).norm(dim=0)


def _finite(products: Tensor) -> Tensor:
    if not torch.isfinite(products).all():
        raise NonFiniteError
    return products


def _pair(both: Tensor) -> tuple[float, float]:
    return float(both[0]), float(both[1])
