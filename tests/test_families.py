"""What holds for a model holds for one of every family: curvature against autograd, blocks on their own, and bounds."""

import pytest

from hesscore import blocks
from hesscore.bounds.settings import Sweep, ask
from hesscore.bounds.tiers import TIERS, rows
from hesscore.problem import open_problem
from hesscore.verify import verify_model
from tests.oracle import saved
from tests.test_fuzz import MODELS


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return saved(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def problem(folder):
    return open_problem(folder)


def last(problem):
    """The last layer with weights of its own, and its parameters."""
    return max(blocks.by_layer(problem.parameters).items())


def test_its_curvature_is_autograds(problem):
    assert [
        check for check in verify_model(problem.graph, problem.parameters, problem.batches) if not check.passed
    ] == []


def test_a_block_on_its_own_is_its_matrix(problem):
    layer, names = last(problem)
    curvature = problem.block(layer)
    components = sorted({name for name in names if ".attn.q." in name})
    (whole,) = (
        row
        for row in blocks.analyze(curvature, problem.spec, layer, components)
        if (row.row, row.part) == ("block", "full")
    )
    dense = curvature.dense([name for name in curvature.parameters if ".attn.q." in name])
    assert whole.frobenius == pytest.approx(float(dense.norm()), rel=1e-12)


@pytest.mark.slow
def test_no_bound_is_beaten(folder, problem):
    layer, _ = last(problem)
    (block,) = ask(str(folder), Sweep([], [], [], []), {}, "input", measured=True, layers=str(layer)).blocks
    found = list(rows(block.spec, block.scalars, block.length, "input", list(TIERS), layer, block.curvature))
    assert len(found) > 100
    for row in found:
        assert row.exact is not None
        assert row.exact_error is not None
        for bound in row.apriori, row.swept, row.enclosure_upper:
            if bound is not None:  # parameters that a tier does not know by themselves
                assert row.exact - row.exact_error <= bound * (1 + 1e-9), row
