"""What every wiring is made of: a linear layer and a norm, each with its parameters."""

from __future__ import annotations

from hesscore.components.add import Add
from hesscore.components.hadamard import Hadamard
from hesscore.components.layernorm import LayerNorm
from hesscore.components.product import Product
from hesscore.components.rmsnorm import RMSNorm
from hesscore.graph import Graph
from hesscore.spec import Spec


def linear(g: Graph, name: str, x: int, d_in: int, d_out: int, bias: bool) -> int:
    """``x W + b``; ``W`` is ``(d_in, d_out)``."""
    y = g.apply(name, Product("bld,de->ble"), x, g.parameter(f"{name}.weight", (d_in, d_out)))
    return g.apply(f"{name}.shift", Add(), y, g.parameter(f"{name}.bias", (d_out,))) if bias else y


def norm(g: Graph, name: str, x: int, spec: Spec, width: int | None = None) -> int:
    """The normalised tokens times a gain, plus, for LayerNorm with biases, a shift; the tokens, without a norm.

    Their ``width`` is ``d_model`` unless given.
    """
    if spec.norm == "none":
        return x
    shape, centred = (width or spec.d_model,), spec.norm == "layernorm"
    y = g.apply(name, (LayerNorm if centred else RMSNorm)(spec.norm_eps), x)
    y = scale(g, name, y, *shape, node=f"{name}.gain")
    if centred and spec.bias:
        y = g.apply(f"{name}.shift", Add(), y, g.parameter(f"{name}.bias", shape))
    return y


def scale(g: Graph, name: str, x: int, width: int, node: str | None = None) -> int:
    """Each feature times a gain of its own, in a ``node`` of this name unless another is given."""
    return g.apply(node or name, Hadamard(), x, g.parameter(f"{name}.weight", (width,)))
