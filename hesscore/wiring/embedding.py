"""From token ids or image patches to the first block."""

from __future__ import annotations

from hesscore.components.add import Add
from hesscore.components.embedding import Embedding
from hesscore.components.prepend import Prepend
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.parts import linear, norm


def embedding(g: Graph, spec: Spec) -> int:
    """Tokens or patches, plus segments, plus positions, then a norm, then a linear map: what there is of them."""
    width = spec.d_embed or spec.d_model
    x = _tokens(g, spec, width) if spec.vocab else _patches(g, spec)
    if spec.segments:
        segment = _rows(g, "embed.segment", spec.segments, width, "segments")
        x = g.apply("embed.segmented", Add(), x, segment)
    if spec.positions == "learned":
        position = _rows(g, "embed.position", spec.length + spec.position_offset, width, "positions")
        x = g.apply("embed.sum", Add(), x, position)
    if spec.embed_norm:
        x = norm(g, "embed.norm", x, spec, width)
    return linear(g, "embed.project", x, width, spec.d_model, spec.bias) if spec.d_embed else x


def _tokens(g: Graph, spec: Spec, width: int) -> int:
    assert spec.vocab is not None
    return _rows(g, "embed.token", spec.vocab, width, "tokens")


def _patches(g: Graph, spec: Spec) -> int:
    assert spec.patch_size is not None
    pixels = spec.channels * spec.patch_size**2
    x = linear(g, "embed.patch", g.constant("input"), pixels, spec.d_model, spec.bias)
    if spec.class_token:
        x = g.apply("embed.class", Prepend(), g.parameter("embed.class.weight", (1, spec.d_model)), x)
    return x


def _rows(g: Graph, name: str, rows: int, width: int, ids: str) -> int:
    return g.apply(name, Embedding(), g.parameter(f"{name}.weight", (rows, width)), g.constant(ids))
