"""What bounds are asked of, what they say of growth, and what they do at the ends of the range of floats."""

from math import inf, isfinite, sqrt

import pytest
import torch

from hesscore.bounds import scalars
from hesscore.bounds.apriori import apriori
from hesscore.bounds.claims import verdicts
from hesscore.bounds.measure import of_data, of_weights
from hesscore.bounds.published import published
from hesscore.bounds.report import BoundsReport
from hesscore.bounds.settings import Sweep, of_drawn, of_spec
from hesscore.bounds.swept import swept
from hesscore.bounds.tiers import BoundRow, rows
from hesscore.curvature import Curvature
from hesscore.explicit.enclosure import enclose_norm
from hesscore.explicit.kronecker import KroneckerSum, Place, Term
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests.command import ROOT

ATTENTION = Spec(d_model=8, d_ff=0, norm="none", causal=False, bias=False, seq_len=8)
Q = "attn.q.weight"


def test_every_scalar_is_explained():
    page = (ROOT / "docs/bounds.md").read_text()
    for name, text in scalars.MEANINGS.items():
        assert f"| `{name}` | {text.replace('|', chr(92) + '|')} |" in page
    for fields in ({}, {"norm": "rmsnorm", "gated": True, "causal": False}, {"norm": "none", "d_ff": 0}):
        spec = Spec.model_validate({"d_model": 4, "d_ff": 4, **fields})
        assert all(map(scalars.meaning, scalars.names(spec)))


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1, 64, 4096), "holds here"),
        ((1, 40, 1600), "does not hold here"),
        ((1, 8, 4096), "no power law here"),
        ((1, 64), "cannot be told from two values"),
    ],
)
def test_a_claim_holds_by_the_exponent_and_its_error(values, verdict):
    """Of the outer block of W_Q in the input norm, sixth power, at norms 1, 2, 4."""
    found = [BoundRow(0, 8, 2.0**i, 4, 1, Q, Q, "outer", exact=float(value)) for i, value in enumerate(values)]
    (line,) = verdicts(BoundsReport("", ["exact"], {}, "input_norm", rows=found))
    assert line.startswith(f"QQ outer ~ input_norm^6 (arXiv 2410.10986): {verdict}; exact ")


def test_what_is_expected_goes_with_what_is_given():
    """A spread, a target and a row scale that tokens of this norm can have."""
    spec = Spec(d_model=64, d_ff=128)
    (swept_to,) = of_spec(spec, Sweep(input_norm=[1.0]), {}, "input")
    (given,) = of_spec(spec, Sweep(), {"input.norm": 1.0}, "input")
    assert swept_to == given
    found = given.scalars
    assert found["input.spread"] <= found["input.norm"] == found["target.norm"] == 1
    assert found["norm1.scale"] ** 2 <= 1 / 64 + spec.norm_eps
    assert given.origin["input.norm"] == "given"


def test_a_width_has_a_hidden_one():
    (thin,) = of_spec(Spec(d_model=16, d_ff=4), Sweep(width=[1]), {}, "input")
    assert thin.spec.d_ff == 1


@pytest.mark.parametrize("norm", [1e52, 1e155, 1e300])
def test_what_is_beyond_floats_is_infinite(norm):
    (block,) = of_spec(ATTENTION, Sweep(input_norm=[norm]), {}, "input")
    assert published(block.spec, block.scalars, 8)[Q, Q].outer == inf
    assert apriori(block.spec, block.scalars, 8, "input")[Q, Q].outer == inf


def test_tiny_tokens_before_a_norm_bend_as_far_as_they_did():
    """Scale-free: a square that is too small to be a number must not make a bound vanish."""
    spec = Spec(d_model=8, d_ff=0, placement="post", norm_eps=0.0, bias=False, causal=False, seq_len=4)
    found = []
    for size in 1e-100, 1e-170, 1e-200:
        (block,) = of_spec(spec, Sweep(input_norm=[size]), {"norm1.scale": size}, "input")
        found.append(apriori(spec, block.scalars, 4, "input")["attn.v.weight", "attn.v.weight"].functional)
    assert found == pytest.approx([found[0]] * 3, rel=1e-9)
    assert found[0] > 0.1


def test_tiny_norms_are_exact():
    """Of a pair they come from squares, which are beyond floats here."""
    (block,) = of_drawn("x", ATTENTION, Sweep(input_norm=[1e-30]), {}, "input", 0)
    found = list(rows(block.spec, block.scalars, 8, "input", ["enclosure", "exact"], curvature=block.curvature))
    (row,) = [row for row in found if (row.row, row.column, row.part) == (Q, "attn.k.weight", "outer")]
    assert row.enclosure_lower is not None and row.enclosure_upper is not None and row.exact is not None
    assert 1e-190 < row.enclosure_lower <= row.exact * (1 + 1e-9)
    assert row.exact <= row.enclosure_upper * (1 + 1e-9)


def test_rounding_alone_has_its_size_for_an_error():
    """A LayerNorm of two features without eps has no derivative: whatever is found is rounding."""
    spec = Spec(
        d_model=2,
        d_ff=3,
        placement="post",
        norm_eps=0.0,
        gated=True,
        activation="gelu_tanh",
        seq_len=3,
        batch=2,
        init_std=100.0,
    )
    (block,) = of_drawn("x", spec, Sweep(input_norm=[1.0]), {}, "random", 1)
    for row in rows(block.spec, block.scalars, 3, "random", ["exact"], curvature=block.curvature, seed=1):
        assert row.exact is not None and row.exact_error is not None
        assert isfinite(row.exact) and row.exact_error >= 0


def test_swept_is_infinite_where_squares_are():
    spec = Spec(d_model=16, d_ff=32, placement="post", norm_eps=0.0, causal=False, bias=False, seq_len=8)
    (block,) = of_drawn("x", spec, Sweep(input_norm=[1e-100]), {}, "input", 0)
    assert block.curvature is not None
    found = swept(block.curvature, spec)
    assert all(bound.outer >= 0 and bound.functional >= 0 for bound in found.values())


def test_a_term_of_nothing_changes_no_enclosure():
    rng = torch.Generator().manual_seed(0)
    at, by = Place(0, (2, 2), (2, 1)), Place(0, (2, 2), (2, 1))

    def term(phi, size):
        psi, maps = (torch.randn(3, *shape, generator=rng, dtype=torch.float64) for shape in ((2,), (2, 2)))
        return Term(at, by, phi, psi, size * maps)

    phi = torch.randn(3, 2, generator=rng, dtype=torch.float64)
    small = term(phi, 1e-160)
    nothing = term(torch.zeros_like(phi), 1.0)
    alone = enclose_norm(KroneckerSum((4, 4), torch.float64, [small]))
    both = enclose_norm(KroneckerSum((4, 4), torch.float64, [small, nothing]))
    assert both == alone
    assert 0 < alone.lower <= alone.upper <= 1e-158 * sqrt(4)


def test_a_published_bound_that_is_beaten_is_said_to_be():
    """Two tokens of 32 that only differ along what values alone see (docs/bounds.md)."""
    spec = Spec(d_model=2, d_ff=0, norm="none", causal=False, bias=False, seq_len=32)
    x = torch.zeros(1, 32, 2, dtype=torch.float64)
    x[0, :2] = torch.tensor([[3.0, 1.0], [3.0, -1.0]])
    eye = torch.eye(2, dtype=torch.float64)
    weights = {f"blocks.0.attn.{part}.weight": eye for part in "kvo"}
    weights["blocks.0.attn.q.weight"] = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    curvature = Curvature(model(spec), inputs(spec, x, x) | weights)
    known = of_weights(spec, weights) | of_data(curvature, spec)
    found = rows(spec, known, 32, "input", ["published", "apriori", "exact"], curvature=curvature)
    (row,) = [row for row in found if (row.row, row.column, row.part) == (Q, Q, "outer")]
    assert row.note == "the published bound is beaten, 0.267 against 0.089"
    assert row.apriori is not None and row.exact is not None
    assert row.apriori >= row.exact * (1 - 1e-9)
