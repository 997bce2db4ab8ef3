"""Cross entropy over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, align, balance, dot, randn


@dataclass(frozen=True)
class CrossEntropy(Component):
    """``loss = sum_i w_i (logsumexp(z_i) - z_i[t_i]) / sum_i w_i``, the weighted mean over the scored tokens.

    A target equal to ``ignore_index`` is not scored.  With ``p = softmax(z)``: gradient ``w (p - onehot)``, curvature
    ``w (diag(p) - p p^T)``, applied as ``w (p u - p <p, u>)`` and never formed.
    """

    ignore_index: int = -100

    kind = "loss"

    def value(self, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Any]:
        scored = targets != self.ignore_index
        weights = torch.where(scored, weights, 0.0).to(logits.dtype)
        weights = (weights / weights.sum())[..., None]
        targets = torch.where(scored, targets, 0)[..., None]
        log_p = logits.log_softmax(-1)
        loss = -(weights * log_p.gather(-1, targets)).sum()
        return loss, (log_p.exp(), targets, weights, log_p.argmax(-1, keepdim=True))

    def gradient(self, kept: Any) -> Tensor:
        p, targets, weights, _ = kept
        gradient = p * weights
        return balance(gradient.scatter_add_(-1, targets, -weights.expand(targets.shape)), targets)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        dz = tangents[0]
        return (self.gradient(kept) * dz).flatten(1).sum(1)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (align(cotangent, kept[0].ndim) * self.gradient(kept),)

    def bend(self, kept: Any, delta: Tensor) -> Tensor:
        p, _, weights, _ = kept
        return delta * weights * p

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        (p, _, _, peak), dz = kept, tangents[0]
        return (balance(bent * (dz - dot(p, dz)), peak),)

    def norms(self, kept: Any) -> Norms:
        """The gradient's norm, and ``max_i w_i |diag(p) - p p^T|``, bounded as in ``Softmax.norms``."""
        p, _, weights, _ = kept
        spread = torch.minimum(2 * p * (1 - p), p.amax(-1, keepdim=True)).amax(-1)
        return Norms((float(self.gradient(kept).norm()),), {(0, 0): float((weights[..., 0] * spread).max())})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        ones = torch.ones(2, 3, dtype=torch.float64)
        yield cls(), (2 * randn(rng, 2, 3, 5), torch.tensor([[0, 4, 1], [2, 2, 3]]), ones)
        yield cls(), (randn(rng, 2, 3, 4), torch.tensor([[0, -100, 1], [-100, 2, 3]]), ones * 0.5)
        yield cls(), (randn(rng, 4, 3), torch.tensor([0, 1, 2, 2]), randn(rng, 4).abs())
