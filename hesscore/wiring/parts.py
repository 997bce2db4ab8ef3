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


def norm(g: Graph, name: str, x: int, spec: Spec) -> int:
    """The normalised tokens times a gain, plus, for LayerNorm with biases, a shift; the tokens, without a norm."""
    if spec.norm == "none":
        return x
    centred = spec.norm == "layernorm"
    y = g.apply(name, (LayerNorm if centred else RMSNorm)(spec.norm_eps), x)
    y = g.apply(f"{name}.gain", Hadamard(), y, g.parameter(f"{name}.weight", (spec.d_model,)))
    if centred and spec.bias:
        y = g.apply(f"{name}.shift", Add(), y, g.parameter(f"{name}.bias", (spec.d_model,)))
    return y
