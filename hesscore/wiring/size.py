"""How large a model and its data are, before either is built: a spec may ask for anything."""

from __future__ import annotations

from math import prod

from hesscore.spec import Spec
from hesscore.wiring.model import model


def parameter_count(spec: Spec) -> int:
    sizes = ({"layers": layers, "weight_sets": None} for layers in (1, 2))
    one, two = (sum(map(prod, model(spec.model_copy(update=size)).parameters.values())) for size in sizes)
    return one + ((spec.weight_sets or spec.layers) - 1) * (two - one)


def kept(spec: Spec, length: int) -> int:
    """Numbers that stay in memory of a sequence of ``length`` tokens: its data, values and gradients."""
    d = spec.d_model
    features = (14 if spec.layer_scale else 10) * d + 4 * (spec.heads + spec.groups) * spec.head_width
    hidden = (9 if spec.gated else 5) * spec.d_ff
    attention = 3 * spec.heads * length
    scales = 10
    before = 4 * d + 3 * (spec.d_embed or d) * spec.embed_norm if spec.embeds else 0
    after = 2 * d if spec.outputs is None else 3 * spec.outputs + 6 * d * (spec.head_transform or spec.pools)
    together = length if not spec.pools else 1
    return length * (spec.layers * (features + hidden + attention + scales) + before) + together * after


def operations(spec: Spec, length: int, layers: int) -> float:
    """Multiplications and additions of one product with the Hessian, for a sequence, that goes through so many layers.

    Each weight takes two matrix products, one forwards and one back; the products of attention take four each.
    """
    width = spec.head_width
    linear = spec.d_model * width * 2 * (spec.heads + spec.groups) + (2 + spec.gated) * spec.d_model * spec.d_ff
    attention = 2 * 4 * spec.heads * width * length
    head = 2 * 2 * spec.d_model * (spec.outputs or 0) * (1 if spec.pools else length)
    return float(layers * length * (4 * linear + attention) + head)
