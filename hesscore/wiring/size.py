"""How large a model and its data are, before either is built: a spec may ask for anything."""

from __future__ import annotations

from math import prod

from hesscore.spec import Spec
from hesscore.wiring.model import model


def parameter_count(spec: Spec) -> int:
    one, two = (
        sum(map(prod, model(spec.model_copy(update={"layers": layers})).parameters.values())) for layers in (1, 2)
    )
    return one + (spec.layers - 1) * (two - one)


def kept(spec: Spec, length: int) -> int:
    """Numbers that stay in memory of a sequence of ``length`` tokens: its data, values and gradients."""
    features = 14 * spec.d_model + 4 * spec.groups * spec.head_dim
    hidden = (9 if spec.gated else 5) * spec.d_ff
    attention = 3 * spec.heads * length
    scales = 10
    ends = 4 * spec.d_model + 3 * spec.vocab if spec.vocab else 2 * spec.d_model
    return length * (spec.layers * (features + hidden + attention + scales) + ends)
