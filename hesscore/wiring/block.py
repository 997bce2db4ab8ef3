"""One block: where the norms stand and what runs beside what."""

from __future__ import annotations

from hesscore.components.add import Add
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.attention import attention
from hesscore.wiring.ffn import ffn
from hesscore.wiring.parts import norm


def pre(g: Graph, name: str, x: int, spec: Spec) -> int:
    """``x <- x + attention(norm1(x))``, then ``x <- x + ffn(norm2(x))``."""
    mixed = attention(g, f"{name}.attn", norm(g, f"{name}.norm1", x, spec), spec)
    x = g.apply(f"{name}.residual1", Add(), x, mixed)
    if not spec.d_ff:
        return x
    fed = ffn(g, f"{name}.mlp", norm(g, f"{name}.norm2", x, spec), spec)
    return g.apply(f"{name}.residual2", Add(), x, fed)


def post(g: Graph, name: str, x: int, spec: Spec) -> int:
    """``x <- norm1(x + attention(x))``, then ``x <- norm2(x + ffn(x))``."""
    mixed = attention(g, f"{name}.attn", x, spec)
    x = norm(g, f"{name}.norm1", g.apply(f"{name}.residual1", Add(), x, mixed), spec)
    if not spec.d_ff:
        return x
    fed = ffn(g, f"{name}.mlp", x, spec)
    return norm(g, f"{name}.norm2", g.apply(f"{name}.residual2", Add(), x, fed), spec)


def parallel(g: Graph, name: str, x: int, spec: Spec) -> int:
    """``x <- x + attention(norm1(x)) + ffn(norm2(x))``."""
    mixed = attention(g, f"{name}.attn", norm(g, f"{name}.norm1", x, spec), spec)
    beside = g.apply(f"{name}.residual1", Add(), x, mixed)
    if not spec.d_ff:
        return beside
    fed = ffn(g, f"{name}.mlp", norm(g, f"{name}.norm2", x, spec), spec)
    return g.apply(f"{name}.residual2", Add(), beside, fed)


BLOCKS = {"pre": pre, "post": post, "parallel": parallel}
"""Without a hidden width there is no feed-forward part."""
