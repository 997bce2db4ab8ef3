"""LayerNorm and RMSNorm as matrices, one for each token: neither mixes tokens."""

from __future__ import annotations

from torch import Tensor

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
