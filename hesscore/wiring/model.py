"""A whole model: embeddings, a stack of blocks, the final norm, the head and the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.embedding import embedding
from hesscore.wiring.head import head


def model(spec: Spec) -> Graph:
    """The graph of ``spec``, ending in its loss; its constants are what ``hesscore.wiring.inputs`` returns."""

    def owner(name: str) -> str:
        block, layer, rest = (*name.split(".", 2), "", "")[:3]
        return f"{block}.{spec.owner(int(layer))}.{rest}" if block == "blocks" else name

    g = Graph(owner)
    x = embedding(g, spec) if spec.embeds else g.constant("input")
    for layer in range(spec.layers):
        x = BLOCKS[spec.placement](g, f"blocks.{layer}", x, spec, mask(spec, layer))
    head(g, x, spec)
    return g


def mask(spec: Spec, layer: int) -> str:
    """The constant that says which pairs of tokens the attention of a layer allows."""
    return "mask.window" if spec.window and layer >= spec.window_from else "mask"


def parameters(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Seeded weights in float64: Gaussian matrices of standard deviation ``init_std``, gains one, biases zero."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, shape in model(spec).parameters.items():
        if len(shape) == 1:
            drawn[name] = torch.full(shape, float(name.endswith("weight")), dtype=torch.float64)
        else:
            fan_in = spec.d_model if name.startswith(("embed", "head")) else shape[0]
            std = spec.init_std or fan_in**-0.5
            drawn[name] = std * torch.randn(shape, generator=rng, dtype=torch.float64)
    return drawn
