"""How near the learning rate is to the edge at which training becomes unstable, and which block would cross it first.

On a quadratic, gradient descent is stable where ``lambda_max < 2/lr``.  Adam, if its preconditioner ``D`` changes
slowly, is where the top eigenvalue of ``D^-1/2 H D^-1/2``, the preconditioned sharpness, is below
``(2 + 2 beta1)/((1 - beta1) lr)`` (Cohen et al., arXiv 2207.14484).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hesscore.analysis import Row
from hesscore.checkpoints.optimizer import Adam
from hesscore.measured import Measured


@dataclass(frozen=True)
class GradientDescent:
    """``lr_limit = 2/lambda_max``, and the interval in which it lies."""

    lr_limit: float
    lr_limit_low: float
    lr_limit_high: float | None
    first: str
    """The block that would be unstable first, on its own."""


@dataclass(frozen=True)
class AdamMargin:
    """``share = sharpness/limit``: beyond 1 is beyond the edge."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int
    sharpness: float
    sharpness_error: float
    limit: float
    share: float
    share_error: float
    first: str


@dataclass(frozen=True)
class Stability:
    gradient_descent: GradientDescent | None
    adam: AdamMargin | None
    verdict: list[str]


def stability(rows: Sequence[Row], whole: Row, optimizer: Adam | None) -> Stability:
    """From the rows of all blocks and of the ``whole`` model."""
    plain, adaptive = _gradient_descent(rows, whole), _adam(rows, whole, optimizer)
    return Stability(plain, adaptive, list(_verdict(plain, adaptive)))


def _gradient_descent(rows: Sequence[Row], whole: Row) -> GradientDescent | None:
    top, error = whole.lambda_max, whole.lambda_max_error
    if top is None or error is None or top <= 0:
        return None
    high = 2 / (top - error) if top > error else None
    return GradientDescent(2 / top, 2 / (top + error), high, _first(rows, lambda row: row.lambda_max))


def _adam(rows: Sequence[Row], whole: Row, optimizer: Adam | None) -> AdamMargin | None:
    top, error = whole.preconditioned_sharpness, whole.preconditioned_sharpness_error
    if optimizer is None or top is None or error is None:
        return None
    used = optimizer.reference
    return AdamMargin(
        lr=used.lr,
        beta1=used.beta1,
        beta2=used.beta2,
        eps=used.eps,
        step=used.step,
        sharpness=top,
        sharpness_error=error,
        limit=used.limit,
        share=top / used.limit,
        share_error=error / used.limit,
        first=_first(rows, lambda row: row.preconditioned_sharpness),
    )


def _first(rows: Sequence[Row], sharpness: Callable[[Row], float | None]) -> str:
    return max(rows, key=lambda row: sharpness(row) or 0.0).name


def _verdict(plain: GradientDescent | None, adaptive: AdamMargin | None) -> Iterator[str]:
    if plain is None:
        yield "The loss curves upwards in no direction: no learning rate is unstable by it."
    elif plain.lr_limit_high is None:
        yield "How steep the loss is has not been found to within its error: it takes more time."
    else:
        limit = Measured(plain.lr_limit, max(plain.lr_limit_high - plain.lr_limit, plain.lr_limit - plain.lr_limit_low))
        yield f"Gradient descent is stable up to a learning rate of {limit}; {plain.first} would be the first to cross."
    if adaptive and adaptive.share_error >= adaptive.share:
        yield "The preconditioned sharpness has not been found to within its error: it takes more time."
    elif adaptive:
        beyond = "beyond it" if adaptive.share - adaptive.share_error > 1 else "at it"
        beyond = "within it" if adaptive.share + adaptive.share_error < 1 else beyond
        share = Measured(round(adaptive.share, 3), adaptive.share_error)
        yield (
            f"Adam's learning rate of {adaptive.lr:.3g} is at {share} of the edge of stability, {beyond}; "
            f"{adaptive.first} would be the first to cross."
        )
