"""Blocks whose exact norm is the a-priori bound itself: nothing may be taken off any step of it."""

import pytest
import torch

from hesscore.bounds.apriori import apriori
from hesscore.bounds.measure import of_data, of_weights
from hesscore.bounds.scalars import derived
from hesscore.curvature import Batch, Curvature, inner, outer
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests.reference import shapes


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


ONE_LONG = tensor([3.0, 0.0], *[[0.1, 0.0]] * 7)
"""A token, and seven that look at it."""

EYE, NOTHING = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
ATTENTION = {"d_ff": 0}
ATTAINED = {
    "the slope of a squared ReLU": (
        {"d_ff": 1, "activation": "relu_squared"},
        dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.o"), NOTHING)
        | {"mlp.up": tensor([1.0], [0.0]), "mlp.down": tensor([1.0, 0.0])},
        [tensor([3.0, 0.0])],
        ("mlp.up.weight", "mlp.up.weight", "outer", 324.0),
    ),
    "an entry of a token as long as a norm makes it": (
        {**ATTENTION, "norm": "rmsnorm", "placement": "post"},
        dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.o"), NOTHING),
        [tensor([3.0, 0.0])],
        ("norm1.weight", "norm1.weight", "outer", 2.0),
    ),
    "values that bend": (
        {**ATTENTION, "norm": "rmsnorm"},
        {"attn.q": NOTHING, "attn.k": NOTHING},
        [tensor([3.0, 0.0])],
        ("attn.v.weight", "norm1.weight", "functional", None),
    ),
    "all attention on one long token": (
        ATTENTION,
        {"attn.q": 1000 * EYE},
        [ONE_LONG],
        ("attn.o.weight", "attn.o.weight", "outer", 9.0),
    ),
}


def block(fields, weights, sequences):
    """Against zero, each sequence a part of the data of its own."""
    given = {"d_model": 2, "norm": "none", "norm_eps": 0.0, "causal": False, "bias": False} | fields
    spec = Spec.model_validate(given | {"seq_len": len(sequences[0]) if sequences[0].ndim > 1 else 1})
    leaves = {
        name: weights.get(
            name.removeprefix("blocks.0.").removesuffix(".weight"), EYE if len(shape) > 1 else tensor(1, 1)
        )
        for name, shape in shapes(spec).items()
    }
    parts = [x.reshape(1, -1, 2) for x in sequences]
    batches = [Batch(1 / len(parts), inputs(spec, x, torch.zeros_like(x))) for x in parts]
    curvature = Curvature(model(spec), leaves, batches)
    return spec, curvature, of_weights(spec, leaves) | of_data(curvature, spec)


def exact(curvature, a, b, part):
    terms = outer if part == "outer" else inner
    return float(torch.linalg.matrix_norm(curvature.block(f"blocks.0.{a}", f"blocks.0.{b}", terms).dense(), 2))


@pytest.mark.parametrize(("fields", "weights", "sequences", "pair"), ATTAINED.values(), ids=ATTAINED)
def test_the_bound_is_attained(fields, weights, sequences, pair):
    spec, curvature, scalars = block(fields, weights, sequences)
    least = {name: value for name, value in scalars.items() if not derived(name)}
    a, b, part, value = pair
    truth = exact(curvature, a, b, part)
    if value is not None:
        assert truth == pytest.approx(value, rel=1e-12)
    for known in scalars, least:
        bound = getattr(apriori(spec, known, spec.seq_len, "zero")[a, b], part)
        assert bound == pytest.approx(truth, rel=1e-12)


def test_scalars_are_of_all_parts_of_the_data():
    """Of two sequences: the norm's smallest scale is that of the one whose attention all but undoes it."""
    undone = {"attn.q": EYE, "attn.k": EYE, "attn.v": torch.diag(tensor(1.0, 0.0)), "attn.o": -0.99 * EYE}
    fields = {**ATTENTION, "norm": "rmsnorm", "placement": "post"}
    spec, curvature, scalars = block(fields, undone, [tensor([1.0, 0.0]), tensor([0.0, 1.0])])
    assert scalars["norm1.scale"] == pytest.approx(0.01 / 2**0.5, rel=1e-12)
    truth = exact(curvature, "attn.o.weight", "attn.o.weight", "outer")
    assert truth == pytest.approx(1e4, rel=1e-9)
    assert truth <= apriori(spec, scalars, 1, "zero")["attn.o.weight", "attn.o.weight"].outer
