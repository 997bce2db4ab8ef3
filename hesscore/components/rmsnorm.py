"""RMSNorm without its gain: the gain is a Hadamard product after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, dot, randn


@dataclass(frozen=True)
class RMSNorm(Component):
    """``y = z / s`` with ``z = P x`` and ``s = sqrt(|z|^2 / d + eps)``; here ``P = I``.  Exact for every eps >= 0.

    ``J u = (P u - y (y.u)/d) / s`` and, with ``h = P delta`` and ``c = delta.y``,
    ``<delta, D^2 y> u = -( y (h.u) + h (y.u) + c P u - 3 c y (y.u)/d ) / (d s^2)``.
    """

    eps: float = 1e-5

    kind = "norm"

    def project(self, x: Tensor) -> Tensor:
        """The symmetric projection ``P``, which leaves ``y`` alone."""
        return x

    def value(self, x: Tensor) -> tuple[Tensor, Any]:
        z = self.project(x)
        scale = (z.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y = z * scale
        return y, (y, scale)

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        (y, scale), (dx,) = kept, tangents
        return torch.addcmul(self.project(dx), y, dot(y, dx), value=-1 / y.shape[-1]).mul_(scale)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (self.jvp(kept, (cotangent,)),)

    def bend(self, kept: Any, delta: Tensor) -> Any:
        y, scale = kept
        weight = -scale.square() / y.shape[-1]
        return self.project(delta) * weight, dot(delta, y) * weight

    def curvature(self, kept: Any, bent: Any, tangents: Tangents, needs: Needs) -> Cotangents:
        (y, _), (h, c), (dx,) = kept, bent, tangents
        along = dot(y, dx)
        across = torch.addcmul(dot(h, dx), along, c, value=-3 / y.shape[-1])
        return ((c * self.project(dx)).addcmul_(h, along).addcmul_(y, across),)

    def curvature_norm(self, kept: Any, bent: Any) -> Tensor:
        """``|<delta, D^2 y>|`` of each token, ``(..., 1)``.

        With what ``bend`` makes of ``h`` and ``c = h.y``, it is ``c`` where nothing of ``y`` and ``h`` is, and on their
        span it has two more eigenvalues.
        """
        (y, _), (h, c) = kept, bent
        middle = c - 1.5 * c * dot(y, y) / y.shape[-1]
        radius = (middle.square() + dot(y, y) * dot(h, h) - c.square()).clamp(min=0).sqrt()
        return torch.maximum(c.abs(), (c + middle).abs() + radius)

    def jacobian(self, kept: Any, gain: Tensor | float = 1.0) -> Tensor:
        """``gain_a (P - y y^T/d)_ab / s`` for each token, ``(..., d, d)``."""
        y, scale = kept
        return self.across(y).mul_((scale * gain).unsqueeze(-1))

    def hessian(self, kept: Any, gain: Tensor | float = 1.0) -> Tensor:
        """``D^2 y`` for each token, ``(..., d, d, d)``: output, and the two inputs.

        ``-gain_a (y_a Q_bc + y_b Q_ac + y_c Q_ab) / (d s^2)`` with ``Q = P - y y^T/d``.
        """
        y, scale = kept
        across, weight = self.across(y), scale.square() * gain / -y.shape[-1]
        weighted = across * weight.unsqueeze(-1)
        hessian = (weight * y)[..., :, None, None] * across[..., None, :, :]
        hessian.addcmul_(y[..., None, :, None], weighted[..., :, None, :])
        return hessian.addcmul_(y[..., None, None, :], weighted[..., :, :, None])

    def across(self, y: Tensor) -> Tensor:
        """``P - y y^T/d`` for each token, ``(..., d, d)``."""
        return torch.addcmul(projector(self, y), y.unsqueeze(-1), y.unsqueeze(-2), value=-1 / y.shape[-1])

    def norms(self, kept: Any) -> Norms:
        """``|J| <= 1/s``; curvature ``<= (2/sqrt 3) / (s^2 sqrt d)`` (derived for eps = 0, checked for eps > 0)."""
        y, scale = kept
        steepest = float(scale.max())
        return Norms((steepest,), {(0, 0): 2 / 3**0.5 * steepest**2 / y.shape[-1] ** 0.5})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        yield cls(), (randn(rng, 2, 4),)
        yield cls(eps=0.5), (3 * randn(rng, 2, 3, 5) + 1,)
        yield cls(eps=0.0), (randn(rng, 1, 2, 3),)


def projector(norm: RMSNorm, like: Tensor) -> Tensor:
    """``P`` as a matrix; not to be written to."""
    return _projector(norm, like.shape[-1], like.dtype, like.device)


@lru_cache(maxsize=8)
def _projector(norm: RMSNorm, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return norm.project(torch.eye(d, dtype=dtype, device=device))
