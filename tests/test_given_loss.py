"""A loss given by its gradient and its Hessian stands in for any other."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hesscore.chain import Point
from hesscore.components.given_loss import GivenLoss
from hesscore.curvature import Curvature, inner, outer
from hesscore.explicit.block import block_hessian
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.inputs import inputs
from tests import reference
from tests.test_hessian import distance, flat, twice, unflat

CALCULUS = Path(__file__).parent.parent / "docs" / "calculus.md"
TABLE = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([[0, 4, 1], [2, 2, 3]])


def log_cosh(y):
    """Of every entry, with a weight of its own."""
    return (torch.arange(1, y.numel() + 1).view(y.shape) * y.cosh().log()).sum()


def cross_entropy(y):
    """Of a head and a loss that are no part of the graph: it mixes the features of a token."""
    return F.cross_entropy((y @ TABLE).flatten(0, 1), LABELS.flatten())


def quartic(y):
    """Of no convex shape, so that the Hessians have eigenvalues of both signs."""
    return (y.square().sum(-1).square() - 20 * y.prod(-1) - 9 * y[..., 0] * y[..., 1]).mean()


def derivatives(loss, y):
    """Gradient and Hessian of each token; between tokens there is none."""
    gradient, hessian = twice(lambda v: loss(v.view(y.shape)), y.flatten())
    n, z = y.shape[:-1].numel(), y.shape[-1]
    by_token = hessian.view(n, z, n, z)
    own = by_token.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert distance(own.norm(), hessian.norm()) < 1e-13
    return {"at": y, "gradient": gradient.view(y.shape), "hessian": own.reshape(*y.shape, z)}


@pytest.mark.parametrize("loss", [log_cosh, cross_entropy, quartic])
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_the_block_hessian_under_any_loss(placement, loss):
    spec = Spec(d_model=8, d_ff=6, heads=2, seq_len=3, placement=placement)
    weights, data = reference.draw(spec)
    g = Graph()
    y = BLOCKS[placement](g, "blocks.0", g.constant("input"), spec)
    leaves = inputs(spec, **data) | weights
    at = Point(g, leaves).output
    g.apply("loss", GivenLoss(), y, *map(g.constant, ("at", "gradient", "hessian")))
    curvature = Curvature(g, leaves | derivatives(loss, at))

    def true(x):
        return loss(reference.output(spec, unflat(x, weights), data["data"], data["keep"]))

    weights = {name: weights[name] for name in curvature.parameters}
    gradient, hessian = twice(true, flat(weights.values()))
    assert distance(flat(curvature.gradient.values()), gradient) < 1e-12
    assert distance(block_hessian(curvature, spec).dense(), hessian) < 1e-12
    parts = [block_hessian(curvature, spec, terms).dense() for terms in (outer, inner)]
    assert min(float(part.norm() / hessian.norm()) for part in parts) > 1e-3
    assert distance(sum(parts), hessian) < 1e-12


def test_it_is_the_taylor_polynomial():
    """Away from the point, the error is of third order."""
    rng = torch.Generator().manual_seed(0)
    at, step = torch.randn(2, 2, 3, 8, generator=rng, dtype=torch.float64)
    given = derivatives(quartic, at)
    errors = []
    for size in 1e-2, 5e-3:
        y = at + size * step
        errors.append(float(GivenLoss().value(y, *given.values())[0] - (quartic(y) - quartic(at))))
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.05)


def test_the_code_in_the_docs_is_of_that_loss():
    (code,) = re.findall(r"```python\n(.*?)```", CALCULUS.read_text(), re.DOTALL)
    known: dict[str, object] = {}
    exec(code, known)
    spec, leaves, curvature = known["spec"], known["leaves"], known["curvature"]
    assert isinstance(spec, Spec)
    assert isinstance(leaves, dict)
    assert isinstance(curvature, Curvature)
    weights = {name: leaves[name] for name in curvature.parameters}
    keep = torch.ones(1, 5, dtype=torch.bool)

    def true(x):
        return reference.output(spec, unflat(x, weights), leaves["input"], keep).cosh().log().sum()

    _, hessian = twice(true, flat(weights.values()))
    assert distance(block_hessian(curvature, spec).dense(), hessian) < 1e-12
