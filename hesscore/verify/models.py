"""Small models, few but such that every two options that fit together meet in one of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import randn
from hesscore.components.activation import ACTIVATIONS
from hesscore.spec import Spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.model import inputs, parameters

# The grid's axes: options by name, with the fields of a spec that they set.  The last is not one of the spec.
AXES: tuple[dict[str, dict[str, Any]], ...] = (
    {name: {"placement": name} for name in BLOCKS},
    {name: {"norm": name} for name in ("layernorm", "rmsnorm")} | {"no norms": {"norm": "none"}},
    {name: {"activation": name} for name in ACTIVATIONS},
    {"": {}, "gated": {"gated": True}, "no FFN": {"d_ff": 0}},
    {"": {}, "bidirectional": {"causal": False}},
    {"": {}, "no biases": {"bias": False}},
    {"": {}, "learned": {"positions": "learned"}, "rotary": {"positions": "rotary"}},
    {"": {}, "2 heads": {"heads": 2}, "2/1 heads": {"heads": 2, "kv_heads": 1}},
    {"": {}, "2 layers": {"layers": 2}, "4 layers": {"layers": 4}},
    {"": {}, "tied": {"tied": True}, "squared error": {"vocab": None}},
    {"": {}, "padded": {}},
)


def grid() -> dict[str, Spec]:
    """Small models by name, in which every two options of different axes that fit together meet."""
    rng = random.Random(0)
    options = [[(i, option) for option in axis] for i, axis in enumerate(AXES)]
    pairs = {pair for a, b in combinations(options, 2) for pair in product(a, b)}
    unmet = {pair for pair in pairs if _spec(dict(pair))}
    specs = {}
    while unmet:
        seed = dict(min(unmet))
        drawn = [dict(map(rng.choice, options)) | seed for _ in range(50)]
        fitting = {tuple(sorted(choice.items())): spec for choice in drawn if (spec := _spec(choice))}
        best = max(fitting, key=lambda choice: len(unmet.intersection(combinations(choice, 2))))
        unmet.difference_update(combinations(best, 2))
        specs[" ".join(option for _, option in best if option)] = fitting[best]
    return specs


def _spec(choice: Mapping[int, str]) -> Spec | None:
    """The spec with these options by axis, and with the first of every other; ``None`` if they do not fit."""
    fields: dict[str, Any] = {"d_model": 4, "d_ff": 3, "seq_len": 3, "batch": 2, "vocab": 5}
    for axis, option in choice.items():
        fields |= AXES[axis][option]
    try:
        return Spec(**fields)
    except ValueError:
        return None


def draw(spec: Spec, padded: bool, rng: Generator) -> dict[str, Tensor]:
    """Leaves off their initial values: every gain and every bias is its own."""
    shape = spec.batch, spec.seq_len
    if spec.vocab:
        data, target = (torch.randint(spec.vocab, shape, generator=rng) for _ in range(2))
    else:
        data, target = (randn(rng, *shape, spec.d_model) for _ in range(2))
    keep = torch.ones(shape, dtype=torch.bool)
    keep[0, -1] = not padded
    weights = {name: value + 0.3 * randn(rng, *value.shape) for name, value in parameters(spec).items()}
    return inputs(spec, data, target, keep) | weights
