"""LayerNorm and RMSNorm as matrices, one for each token: neither mixes tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hesscore.components.layernorm import LayerNorm
from hesscore.components.rmsnorm import RMSNorm


def norm_jacobian(norm: RMSNorm, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """``dy/dx (N, d, d)`` of ``y = gain * norm(x)`` for tokens ``x (N, d)``; a shift changes nothing.

    ``J_n = diag(gain) (P - y y^T/d) / s``.
    """
    return norm.jacobian(norm.value(x)[1], gain)


def norm_hessian(norm: RMSNorm, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    """``d^2 y/dx^2 (N, d, d, d)``: output, and the two inputs.

    ``-gain_a (y_b P_ac + y_c P_ab + y_a P_bc - 3 y_a y_b y_c/d) / (d s^2)``.
    """
    return norm.hessian(norm.value(x)[1], gain)


class DiagonalPlusLowRank(NamedTuple):
    """``diag(D_n) + U_n C_n U_n^T`` for each token: ``diagonal (N, d)``, ``basis (N, d, r)`` and ``core (N, r, r)``."""

    diagonal: Tensor
    basis: Tensor
    core: Tensor

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """``(N, d, k)`` applied to vectors of that shape, in ``r`` times their size."""
        return self.diagonal.unsqueeze(-1) * vectors + self.basis @ (self.core @ (self.basis.mT @ vectors))

    def dense(self) -> Tensor:
        """``(N, d, d)``."""
        return self.diagonal.diag_embed() + self.basis @ self.core @ self.basis.mT

    def trace(self) -> Tensor:
        """``(N,)``."""
        return self.diagonal.sum(-1) + (self.basis @ self.core * self.basis).sum((-1, -2))


def norm_curvature(
    norm: RMSNorm, x: Tensor, gradient: Tensor, curvature: float = 0.0, gain: Tensor | float = 1.0
) -> DiagonalPlusLowRank:
    """``d^2 loss/dx_n^2 (d, d)`` at tokens ``x (N, d)`` whose norm ``gain * norm(x)`` meets the loss.

    ``gradient (N, d)`` is that of the loss by the output and ``curvature`` times the identity its Hessian there: 0 for
    what the norm alone causes, ``2/d`` over the tokens for a mean squared error.  With ``g = gain * gradient``,
    ``h = P g``, ``G = diag(gain^2)`` and ``P - y y^T/d = I - K K^T``, the columns of ``K`` being ``1/sqrt(d)`` (of a
    LayerNorm) and ``y/sqrt(d)``, it is

        curvature (I - K K^T) G (I - K K^T) / s^2  -  (y h^T + h y^T + (g.y) (P - 3 y y^T/d)) / (d s^2)

    a diagonal, a multiple of the identity where ``gain`` is a number, plus a rank of at most 5.
    """
    y, (_, scale) = norm.value(x)
    n, d = y.shape
    gains = (y.new_ones(d) * gain).expand(n, d).unsqueeze(-1)
    k = torch.stack([torch.ones_like(y), y] if isinstance(norm, LayerNorm) else [y], -1) / d**0.5
    g = gains[..., 0] * gradient
    weight, outer = -scale.square() / d, curvature * scale.square()
    along = weight * (g * y).sum(-1, keepdim=True)

    rank = k.shape[-1]
    basis = torch.cat([k, gains.square() * k, norm.project(g).unsqueeze(-1)], -1)
    core = y.new_zeros(n, basis.shape[-1], basis.shape[-1])
    unit = torch.eye(rank).to(y)
    core[:, :rank, :rank] = outer[..., None] * (basis[:, :, rank:-1].mT @ k) - along[..., None] * unit
    core[:, rank - 1, rank - 1] -= 2 * along[:, 0]  # y y^T/d is there three times, 1 1^T/d once
    core[:, :rank, rank:-1] = core[:, rank:-1, :rank] = -outer[..., None] * unit
    core[:, rank - 1, -1] = core[:, -1, rank - 1] = weight[:, 0] * d**0.5
    return DiagonalPlusLowRank(outer * gains[..., 0].square() + along, basis, core)
