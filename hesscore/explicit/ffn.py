"""The feed-forward layer's Jacobians: by its weights as token-wise Kronecker products, else as one block a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hesscore.components.activation import ACTIVATIONS
from hesscore.explicit.kronecker import Place
from hesscore.explicit.tokens import Factor, TokenJacobian


class FeedForward(NamedTuple):
    """``y = f(x U + b) D + c`` on tokens ``x (N, d)``, with ``U (d, h)`` and ``D (h, z)``."""

    x: Tensor
    up: Tensor
    down: Tensor
    activation: str
    up_bias: Tensor | None = None

    def hidden(self) -> Tensor:
        """``x U + b``, ``(N, h)``."""
        return self.x @ self.up if self.up_bias is None else torch.addmm(self.up_bias, self.x, self.up)

    def by_up(self) -> TokenJacobian:
        """``dy_n/dU = x_n^T (x) D^T diag(f'_n)``."""
        return _by_weight(self.x, self.by_up_bias())

    def by_up_bias(self) -> Tensor:
        """``D^T diag(f'_n)``, ``(N, z, h)``."""
        slope = ACTIVATIONS[self.activation].slope(self.hidden())
        return slope.unsqueeze(1) * self.down.T.contiguous()  # or the product would be laid out as the transpose

    def by_down(self) -> TokenJacobian:
        """``dy_n/dD = f_n^T (x) I``."""
        z = self.down.shape[1]
        eye = torch.eye(z, dtype=self.x.dtype, device=self.x.device)
        return _by_weight(ACTIVATIONS[self.activation].value(self.hidden()), eye.expand(len(self.x), z, z))

    def by_input(self) -> Tensor:
        """``D^T diag(f'_n) U^T``, ``(N, z, d)``."""
        return self.by_up_bias() @ self.up.T


def _by_weight(features: Tensor, maps: Tensor) -> TokenJacobian:
    """The Jacobian by one weight ``(p, m)``."""
    (n, p), (_, z, m) = features.shape, maps.shape
    return TokenJacobian((n * z, p * m), [Factor(Place(0, (p, m), (m, 1)), features, maps)])
