"""Bounds from the norms of maps: never beaten by the norm of a dense block, and of the whole."""

import pytest
import torch

from hesscore.curvature import Curvature
from hesscore.norms import norm_bounds
from hesscore.problem import split
from hesscore.spec import make_spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference
from tests.test_activations import SPECS as PLACEMENTS
from tests.test_activations import case, curvature_of
from tests.test_curvature import SPEC


def check(curvature):
    names = curvature.parameters
    bounds = norm_bounds(curvature, {**{name: [name] for name in names}, "all": names})
    for name in names:
        norm = float(torch.linalg.matrix_norm(curvature.dense([name]), 2))
        assert norm <= bounds[name] < float("inf"), name
    whole = float(torch.linalg.matrix_norm(curvature.dense(), 2))
    assert whole <= bounds["all"]
    assert max(bounds[name] for name in names) <= bounds["all"]
    return bounds


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_block_beats_its_bound(name, parts):
    spec, weights, ids, targets, keep = case(name)
    check(curvature_of(spec, weights, ids, targets, keep, parts))


def test_nor_in_the_reference_model():
    weights, data = reference.draw(SPEC, padding=1)
    check(Curvature(model(SPEC), inputs(SPEC, **data) | weights))


def test_next_to_the_loss_the_bound_is_near():
    """A squared error after one linear map: ``|H| = |X|^2 2/(d N)``, without a map that loosens it."""
    spec = make_spec({"d_model": 4, "d_ff": 0, "norm": "none", "seq_len": 6})
    from hesscore.problem import drawn_data
    from hesscore.wiring.model import parameters

    curvature = Curvature(model(spec), parameters(spec), split(spec, drawn_data(spec, 0)))
    name = "blocks.0.attn.o.weight"
    norm = float(torch.linalg.matrix_norm(curvature.dense([name]), 2))
    assert norm <= norm_bounds(curvature, {name: [name]})[name] <= norm * (1 + 1e-6)


def test_float32_is_covered():
    weights, data = reference.draw(SPEC, padding=1)
    exact = Curvature(model(SPEC), inputs(SPEC, **data) | weights)
    rounded = Curvature(model(SPEC), inputs(SPEC, **data) | {name: w.float() for name, w in weights.items()})
    names = {name: [name] for name in exact.parameters}
    right, found = norm_bounds(exact, names), norm_bounds(rounded, names)
    for name in names:
        assert found[name] == pytest.approx(right[name], rel=5e-3)
        assert float(torch.linalg.matrix_norm(exact.dense([name]), 2)) <= found[name]
