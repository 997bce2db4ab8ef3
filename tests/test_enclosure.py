"""Enclosures of eigenvalues and norms: never beaten by those of the dense matrix, and tight where they say so."""

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hesscore.curvature import inner, outer
from hesscore.explicit import enclosure
from hesscore.explicit.block import block_hessian
from hesscore.explicit.enclosure import enclose_ends, enclose_norm
from hesscore.explicit.kronecker import KroneckerSum, Place, Term
from tests.test_explicit_block import SPECS, curvature, draw, own

ROUNDING = 16 * torch.finfo(torch.float64).eps
"""Of LAPACK's eigenvalues and singular values, and of forming the matrix, over its norm and a row's length."""


def check_ends(matrix):
    """Both ends against all eigenvalues."""
    values = torch.linalg.eigvalsh(matrix.dense().double())
    slack = ROUNDING * len(values) * float(values.abs().max())
    found = enclose_ends(matrix)
    for (lower, upper), value in zip(found, (float(values[0]), float(values[-1])), strict=True):
        assert lower - slack <= value <= upper + slack
    return found


def check_norm(matrix):
    right = float(torch.linalg.matrix_norm(matrix.dense().double(), 2))
    slack = ROUNDING * sum(matrix.shape) * right
    lower, upper = enclose_norm(matrix)
    assert lower >= 0
    assert lower - slack <= right <= upper + slack


def parts(swept, weights):
    """Where each parameter of the block stands."""
    place, start = {}, 0
    for name in own(swept):
        place[name] = range(start, start := start + weights[name].numel())
    return place


def random_sum(rng, tokens, p, m, scales, kind):
    """A symmetric matrix of two pieces and what is between them, also with outputs for features."""

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def features():
        x = normal(tokens, p) * 10 ** (scales[0] * torch.rand(tokens, 1, generator=rng, dtype=torch.float64))
        if kind == "one dominates":
            x[0] *= 1e6
        return x[:1].expand(tokens, p) if kind == "equal tokens" else x

    def maps(scale):
        half = normal(tokens, m, m)
        return 10**scale * (half @ half.mT if kind == "positive" else half + half.mT)

    a, b = Place(0, (p, m), (m, 1)), Place(p * m, (p, 1), (m, p))
    x, y = features(), features()
    crossed = Term(Place(0, (m, 1), (p, m)), b, normal(tokens, m), y, 10 ** scales[1] * normal(tokens, p, m), True)
    uneven = Term(a, a, x, y, 10 ** scales[2] * normal(tokens, m, m))
    terms = [
        Term(a, a, x, x, maps(0.0)),
        Term(a, a, y, y, maps(scales[1])),
        Term(b, b, y, y, maps(scales[2])),
        Term(a, b, x, y, 10 ** scales[2] * normal(tokens, m, m), mirrored=True),
        crossed,
        uneven,
        uneven.T,
    ]
    return KroneckerSum((2 * p * m, 2 * p * m), torch.float64, terms[:3] if kind == "positive" else terms)


@pytest.mark.parametrize("columns", [2, 8, 64])
@pytest.mark.parametrize("kind", ["any", "positive", "one dominates", "equal tokens"])
def test_no_sum_beats_them(kind, columns, monkeypatch):
    monkeypatch.setattr(enclosure, "COLUMNS", columns)  # few leave the upper bounds much to say about small matrices

    @settings(max_examples=40)
    @given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.tuples(*3 * [st.floats(-6, 6)]), st.integers(0))
    def check(tokens, p, m, scales, seed):
        rng = torch.Generator().manual_seed(seed % 2**63)
        found = random_sum(rng, tokens, p, m, scales, kind)
        rows, others = range(p * m), range(p * m, 2 * p * m)
        check_ends(found)
        check_norm(found)
        check_ends(found.block(rows, rows))
        if kind != "positive":  # which has nothing there
            check_norm(found.block(rows, others))

    check()


@pytest.mark.parametrize("terms", [None, outer, inner])
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS.keys())
def test_no_block_beats_them(fields, terms, monkeypatch):
    monkeypatch.setattr(enclosure, "COLUMNS", 8)
    spec, weights, data = draw(fields)
    swept = curvature(spec, weights, data)
    found, place = block_hessian(swept, spec, terms), parts(swept, weights)
    check_ends(found)
    for a, b in combinations_with_replacement(place, 2):
        part = found.block(place[a], place[b])
        if part.terms:
            check_norm(part)


@pytest.mark.parametrize("scales", [(0, -300), (0, 300), (-150, 0), (150, 0), (-200, 250), (200, -300)], ids=repr)
def test_they_hold_at_any_scale(scales):
    """Squares of such numbers are zero or infinite."""
    features, maps = (10.0**scale for scale in scales)
    found = random_sum(torch.Generator().manual_seed(0), 3, 2, 3, (0.0, 0.0, 0.0), "any")
    terms = [replace(t, phi=features * t.phi, psi=features * t.psi, maps=maps * t.maps) for t in found.terms]
    scaled = KroneckerSum(found.shape, found.dtype, terms)
    unit = features * maps * features
    ours, right = ([enclose_norm(matrix), *enclose_ends(matrix)] for matrix in (scaled, found))
    for number, wanted in zip(ours, right, strict=True):
        assert [bound / unit for bound in number] == pytest.approx(list(wanted), rel=1e-9)


LOW_RANK = ["pre", "post", "gated", "cross entropy"]


@pytest.mark.parametrize("fields", [SPECS[name] for name in LOW_RANK], ids=LOW_RANK)
def test_the_outer_part_of_each_weight_is_known_to_a_tenth_of_a_percent(fields):
    spec, weights, data = draw({"d_model": 16, "d_ff": 48, "heads": 4, "seq_len": 24} | fields)
    swept = curvature(spec, weights, data)
    found = block_hessian(swept, spec, outer)
    for name, place in parts(swept, weights).items():
        part = found.block(place, place)
        if part.terms and weights[name].ndim == 2:
            assert len(place) > 3 * enclosure.COLUMNS
            lower, upper = check_ends(part)[1]
            assert upper < 1.001 * lower


def test_maps_that_are_multiples_of_the_identity_need_no_columns(monkeypatch):
    """As those of W_2 under a squared error: each eigenvalue is there 30 times."""
    monkeypatch.setattr(enclosure, "COLUMNS", 12)
    rng = torch.Generator().manual_seed(0)
    x, scales = (torch.randn(9, width, generator=rng, dtype=torch.float64) for width in (5, 1))
    place = Place(0, (5, 30), (30, 1))
    maps = (scales**2)[:, :, None] * torch.eye(30, dtype=torch.float64)
    matrix = KroneckerSum((150, 150), torch.float64, [Term(place, place, x, x, maps)])
    lowest, highest = check_ends(matrix)
    top = float(torch.linalg.eigvalsh(matrix.dense())[-1])
    assert highest.upper == pytest.approx(top, rel=1e-12)
    assert abs(lowest.lower) < 1e-12 * top  # nothing below zero


def test_small_matrices_and_single_ones_are_known_exactly():
    rng = torch.Generator().manual_seed(0)
    found = random_sum(rng, 4, 3, 5, (1.0, 0.0, 0.0), "any")
    values = torch.linalg.eigvalsh(found.dense())
    for enclosed, value in zip(enclose_ends(found), (float(values[0]), float(values[-1])), strict=True):
        assert enclosed == pytest.approx((value, value), rel=1e-11)
    matrix = torch.randn(7, 200, generator=rng, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    at, by = Place(0, (1, 7), (7, 1)), Place(0, (1, 200), (200, 1))
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    single = KroneckerSum((7, 200), torch.float64, [Term(at, by, one, one, matrix[None])])
    assert enclose_norm(single) == pytest.approx((norm, norm), rel=1e-11)


def test_zero_is_zero_and_nothing_is_too():
    found = random_sum(torch.Generator().manual_seed(0), 2, 2, 2, (0.0, 0.0, 0.0), "any")
    zero = replace(found, terms=[replace(term, phi=0 * term.phi) for term in found.terms])
    assert enclose_ends(zero) == ((0, 0), (0, 0))
    assert enclose_norm(zero) == (0, 0)
    assert enclose_norm(KroneckerSum((3, 5), torch.float64, [])) == (0, 0)


def test_float32_is_enclosed_in_float64():
    found = random_sum(torch.Generator().manual_seed(0), 3, 3, 4, (1.0, 0.0, 0.0), "any")
    terms = [replace(term, phi=term.phi.float(), psi=term.psi.float(), maps=term.maps.float()) for term in found.terms]
    back = [replace(term, phi=term.phi.double(), psi=term.psi.double(), maps=term.maps.double()) for term in terms]
    assert enclose_ends(replace(found, dtype=torch.float32, terms=terms)) == check_ends(replace(found, terms=back))


@pytest.mark.parametrize("large", [1e300, float("inf")])
def test_beyond_the_range_of_floats_nothing_is_known(large):
    rng = torch.Generator().manual_seed(0)
    matrix = random_sum(rng, 3, 2, 2, (0.0, 0.0, 0.0), "any")
    terms = [replace(term, maps=term.maps * large, phi=term.phi * large) for term in matrix.terms]
    lower, upper = enclose_norm(KroneckerSum(matrix.shape, matrix.dtype, terms))
    assert (lower, upper) == (0.0, float("inf"))
    assert all(ends == (-float("inf"), float("inf")) for ends in enclose_ends(replace(matrix, terms=terms)))
