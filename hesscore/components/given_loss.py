"""Any loss of tokens, given by its gradient and its Hessian at one point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, align, dot, randn


@dataclass(frozen=True)
class GivenLoss(Component):
    """``loss = sum_n <g_n, y_n - at_n> + 1/2 (y_n - at_n)^T E_n (y_n - at_n)``.

    Where ``y = at``, every derivative of first and second order is that of the loss with gradients ``g`` and Hessians
    ``E`` there, whose value is left out.  ``y``, ``at`` and ``g`` are ``(..., z)``, ``E`` is ``(..., z, z)``, of which
    the symmetric part counts.
    """

    kind = "loss"

    def value(self, y: Tensor, at: Tensor, gradient: Tensor, hessian: Tensor) -> tuple[Tensor, Any]:
        hessian = (hessian + hessian.mT) / 2
        step = y - at
        bent = _times(hessian, step)
        return dot(gradient + bent / 2, step).sum(), (gradient + bent, hessian)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        return (kept[0] * tangents[0]).flatten(1).sum(1)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (align(cotangent, kept[0].ndim) * kept[0],)

    def curvature(self, kept: Any, bent: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return (bent * _times(kept[1], tangents[0]),)

    def norms(self, kept: Any) -> Norms:
        gradient, hessian = kept
        return Norms((float(gradient.norm()),), {(0, 0): float(torch.linalg.matrix_norm(hessian, 2).max())})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        for shape in (2, 3, 4), (3, 2):
            yield cls(), (*(randn(rng, *shape) for _ in range(3)), randn(rng, *shape, shape[-1]))


def _times(hessian: Tensor, step: Tensor) -> Tensor:
    """``E_n u_n`` for each token, ``(..., z)``."""
    return (hessian @ step[..., None])[..., 0]
