"""The two ends of a block's spectrum and its trace, each number with its error."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import Protocol

import torch
from torch import Generator, Tensor

from hesscore import memory
from hesscore.curvature import Curvature
from hesscore.spectrum.lanczos import Product, lanczos, unit
from hesscore.spectrum.trace import Trace, deflated_hutchinson

EXACT_UP_TO = 64
"""Rows up to which a block is formed whole: that costs no more products than the estimates do."""

MAX_STEPS = 200
PROBES = 16

ROUNDING = 64
"""Rounding of products that may go unseen, over what is seen of it; on trained models it was up to 20."""

UNSEEN = {torch.float64: 1e-11, torch.float32: 1e-5}
"""Rounding of the point, which no product shows, over the spectral norm.

Saturated attention lost up to 4e-13, logits of 10^4 up to 6e-12.  Only a norm of one or two features, of which nothing
but its eps leaves a derivative, loses more.
"""


class Symmetric(Protocol):
    """A symmetric operator on flat vectors, such as a ``Block`` of a Hessian."""

    @property
    def owner(self) -> Curvature: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def at_once(self) -> int: ...
    def __matmul__(self, vectors: Tensor) -> Tensor: ...
    def dense(self) -> Tensor: ...


class NonFiniteError(ArithmeticError):
    """A product with the block overflowed or is not a number."""


@dataclass(frozen=True)
class Ends:
    """Smallest and largest eigenvalue, as Rayleigh quotients ``values`` of the unit ``vectors (n, 2)``.

    An error bounds the distance to the end of the spectrum.  It is the residual norm ``|H v - lambda v|`` or, where
    that is more, what may lie ``beyond`` (see ``Krylov``), plus rounding: ``ROUNDING`` times what is seen of it, which
    is how far ``3 H (v/3)`` is from ``H v``; ``UNSEEN``; and the asymmetry of a block that is formed whole.  A block is
    ``flat`` if there is nothing in it but rounding.
    """

    values: tuple[float, float]
    errors: tuple[float, float]
    vectors: Tensor
    trace: Trace
    converged: bool
    flat: bool


def ends(block: Symmetric, tolerance: float, rng: Generator) -> Ends:
    """Exact for a small block; else by Lanczos to ``tolerance`` times the spectral norm, the trace by random probes."""

    def product(vectors: Tensor) -> Tensor:
        return _finite(block @ vectors)

    n = block.shape[0]
    flat = False
    if n <= EXACT_UP_TO:
        matrix = _finite(block.dense()).double()
        vectors = torch.linalg.eigh((matrix + matrix.T) / 2).eigenvectors[:, [0, -1]].to(block.owner.loss)
        beyond, trace = torch.zeros(2), Trace(float(matrix.trace()), 0.0)
        unseen = (matrix - matrix.T).norm()
    else:
        start = unit(torch.randn(n, 1, generator=rng, dtype=torch.float64).to(block.owner.loss))
        value, residual, rounding = _measured(product, start)
        flat = bool(value.hypot(residual) <= rounding)  # |H v|: Lanczos would chase it for ever
        krylov = lanczos(product, start[:, 0], tolerance / 2, 2 if flat else _affordable(block))
        vectors, beyond, unseen = unit(krylov.vectors), krylov.beyond, torch.zeros(())
        trace = deflated_hutchinson(product, krylov, PROBES, block.at_once, rng)
    values, residuals, rounding = _measured(product, vectors)
    size = values.abs().max()
    rounding += UNSEEN[vectors.dtype] * size + unseen
    flat = flat or bool((values.hypot(residuals) <= rounding).all())
    errors = residuals.maximum(beyond) + rounding
    order = values.argsort()  # the same eigenvalue twice may come out the wrong way round
    values, errors, vectors = values[order], errors[order], vectors[:, order]
    # The rounding of n diagonal entries, each with a sign of its own, or of z^T H z for |z|^2 = n.
    stderr = hypot(trace.stderr, float(rounding.max()) * n**0.5)
    converged = flat or bool((errors <= tolerance * size).all())
    return Ends(_pair(values), _pair(errors), vectors, Trace(trace.value, stderr), converged, flat)


def _affordable(block: Symmetric) -> int:
    """Steps of Lanczos whose basis takes at most half of the free memory."""
    n, bytes_each = block.shape[0], block.owner.loss.element_size()
    return max(2, min(MAX_STEPS, memory.free() // (2 * n * bytes_each)))


def _measured(product: Product, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rayleigh quotients of unit vectors, their residual norms and the rounding in these.

    In float64, because sums over millions of float32 lose digits.
    """
    moved, rounding = product_with_rounding(product, vectors)
    vectors = vectors.double()
    values = (vectors * moved).sum(0)
    return values, _finite((moved - vectors * values).norm(dim=0)), rounding


def product_with_rounding(product: Product, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The products with some vectors, in float64, and how much rounding each holds: see ``Ends``."""
    moved, again = product(torch.cat([vectors, vectors / 3], 1)).double().tensor_split(2, 1)
    return moved, ROUNDING * (3 * again - moved).norm(dim=0)


def _finite(numbers: Tensor) -> Tensor:
    if not torch.isfinite(numbers).all():
        raise NonFiniteError
    return numbers


def _pair(both: Tensor) -> tuple[float, float]:
    return float(both[0]), float(both[1])
