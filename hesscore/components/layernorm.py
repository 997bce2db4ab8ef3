"""LayerNorm without its affine part: gain and shift are a Hadamard product and a sum after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hesscore.components.rmsnorm import RMSNorm


@dataclass(frozen=True)
class LayerNorm(RMSNorm):
    """``y = P x / s``, ``P = I - 1 1^T / d``: RMSNorm of the centred token, with the same derivatives."""

    def value(self, x: Tensor) -> tuple[Tensor, Any]:
        y, _, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, self.eps)
        return y, (y, scale)

    def project(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)
