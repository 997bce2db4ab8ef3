"""One block: where the norms stand and what runs beside what."""

from __future__ import annotations

from hesscore.components.add import Add
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.attention import attention
from hesscore.wiring.ffn import ffn
from hesscore.wiring.parts import norm, scale


def pre(g: Graph, name: str, x: int, spec: Spec, mask: str = "mask") -> int:
    """``x <- x + attention(norm1(x))``, then ``x <- x + ffn(norm2(x))``."""
    x = g.apply(f"{name}.residual1", Add(), x, _mixed(g, name, norm(g, f"{name}.norm1", x, spec), spec, mask))
    if not spec.d_ff:
        return x
    return g.apply(f"{name}.residual2", Add(), x, _fed(g, name, norm(g, f"{name}.norm2", x, spec), spec))


def post(g: Graph, name: str, x: int, spec: Spec, mask: str = "mask") -> int:
    """``x <- norm1(x + attention(x))``, then ``x <- norm2(x + ffn(x))``."""
    x = norm(g, f"{name}.norm1", g.apply(f"{name}.residual1", Add(), x, _mixed(g, name, x, spec, mask)), spec)
    if not spec.d_ff:
        return x
    return norm(g, f"{name}.norm2", g.apply(f"{name}.residual2", Add(), x, _fed(g, name, x, spec)), spec)


def parallel(g: Graph, name: str, x: int, spec: Spec, mask: str = "mask") -> int:
    """``x <- x + attention(norm1(x)) + ffn(norm2(x))``."""
    mixed = _mixed(g, name, norm(g, f"{name}.norm1", x, spec), spec, mask)
    beside = g.apply(f"{name}.residual1", Add(), x, mixed)
    if not spec.d_ff:
        return beside
    return g.apply(f"{name}.residual2", Add(), beside, _fed(g, name, norm(g, f"{name}.norm2", x, spec), spec))


BLOCKS = {"pre": pre, "post": post, "parallel": parallel}
"""Without a hidden width there is no feed-forward part."""


def _mixed(g: Graph, name: str, x: int, spec: Spec, mask: str) -> int:
    y = attention(g, f"{name}.attn", x, spec, mask)
    return scale(g, f"{name}.scale1", y, spec.d_model) if spec.layer_scale else y


def _fed(g: Graph, name: str, x: int, spec: Spec) -> int:
    y = ffn(g, f"{name}.mlp", x, spec)
    return scale(g, f"{name}.scale2", y, spec.d_model) if spec.layer_scale else y
