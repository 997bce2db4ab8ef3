"""A plain PyTorch Transformer, as its users write it: what the rivals differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hesscore.spec import Spec

Loss = Callable[[Mapping[str, Tensor]], Tensor]


def loss_of(spec: Spec, data: Tensor, target: Tensor) -> Loss:
    """The loss as a function of the weights by our names: pre-norm blocks with LayerNorm, GELU and no rotation.

    Attention is written out: fused kernels have no second derivative.
    """
    future = torch.full((data.shape[1], data.shape[1]), -torch.inf).triu(1)

    def loss(weights: Mapping[str, Tensor]) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))

        def norm(name: str, x: Tensor) -> Tensor:
            return F.layer_norm(
                x, (spec.d_model,), weights[f"{name}.weight"], weights.get(f"{name}.bias"), spec.norm_eps
            )

        def attention(name: str, x: Tensor) -> Tensor:
            q, k, v = (linear(f"{name}.{part}", x).unflatten(-1, (spec.heads, -1)).transpose(1, 2) for part in "qkv")
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            if spec.causal:
                scores = scores + future
            return linear(f"{name}.o", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

        x = F.embedding(data, weights["embed.token.weight"]) if spec.vocab else data
        for layer in range(spec.layers):
            block = f"blocks.{layer}"
            x = x + attention(f"{block}.attn", norm(f"{block}.norm1", x))
            x = x + linear(f"{block}.mlp.down", F.gelu(linear(f"{block}.mlp.up", norm(f"{block}.norm2", x))))
        if spec.vocab is None:
            return (x - target).square().mean()  # forward over reverse fails on F.mse_loss
        logits = F.linear(norm("final_norm", x), weights["head.weight"])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return loss
