"""The scalars that an a-priori bound rests on, by name: what is known before any token has been seen."""

from __future__ import annotations

from fnmatch import fnmatch
from math import hypot, log, sqrt

from hesscore.spec import Spec

TARGETS = ("input", "zero", "random")
"""What the output of a block is compared with, as in ``hesscore.problem``."""

MEANINGS = {
    "input.norm": "largest norm of a token at the block's input",
    "input.spread": "|X|_2 / sqrt(L) of a sequence of input tokens; at most input.norm",
    "target.norm": "largest norm of a token of the target",
    "residual.norm": "largest norm of a token of output minus target",
    "attn.peak": "largest attention weight; a causal block has 1, as its first token has no choice",
    "*.deviation": "largest standard deviation of a head's keys or values under an attention row, along any direction",
    "*.input.norm": "largest norm of what a weight multiplies",
    "*.input.spread": "|X|_2 / sqrt(L) of what a weight multiplies",
    "*.scale": "smallest row scale s of a norm",
    "*.entry": "largest entry of a normalised token, before its gain",
    "*.gain": "largest entry of a gain",
    "*.weight": "spectral norm of a weight",
    "*.head": "largest spectral norm of one head's part of a weight",
    "*.heads": "root of the sum of squares of the heads' spectral norms",
    "*.bias": "norm of a bias or a shift",
}

DERIVED = ("residual.norm", "*.entry", "*.deviation", "*.input.norm", "*.input.spread")
"""What is bounded from the others unless it is known."""


def names(spec: Spec) -> list[str]:
    """Of the scalars of a block, in the order in which it uses them."""
    found = ["input.norm", "input.spread", "target.norm", "residual.norm"]
    if not spec.causal:
        found.append("attn.peak")
    norms = [] if spec.norm == "none" else ["norm1", "norm2"] if spec.d_ff else ["norm1"]
    for norm in norms:
        found += [f"{norm}.scale", f"{norm}.entry", f"{norm}.gain"]
        if spec.bias and spec.norm == "layernorm":
            found.append(f"{norm}.bias")
    for part in weights(spec):
        found.append(f"{part}.weight")
        if part in ("attn.q", "attn.k", "attn.v"):
            found += [f"{part}.head", f"{part}.heads"]
        if spec.biased(part):
            found.append(f"{part}.bias")
    if spec.layer_scale:
        found += ["scale1.gain", "scale2.gain"] if spec.d_ff else ["scale1.gain"]
    found += ["attn.k.deviation", "attn.v.deviation"]
    seen = ["attn", "attn.o", "mlp", "mlp.down"] if spec.d_ff else ["attn", "attn.o"]
    return found + [f"{part}.input.{quantity}" for part in seen for quantity in ("norm", "spread")]


def meaning(name: str) -> str:
    return next(text for pattern, text in MEANINGS.items() if fnmatch(name, pattern))


def derived(name: str) -> bool:
    """Whether a block does without it."""
    return any(fnmatch(name, pattern) for pattern in DERIVED)


def weights(spec: Spec) -> list[str]:
    """The components of a block that have a weight matrix."""
    hidden = ["mlp.gate"] * spec.gated + ["mlp.up", "mlp.down"] if spec.d_ff else []
    return ["attn.q", "attn.k", "attn.v", "attn.o", *hidden]


def expected(spec: Spec, length: int, target: str, input_norm: float | None = None) -> dict[str, float]:
    """What seeded weights and standard normal tokens, scaled to ``input_norm``, are expected to have.

    A Gaussian matrix ``(m, n)`` of standard deviation ``std`` has an expected spectral norm of at most
    ``std (sqrt(m) + sqrt(n))``; the longest and the shortest of ``L`` tokens are within about ``sqrt(ln L)`` of
    ``sqrt(d)``; the largest of ``n`` normal numbers is expected to be at most ``sqrt(2 ln 2n)``.  The second norm is
    taken to see what the first does, and no smaller row scale: a residual stream grows.
    """
    d, width = spec.d_model, spec.head_width
    longest, shortest = _longest(spec, length), max(sqrt(d - 1) - sqrt(log(spec.batch * length)), 0.0)
    size = 1.0 if input_norm is None else input_norm / longest
    scale = hypot(size * shortest / sqrt(d), sqrt(spec.norm_eps))
    found = {
        "input.norm": size * longest,
        "input.spread": size * min(longest, 1 + sqrt(d / length)),
        "target.norm": target_norm(spec, length, target, size * longest),
    }
    if not spec.causal:
        found["attn.peak"] = 1.0
    shapes = {
        "attn.q": (d, spec.heads * width),
        "attn.o": (spec.heads * width, d),
        "attn.k": (d, spec.groups * width),
        "attn.v": (d, spec.groups * width),
        "mlp.gate": (d, spec.d_ff),
        "mlp.up": (d, spec.d_ff),
        "mlp.down": (spec.d_ff, d),
    }
    for name in names(spec):
        part, _, quantity = name.rpartition(".")
        rows, columns = shapes.get(part, (1, 1))
        std = spec.init_std or rows**-0.5
        if quantity == "scale":
            found[name] = scale
        elif quantity == "entry":
            found[name] = min(sqrt(2 * log(2 * d * spec.batch * length)), sqrt(d))
        elif quantity == "gain":
            found[name] = 1.0
        elif quantity == "bias":
            found[name] = 0.0
        elif quantity == "weight":
            found[name] = std * (sqrt(rows) + sqrt(columns))
        elif quantity in ("head", "heads"):
            one = std * (sqrt(rows) + sqrt(width))
            found[name] = one * sqrt(columns // width) if quantity == "heads" else one
    return found


def target_norm(spec: Spec, length: int, target: str, input_norm: float) -> float:
    """Of one of the ``TARGETS``; random tokens are as long as can be expected."""
    return {"input": input_norm, "zero": 0.0, "random": _longest(spec, length)}[target]


def _longest(spec: Spec, length: int) -> float:
    """Of standard normal tokens."""
    return sqrt(spec.d_model) + sqrt(log(spec.batch * length))
