"""Attention: multi-head and grouped-query, causal or not, padded or not, rotary or not.

Shapes: batch ``b``, query and key tokens ``i`` and ``j``, groups ``g`` of ``q`` query heads that share one key and one
value head, head width ``k``.
"""

from __future__ import annotations

from hesscore.components.product import Product
from hesscore.components.reshape import Reshape
from hesscore.components.rotary import Rotary
from hesscore.components.softmax import Softmax
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.parts import linear


def attention(g: Graph, name: str, x: int, spec: Spec, mask: str = "mask") -> int:
    """``softmax(Q K^T / sqrt(k)) V W_O`` on the pairs of tokens that the constant ``mask`` allows."""
    width, groups = spec.head_width, spec.groups
    shared = (groups, width)
    split = {"q": (groups, spec.heads // groups, width), "k": shared, "v": shared}

    def heads(part: str) -> int:
        after = split[part]
        features = width * (spec.heads if part == "q" else groups)
        y = linear(g, f"{name}.{part}", x, spec.d_model, features, spec.biased(f"attn.{part}"))
        y = g.apply(f"{name}.{part}.heads", Reshape((features,), after), y)
        if spec.rotated and part != "v":
            cos, sin = g.constant("rotary.cos"), g.constant("rotary.sin")
            y = g.apply(f"{name}.{part}.rotary", Rotary(), y, cos, sin)
        return y

    q, k, v = heads("q"), heads("k"), heads("v")
    scores = g.apply(f"{name}.scores", Product("bigqk,bjgk->bgqij", width**-0.5), q, k)
    weights = g.apply(f"{name}.softmax", Softmax(), scores, g.constant(mask))
    mixed = g.apply(f"{name}.mix", Product("bgqij,bjgk->bigqk"), weights, v)
    joined = g.apply(f"{name}.join", Reshape(split["q"], (spec.heads * width,)), mixed)
    return linear(g, f"{name}.o", joined, spec.heads * width, spec.d_model, spec.biased("attn.o"))
