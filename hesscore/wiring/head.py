"""From the last block to the loss."""

from __future__ import annotations

from hesscore.components.activation import Activation
from hesscore.components.add import Add
from hesscore.components.cross_entropy import CrossEntropy
from hesscore.components.product import Product
from hesscore.components.reshape import Reshape
from hesscore.components.squared_error import SquaredError
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.parts import linear, norm


def head(g: Graph, x: int, spec: Spec) -> int:
    """The final norm, the outputs of the head if there is one, and the loss."""
    width = spec.d_model
    if spec.ends_normed and not spec.pooled_norm:
        x = norm(g, "final_norm", x, spec)
    if spec.pools:
        x, width = _pooled(g, x, spec)
    if spec.outputs is not None:
        x = _outputs(g, x, width, spec.outputs, spec)
    weights = g.constant("weights")
    if spec.classifies:
        return g.apply("loss", CrossEntropy(), x, g.constant("targets"), weights)
    return g.apply("loss", SquaredError(), x, g.constant("target"), weights)


def _pooled(g: Graph, x: int, spec: Spec) -> tuple[int, int]:
    """One token for each sequence, of a width that is returned: the constant ``pool`` weighs those it is made of."""
    x = g.apply("pooled", Product("bld,bpl->bpd"), x, g.constant("pool"))
    if spec.ends_normed and spec.pooled_norm:
        x = norm(g, "final_norm", x, spec)
    together = 2 if spec.pool == "first_mean" else 1
    width = together * spec.d_model
    if together > 1:
        x = g.apply("pooled.join", Reshape((together, spec.d_model), (1, width)), x)
    if spec.pooler:
        x = linear(g, "pooler", x, width, spec.d_model, spec.bias)
        x, width = g.apply("pooler.activation", Activation("tanh"), x), spec.d_model
    return x, width


def _outputs(g: Graph, x: int, width: int, outputs: int, spec: Spec) -> int:
    if spec.head_transform:
        own = spec.d_embed or spec.d_model
        x = linear(g, "head.transform", x, width, own, spec.bias)
        x = g.apply("head.transform.activation", Activation(spec.activation), x)
        x, width = norm(g, "head.norm", x, spec, own), own
    table = g.index["embed.token.weight"] if spec.tied else g.parameter("head.weight", (outputs, width))
    x = g.apply("head", Product("bld,vd->blv"), x, table)
    return g.apply("head.shift", Add(), x, g.parameter("head.bias", (outputs,))) if spec.head_bias else x
