"""nanoGPT's forward pass in plain PyTorch, from the tensors of its file: what our engine is held against.

Nothing of hesscore is used; attention is spelt out, as its fused kernels lack a second derivative.
"""

import math

import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm, linear, softmax


def loss(state, args, tokens, targets):
    """Mean cross entropy of ``targets (B, L)`` given ``tokens (B, L)``; -100 is not scored.

    ``state`` holds tensors by nanoGPT's names; a missing ``lm_head.weight`` is the token table.
    """
    return cross_entropy(logits(state, args, tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


def logits(state, args, tokens):
    length = tokens.shape[1]
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][:length]
    for layer in range(args["n_layer"]):
        h = f"transformer.h.{layer}."
        x = x + _attention(state, h, _norm(state, f"{h}ln_1", x), args["n_head"])
        x = x + _mlp(state, h, _norm(state, f"{h}ln_2", x))
    head = state.get("lm_head.weight", state["transformer.wte.weight"])
    return linear(_norm(state, "transformer.ln_f", x), head)


def _norm(state, name, x):
    weight = state[f"{name}.weight"]
    return layer_norm(x, weight.shape, weight, state.get(f"{name}.bias"), 1e-5)


def _linear(state, name, x):
    return linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _attention(state, h, x, heads):
    batch, length, d = x.shape
    qkv = _linear(state, f"{h}attn.c_attn", x).split(d, dim=2)
    q, k, v = (part.view(batch, length, heads, d // heads).transpose(1, 2) for part in qkv)  # (B, H, L, d/H)
    scores = q @ k.transpose(2, 3) / math.sqrt(d // heads)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = softmax(scores.masked_fill(future, -math.inf), dim=-1)
    return _linear(state, f"{h}attn.c_proj", (weights @ v).transpose(1, 2).reshape(batch, length, d))


def _mlp(state, h, x):
    return _linear(state, f"{h}mlp.c_proj", gelu(_linear(state, f"{h}mlp.c_fc", x)))


def state_dict(args, seed=0, untied=False, dtype=torch.float64):
    """Seeded weights in the layout of the file; ``lm_head.weight`` is the token table unless ``untied``."""
    rng = torch.Generator().manual_seed(seed)
    d = args["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (args["vocab_size"], d),
        "transformer.wpe.weight": (args["block_size"], d),
    }
    for layer in range(args["n_layer"]):
        h = f"transformer.h.{layer}."
        shapes |= {f"{h}ln_1.weight": (d,), f"{h}ln_1.bias": (d,)}
        shapes |= {f"{h}attn.c_attn.weight": (3 * d, d), f"{h}attn.c_attn.bias": (3 * d,)}
        shapes |= {f"{h}attn.c_proj.weight": (d, d), f"{h}attn.c_proj.bias": (d,)}
        shapes |= {f"{h}ln_2.weight": (d,), f"{h}ln_2.bias": (d,)}
        shapes |= {f"{h}mlp.c_fc.weight": (4 * d, d), f"{h}mlp.c_fc.bias": (4 * d,)}
        shapes |= {f"{h}mlp.c_proj.weight": (d, 4 * d), f"{h}mlp.c_proj.bias": (d,)}
    shapes |= {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
    state = {
        name: 0.3 * torch.randn(shape, generator=rng, dtype=dtype) + float(".ln_" in name and "weight" in name)
        for name, shape in shapes.items()
        if args["bias"] or not name.endswith(".bias")
    }
    table = state["transformer.wte.weight"]
    state["lm_head.weight"] = torch.randn(table.shape, generator=rng, dtype=dtype) if untied else table
    return state
