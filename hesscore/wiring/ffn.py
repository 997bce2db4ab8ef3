"""The feed-forward part of a block."""

from __future__ import annotations

from hesscore.components.activation import Activation
from hesscore.components.hadamard import Hadamard
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.parts import linear


def ffn(g: Graph, name: str, x: int, spec: Spec) -> int:
    """``f(x W_up) W_down``; gated, ``(x W_up * f(x W_gate)) W_down``."""
    up = linear(g, f"{name}.up", x, spec.d_model, spec.d_ff, spec.biased("mlp.up"))
    if spec.gated:
        gate = linear(g, f"{name}.gate", x, spec.d_model, spec.d_ff, spec.biased("mlp.gate"))
        gate = g.apply(f"{name}.activation", Activation(spec.activation), gate)
        hidden = g.apply(f"{name}.product", Hadamard(), up, gate)
    else:
        hidden = g.apply(f"{name}.activation", Activation(spec.activation), up)
    return linear(g, f"{name}.down", hidden, spec.d_ff, spec.d_model, spec.biased("mlp.down"))
