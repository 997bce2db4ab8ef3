"""The feed-forward layer's Jacobians: by its weights as token-wise Kronecker products, else as one block a token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hesscore.components.activation import ACTIVATIONS
from hesscore.explicit.kronecker import Place
from hesscore.explicit.tokens import Factor, TokenJacobian


@dataclass(frozen=True)
class FeedForward:
    """``y = f(x U + b) D + c`` on tokens ``x (N, d)``, with ``U (d, h)`` and ``D (h, z)``.

    Only what a Jacobian needs is computed, at its first use.
    """

    x: Tensor
    up: Tensor
    down: Tensor
    activation: str
    up_bias: Tensor | None = None

    @cached_property
    def point(self) -> tuple[Tensor, Tensor, Tensor]:
        """``f``, ``f'`` and ``f''`` at the hidden units, ``(N, h)`` each."""
        before = self.x @ self.up if self.up_bias is None else torch.addmm(self.up_bias, self.x, self.up)
        return ACTIVATIONS[self.activation].triple(before)

    def by_up(self) -> TokenJacobian:
        """``dy_n/dU = x_n^T (x) D^T diag(f'_n)``."""
        return _by_weight(self.x, self.by_up_bias())

    def by_up_bias(self) -> Tensor:
        """``D^T diag(f'_n)``, ``(N, z, h)``."""
        return self.point[1][:, None, :] * self.down.T.contiguous()  # or the product would be laid out as the transpose

    def by_down(self) -> TokenJacobian:
        """``dy_n/dD = f_n^T (x) I``."""
        z = self.down.shape[1]
        eye = torch.eye(z, dtype=self.x.dtype, device=self.x.device)
        return _by_weight(self.point[0], eye.expand(len(self.x), z, z))

    def by_input(self) -> Tensor:
        """``D^T diag(f'_n) U^T``, ``(N, z, d)``."""
        return self.by_up_bias() @ self.up.T


def _by_weight(features: Tensor, maps: Tensor) -> TokenJacobian:
    """The Jacobian by one weight ``(p, m)``."""
    (n, p), (z, m) = features.shape, maps.shape[1:]
    return TokenJacobian((n * z, p * m), [Factor(Place(0, (p, m), (m, 1)), features, maps)])
