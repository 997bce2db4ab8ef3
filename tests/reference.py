"""A plain PyTorch Transformer to measure against: nothing of hesscore but the fields of ``Spec``.

It is written from what the fields say, with other operations than the wiring: PyTorch's own norms and
attention, rotations by complex numbers.  All have right second derivatives under ``autograd.grad`` twice.
"""

from math import sqrt

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from hesscore.spec import Spec

ACTIVATIONS = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter."""
    d, d_kv = spec.d_model, spec.d_model // spec.heads * (spec.kv_heads or spec.heads)
    linear = {"attn.q": (d, d), "attn.k": (d, d_kv), "attn.v": (d, d_kv), "attn.o": (d, d)}
    if spec.d_ff:
        linear |= {"mlp.up": (d, spec.d_ff), "mlp.down": (spec.d_ff, d)}
        if spec.gated:
            linear["mlp.gate"] = (d, spec.d_ff)
    norms = [f"blocks.{i}.{norm}" for i in range(spec.layers) for norm in ("norm1", "norm2")[: 2 if spec.d_ff else 1]]
    found: dict[str, tuple[int, ...]] = {}
    if spec.vocab:
        found["embed.token.weight"] = (spec.vocab, d)
        if spec.positions == "learned":
            found["embed.position.weight"] = (spec.seq_len, d)
        if not spec.tied:
            found["head.weight"] = (spec.vocab, d)
        if spec.placement != "post":
            norms.append("final_norm")
    for norm in norms if spec.norm != "none" else []:
        found[f"{norm}.weight"] = (d,)
        if spec.bias and spec.norm == "layernorm":
            found[f"{norm}.bias"] = (d,)
    for i in range(spec.layers):
        for name, shape in linear.items():
            found[f"blocks.{i}.{name}.weight"] = shape
            if spec.bias:
                found[f"blocks.{i}.{name}.bias"] = shape[1:]
    return found


def draw(
    spec: Spec, seed: int = 0, batch: int = 2, length: int | None = None, padding: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random weights, every gain and bias its own, and data whose first row ends in ``padding`` pads."""
    rng = torch.Generator().manual_seed(seed)
    shape = batch, length or spec.seq_len
    weights = {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) / sqrt(2 if len(shape) > 1 else 9)
        + float(len(shape) == 1 and name.endswith("weight"))
        for name, shape in shapes(spec).items()
    }
    if spec.vocab:
        data, target = (torch.randint(spec.vocab, shape, generator=rng) for _ in range(2))
    else:
        data, target = torch.randn(2, *shape, spec.d_model, generator=rng, dtype=torch.float64)
    keep = torch.ones(shape, dtype=torch.bool)
    keep[0, shape[1] - padding :] = False
    return weights, {"data": data, "target": target, "keep": keep}


def output(spec: Spec, weights: dict[str, torch.Tensor], data: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Logits, or activations where there is no vocabulary, ``(batch, length, ...)``."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        if spec.norm == "none":
            return x
        gain, shift, shape = weights[f"{name}.weight"], weights.get(f"{name}.bias"), (spec.d_model,)
        if spec.norm == "layernorm":
            return F.layer_norm(x, shape, gain, shift, spec.norm_eps)
        return F.rms_norm(x, shape, gain, spec.norm_eps)

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        width, length = spec.d_model // spec.heads, x.shape[1]
        q, k, v = (linear(f"{name}.{part}", x).unflatten(-1, (-1, width)).transpose(1, 2) for part in "qkv")
        if spec.positions == "rotary":
            q, k = rotate(q, spec.rotary_base), rotate(k, spec.rotary_base)
        allowed = keep[:, None, None, :]
        if spec.causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return linear(f"{name}.o", mixed.transpose(1, 2).flatten(2))

    def ffn(name: str, x: torch.Tensor) -> torch.Tensor:
        f, up = ACTIVATIONS[spec.activation], linear(f"{name}.up", x)
        return linear(f"{name}.down", up * f(linear(f"{name}.gate", x)) if spec.gated else f(up))

    x = data
    if spec.vocab:
        x = F.embedding(data, weights["embed.token.weight"])
        if spec.positions == "learned":
            x = x + weights["embed.position.weight"][: data.shape[1]]
    for i in range(spec.layers):
        block = f"blocks.{i}"
        if spec.placement == "pre":
            x = x + attention(f"{block}.attn", norm(f"{block}.norm1", x))
            x = x + ffn(f"{block}.mlp", norm(f"{block}.norm2", x)) if spec.d_ff else x
        elif spec.placement == "post":
            x = norm(f"{block}.norm1", x + attention(f"{block}.attn", x))
            x = norm(f"{block}.norm2", x + ffn(f"{block}.mlp", x)) if spec.d_ff else x
        else:
            mixed = attention(f"{block}.attn", norm(f"{block}.norm1", x))
            x = x + mixed + (ffn(f"{block}.mlp", norm(f"{block}.norm2", x)) if spec.d_ff else 0)
    if spec.vocab:
        if spec.placement != "post":
            x = norm("final_norm", x)
        x = x @ weights["embed.token.weight" if spec.tied else "head.weight"].T
    return x


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Turn feature ``i`` and ``i + width/2`` of ``(..., length, width)`` as one complex number."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angle = torch.outer(torch.arange(length), base ** (-torch.arange(half).double() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def loss(
    spec: Spec,
    weights: dict[str, torch.Tensor],
    data: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor,
) -> torch.Tensor:
    """Mean over the tokens that are kept and, in a vocabulary, not labelled -100."""
    result = output(spec, weights, data, keep)
    if spec.vocab:
        return F.cross_entropy(result.flatten(0, 1), target.masked_fill(~keep, -100).flatten())
    return F.mse_loss(result[keep], target[keep])
