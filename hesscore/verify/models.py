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
from hesscore.inputs.data import drawn
from hesscore.spec import Spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import parameters

# The grid's axes: options by name, with the fields of a spec that they set.  The last is not one of the spec.
AXES: tuple[dict[str, dict[str, Any]], ...] = (
    {name: {"placement": name} for name in BLOCKS},
    {name: {"norm": name} for name in ("layernorm", "rmsnorm")} | {"no norms": {"norm": "none", "init_std": 0.2}},
    {name: {"activation": name} for name in ACTIVATIONS},
    {"": {}, "gated": {"gated": True}, "no FFN": {"d_ff": 0}},
    {"": {}, "bidirectional": {"causal": False}},
    {
        "": {},
        "no biases": {"bias": False},
        "biases of q, k, v": {"bias": False, "qkv_bias": True},
        "no biases of q, k, v": {"qkv_bias": False},
    },
    {
        "": {},
        "learned": {"positions": "learned"},
        "learned from padding on": {"positions": "learned", "position_offset": 2},
        "rotary": {"positions": "rotary"},
        "partly rotary": {"positions": "rotary", "rotary_dim": 2, "head_dim": 3, "rotary_scale": 1.5},
    },
    {"": {}, "2 heads": {"heads": 2}, "2/1 heads": {"heads": 2, "kv_heads": 1}},
    {"": {}, "2 layers": {"layers": 2}, "4 layers": {"layers": 4}, "shared": {"layers": 4, "weight_sets": 2}},
    {"": {}, "window": {"window": 2, "window_from": 1}},
    {"": {}, "layer scale": {"layer_scale": True}},
    {
        "": {},
        "segments": {"segments": 2},
        "embedding norm": {"embed_norm": True},
        "narrow embedding": {"d_embed": 3},
        "images": {"vocab": None, "causal": False, "image_size": 2, "patch_size": 1, "channels": 2},
        "class token": {"vocab": None, "causal": False, "image_size": 2, "patch_size": 1, "class_token": True},
    },
    {
        "": {},
        "tied": {"tied": True},
        "head transform": {"head_transform": True, "head_bias": True},
        "tied transform": {"head_transform": True, "tied": True, "head_bias": True},
        "hidden": {"loss": "hidden"},
        "classes of tokens": {"loss": "token", "labels": 3},
        "classes": {"loss": "sequence", "labels": 3, "pooler": True},
        "classes by the last": {"loss": "sequence", "labels": 3, "pool": "last"},
        "classes by the mean": {"loss": "sequence", "labels": 3, "pool": "mean", "pooled_norm": True},
        "numbers": {"loss": "regression", "labels": 2, "pool": "first_mean"},
        "squared error": {"vocab": None},
    },
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
    data = drawn(spec, rng)
    keep = torch.ones(spec.batch, spec.length, dtype=torch.bool)
    keep[0, -1] = not padded
    segments = torch.randint(spec.segments or 1, keep.shape, generator=rng)
    off = 0.3 * (spec.init_std or 1.0)  # without norms, activations grow from layer to layer
    weights = {name: value + off * randn(rng, *value.shape) for name, value in parameters(spec).items()}
    return inputs(spec, data.data, data.target, keep, segments=segments) | weights
