"""The two ends of a block's spectrum, each with its error."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import torch
from torch import Generator, Tensor

from hesscore import memory
from hesscore.budget import NEVER, Stop
from hesscore.curvature import Curvature
from hesscore.spectrum.lanczos import Krylov, Product, lanczos, unit

EXACT_UP_TO = 64
"""Rows up to which a block is formed whole: that costs no more products than the estimates do."""

MAX_STEPS = 200

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
    rounding: float
    """Of an eigenvalue, at most."""
    converged: bool
    flat: bool
    krylov: Krylov
    """The space that the ends are from; the whole space, with all eigenvectors, of a block that is formed whole."""

    @property
    def norm(self) -> float:
        """The largest absolute eigenvalue."""
        return max(map(abs, self.values))


def ends(block: Symmetric, tolerance: float, rng: Generator, stop: Stop = NEVER) -> Ends:
    """Exact for a small block; else by Lanczos to ``tolerance`` times the spectral norm, or until told to ``stop``."""

    def product(vectors: Tensor) -> Tensor:
        return finite(block @ vectors)

    n = block.shape[0]
    start = unit(torch.randn(n, 1, generator=rng, dtype=torch.float64).to(block.owner.loss))
    before = monotonic()
    value, residual, rounding = _measured(product, start)
    taken = monotonic() - before  # by two products
    flat = bool(value.hypot(residual) <= rounding)  # |H v|: Lanczos would chase it for ever
    unseen = torch.zeros(())
    if n <= EXACT_UP_TO and not flat and taken * n / 2 < stop.left():
        krylov, unseen = _whole(product, block)
    else:
        krylov = lanczos(product, start[:, 0], tolerance / 2, 2 if flat else _affordable(block), stop)
    vectors = unit(krylov.vectors)
    values, residuals, rounding = _measured(product, vectors)
    size = values.abs().max()
    rounding += UNSEEN[vectors.dtype] * size + unseen
    flat = flat or bool((values.hypot(residuals) <= rounding).all())
    errors = residuals.maximum(krylov.beyond) + rounding
    order = values.argsort()  # the same eigenvalue twice may come out the wrong way round
    values, errors, vectors = values[order], errors[order], vectors[:, order]
    return Ends(
        values=_pair(values),
        errors=_pair(errors),
        vectors=vectors,
        rounding=float(rounding.max()),
        converged=flat or bool((errors <= tolerance * size).all()),
        flat=flat,
        krylov=krylov,
    )


def _whole(product: Product, block: Symmetric) -> tuple[Krylov, Tensor]:
    """All eigenvectors of a block, and its asymmetry."""
    n, like = block.shape[0], block.owner.loss
    matrix = torch.cat([product(part) for part in torch.eye(n).to(like).split(block.at_once, 1)], 1).double()
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    last = vectors[:, [0, -1]].to(like)
    both = Krylov(vectors.T.to(like), values, values.new_zeros(n - 1), 0.0, values[[0, -1]], last, torch.zeros(2))
    return both, (matrix - matrix.T).norm()


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
    return values, finite((moved - vectors * values).norm(dim=0)), rounding


def product_with_rounding(product: Product, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The products with some vectors, in float64, and how much rounding each holds: see ``Ends``."""
    moved, again = product(torch.cat([vectors, vectors / 3], 1)).double().tensor_split(2, 1)
    return moved, ROUNDING * (3 * again - moved).norm(dim=0)


def finite(numbers: Tensor) -> Tensor:
    """The numbers, if there is nothing else among them."""
    if not torch.isfinite(numbers).all():
        raise NonFiniteError
    return numbers


def _pair(both: Tensor) -> tuple[float, float]:
    return float(both[0]), float(both[1])
