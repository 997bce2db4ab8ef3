"""A whole model: embeddings, a stack of blocks, the final norm, the head and the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from hesscore.components.add import Add
from hesscore.components.cross_entropy import CrossEntropy
from hesscore.components.embedding import Embedding
from hesscore.components.product import Product
from hesscore.components.squared_error import SquaredError
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.parts import norm

PER_SEQUENCE = ("input", "target", "tokens", "targets", "weights")
"""The constants that have the batch for their first axis; the others are the same for every part of it."""


def model(spec: Spec) -> Graph:
    """The graph of ``spec``, ending in its loss; its constants are what ``inputs`` returns."""
    g = Graph()
    x = _embed(g, spec) if spec.vocab else g.constant("input")
    for layer in range(spec.layers):
        x = BLOCKS[spec.placement](g, f"blocks.{layer}", x, spec)
    if spec.vocab is None:
        g.apply("loss", SquaredError(), x, g.constant("target"), g.constant("weights"))
        return g
    if spec.placement != "post":
        x = norm(g, "final_norm", x, spec)
    table = g.index["embed.token.weight"] if spec.tied else g.parameter("head.weight", (spec.vocab, spec.d_model))
    logits = g.apply("head", Product("bld,vd->blv"), x, table)
    g.apply("loss", CrossEntropy(), logits, g.constant("targets"), g.constant("weights"))
    return g


def _embed(g: Graph, spec: Spec) -> int:
    assert spec.vocab is not None
    table = g.parameter("embed.token.weight", (spec.vocab, spec.d_model))
    x = g.apply("embed.token", Embedding(), table, g.constant("tokens"))
    if spec.positions == "learned":
        table = g.parameter("embed.position.weight", (spec.seq_len, spec.d_model))
        position = g.apply("embed.position", Embedding(), table, g.constant("positions"))
        x = g.apply("embed.sum", Add(), x, position)
    return x


def inputs(
    spec: Spec, data: Tensor, target: Tensor, keep: Tensor | None = None, weights: Tensor | None = None
) -> dict[str, Tensor]:
    """The constants of ``model(spec)``.

    ``data`` is token ids ``(B, L)`` and ``target`` ids with -100 where nothing is scored; without a vocabulary both are
    activations ``(B, L, d)``.  ``keep (B, L)`` is false on padding, which no token attends to; ``weights (B, L)``
    weigh the tokens in the loss (by default 1, and 0 on padding).
    """
    batch, length = data.shape[:2]
    pairs = torch.ones(1, 1, 1, 1, length, dtype=torch.bool) if keep is None else keep[:, None, None, None, :]
    if spec.causal:
        pairs = pairs & torch.ones(length, length, dtype=torch.bool).tril()
    if weights is None:
        weights = torch.ones(batch, length, dtype=torch.float64) if keep is None else keep.double()
    constants = {"mask": pairs, "weights": weights}
    if spec.positions == "learned":
        constants["positions"] = torch.arange(length)
    if spec.positions == "rotary":
        half = spec.head_dim // 2
        frequency = spec.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        constants |= {"rotary.cos": angle.cos(), "rotary.sin": angle.sin()}
    names = ("input", "target") if spec.vocab is None else ("tokens", "targets")
    return constants | dict(zip(names, (data, target), strict=True))


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
