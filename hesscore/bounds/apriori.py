"""Bounds from scalars alone: no data and no tensor.

Token by token, the output of a block moves by ``J_a`` with a unit tangent of parameter ``a`` and bends by ``K_ab`` with
two (``hesscore.bounds.jets``).  Under the mean over tokens of ``|y - t|^2 / d``

    |H_outer[a, b]| <= (2/d) J_a J_b            |H_functional[a, b]| <= (2/d) max |y - t| K_ab

with root mean squares over the tokens for ``J`` and the mean for ``K``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from hesscore.bounds.jets import (
    Head,
    Jet,
    Pair,
    Size,
    activate,
    attend,
    linear,
    multiply,
    normalise,
    pairs,
    times,
    weigh,
)
from hesscore.bounds.scalars import derived, names
from hesscore.extrema import EXTREMA
from hesscore.spec import Spec

WHOLE = "block"
"""Stands for all parameters of the block together."""


class Bound(NamedTuple):
    """Of the spectral norms of the two parts of a Hessian between two parameters."""

    outer: float
    functional: float


def apriori(spec: Spec, scalars: Mapping[str, float], length: int, target: str) -> dict[Pair, Bound]:
    """A bound for each pair of the parameters of one block, ``attn.q.weight`` and so on, and for ``(WHOLE, WHOLE)``.

    ``scalars`` are those of ``hesscore.bounds.scalars.names(spec)``, ``target`` is one of ``hesscore.problem.TARGETS``.
    The bounds hold for every block and every sequence of ``length`` tokens of which these scalars hold.
    """
    output, change = _block(spec, scalars, length)
    off = change.value.peak if target == "input" else output.value.peak + scalars["target.norm"]
    steep = 2 / spec.d_model
    residual = scalars.get("residual.norm", off)
    found = {}
    for a, b in pairs(output.first):
        moved = output.along(a) * output.along(b)
        bent = output.across(a, b)
        found[a, b] = Bound(times(steep, moved.mean), times(steep * residual, bent.mean))
    return found | {(WHOLE, WHOLE): whole(found)}


def output_norm(spec: Spec, scalars: Mapping[str, float], length: int) -> float:
    """How long a token of the block's output can be: the next block's ``input.norm``."""
    return _block(spec, scalars, length)[0].value.peak


def whole(found: Mapping[Pair, Bound]) -> Bound:
    """``|H| <= |N|_2`` for the matrix ``N`` of the bounds of all pairs: ``u^T H w <= sum_ab |u_a| N_ab |w_b|``."""
    parameters = sorted({name for pair in found for name in pair})
    parts = []
    for part in range(2):
        matrix = np.array([[found[min(a, b), max(a, b)][part] for b in parameters] for a in parameters])
        parts.append(float(np.linalg.norm(matrix, 2)) if np.isfinite(matrix).all() else inf)
    return Bound(*parts)


def _block(spec: Spec, scalars: Mapping[str, float], length: int) -> tuple[Jet, Jet]:
    """The block's output, and by how much it differs from the input; ``KeyError`` names scalars that are missing."""
    if missing := [name for name in names(spec) if name not in scalars and not derived(name)]:
        raise KeyError(", ".join(missing))

    def norm(name: str, x: Jet) -> Jet:
        if spec.norm == "none":
            return x
        entry = scalars.get(f"{name}.entry", sqrt(spec.d_model - (spec.norm == "layernorm")))
        scale, gain, bias = scalars[f"{name}.scale"], scalars[f"{name}.gain"], scalars.get(f"{name}.bias")
        return normalise(x, scale, spec.d_model, entry, name, gain, bias)

    def scaled(name: str, x: Jet) -> Jet:
        return weigh(x, f"{name}.weight", scalars[f"{name}.gain"]) if spec.layer_scale else x

    def fed(x: Jet) -> Jet:
        return scaled("scale2", _ffn(spec, scalars, x))

    def mixed(x: Jet) -> Jet:
        return scaled("scale1", _attention(spec, scalars, x, length))

    x = Jet(Size(scalars["input.norm"], scalars["input.spread"]))
    if spec.placement == "post" and spec.norm != "none":
        y = norm("norm1", x + mixed(x))
        if spec.d_ff:
            y = norm("norm2", y + fed(y))
        return y, y + x
    change = mixed(norm("norm1", x))
    if spec.d_ff:
        seen = x if spec.placement == "parallel" else x + change
        change = change + fed(norm("norm2", seen))
    return x + change, change


def _attention(spec: Spec, scalars: Mapping[str, float], x: Jet, length: int) -> Jet:
    """Of all heads, and through ``W_O``."""
    x = _known(x, "attn.input", scalars)

    def project(part: str, size: float) -> Jet:
        return linear(x, f"attn.{part}", size, scalars.get(f"attn.{part}.bias"))

    def longest(part: str) -> Size:
        """In any one head."""
        return scalars[f"attn.{part}.head"] * x.value + bias(part)

    def bias(part: str) -> Size:
        size = scalars.get(f"attn.{part}.bias", 0.0)
        return Size(size, size)

    shared = sqrt(spec.heads // spec.groups)  # a key or value head is there once for each of its query heads
    q = project("q", scalars["attn.q.weight"])
    k, v = (shared * project(part, scalars[f"attn.{part}.heads"]) for part in "kv")
    query = longest("q").peak
    if spec.rotated:  # tokens that are turned apart may come to lie along one direction
        stretch = max(1.0, spec.rotary_scale)
        q, k, query = stretch * q, stretch * k, stretch * query
        keys = stretch * Size(longest("k").peak, longest("k").peak)
    else:  # what moves all scores of a row alike is not seen
        k, keys = k.without("attn.k.bias"), scalars["attn.k.head"] * x.value
    deviations = (scalars.get(f"attn.{part}.deviation", inf) for part in "kv")
    head = Head(spec.head_width, query, keys, longest("v"), *deviations)
    o = _known(attend(q, k, v, head, scalars.get("attn.peak", 1.0), length), "attn.o.input", scalars)
    return linear(o, "attn.o", scalars["attn.o.weight"], scalars.get("attn.o.bias"))


def _ffn(spec: Spec, scalars: Mapping[str, float], x: Jet) -> Jet:
    slope, bend = EXTREMA[spec.activation]
    x = _known(x, "mlp.input", scalars)

    def project(part: str, y: Jet) -> Jet:
        return linear(y, f"mlp.{part}", scalars[f"mlp.{part}.weight"], scalars.get(f"mlp.{part}.bias"))

    def active(y: Jet) -> Jet:
        return activate(y, 2 * y.value.peak if spec.activation == "relu_squared" else slope, bend)

    up = project("up", x)
    hidden = multiply(up, active(project("gate", x))) if spec.gated else active(up)
    return project("down", _known(hidden, "mlp.down.input", scalars))


def _known(x: Jet, name: str, scalars: Mapping[str, float]) -> Jet:
    """With the size of what a weight sees, where it is known and is the smaller one."""
    peak, mean = (scalars.get(f"{name}.{quantity}", inf) for quantity in ("norm", "spread"))
    return replace(x, value=Size(min(x.value.peak, peak), min(x.value.mean, mean)))
