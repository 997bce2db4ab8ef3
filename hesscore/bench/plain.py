"""A plain PyTorch Transformer, as its users write it: what the rivals differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hesscore.spec import Spec

Weights = Mapping[str, Tensor]
Norm = Callable[..., Tensor]
"""Called as ``F.layer_norm``."""


def norm_written_out(x: Tensor, shape: tuple[int, ...], gain: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm`` in elementary operations, for those who differentiate it wrongly."""
    centred = x - x.mean(-1, keepdim=True)
    y = gain * centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if shift is None else y + shift


class Plain:
    """Pre-norm blocks with LayerNorm, GELU and no rotation; ``weights`` go by our names."""

    def __init__(self, spec: Spec, layer_norm: Norm = F.layer_norm) -> None:
        self.spec, self.layer_norm = spec, layer_norm
        self.future = torch.full((spec.seq_len, spec.seq_len), -torch.inf).triu(1)

    def attention(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Of ``x (B, L, d)``, written out: fused kernels have no second derivative."""

        def heads(part: str) -> Tensor:
            return _linear(weights, f"{name}.{part}", x).unflatten(-1, (self.spec.heads, -1)).transpose(1, 2)

        q, k, v = map(heads, "qkv")
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.spec.causal:
            scores = scores + self.future
        return _linear(weights, f"{name}.o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def output(self, weights: Weights, data: Tensor) -> Tensor:
        """Logits, or activations without a vocabulary."""
        spec = self.spec

        def norm(name: str, x: Tensor) -> Tensor:
            gain, shift = weights[f"{name}.weight"], weights.get(f"{name}.bias")
            return self.layer_norm(x, (spec.d_model,), gain, shift, spec.norm_eps)

        x = F.embedding(data, weights["embed.token.weight"]) if spec.vocab else data
        for layer in range(spec.layers):
            block = f"blocks.{layer}"
            x = x + self.attention(weights, f"{block}.attn", norm(f"{block}.norm1", x))
            hidden = F.gelu(_linear(weights, f"{block}.mlp.up", norm(f"{block}.norm2", x)))
            x = x + _linear(weights, f"{block}.mlp.down", hidden)
        return F.linear(norm("final_norm", x), weights["head.weight"]) if spec.vocab else x


def flat(tensors: Weights) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def of_flat(f: Callable[[Weights], Tensor], weights: Weights) -> Callable[[Tensor], Tensor]:
    """``f`` as a function of one vector of all ``weights``."""

    def of(x: Tensor) -> Tensor:
        parts = x.split([prod(weight.shape) for weight in weights.values()])
        return f({name: part.view(weight.shape) for (name, weight), part in zip(weights.items(), parts, strict=True)})

    return of


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))
