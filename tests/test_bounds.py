"""Bounds from scalars: no block goes beyond them, whatever its shape, its scale, and how its tokens lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import isfinite, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hesscore.bounds.apriori import WHOLE, Bound, apriori, output_norm, whole
from hesscore.bounds.jets import pairs
from hesscore.bounds.measure import of_data, of_weights
from hesscore.bounds.published import published
from hesscore.bounds.scalars import derived, expected, meaning, names, weights
from hesscore.bounds.tiers import PARTS, TIERS, blocks_of, rows
from hesscore.curvature import Curvature, inner, outer
from hesscore.spec import Spec
from hesscore.wiring.model import inputs, model, parameters
from tests import reference

QQ, QK, QV, VV = ((f"attn.{a}.weight", f"attn.{b}.weight") for a, b in (("q", "q"), ("k", "q"), ("q", "v"), ("v", "v")))

ROUNDING = 1e-13
"""Of an exact norm, over the bound that knows of no cancellation: that is as large as the terms that cancel."""

ARRANGEMENTS = ("drawn", "all alike", "one huge", "opposite", "nearly constant", "one sink")


def arrange(x: Tensor, how: str) -> Tensor:
    """Rows where bounds are near to what they bound, or rounding is."""
    if how == "all alike":
        x = x[:, :1].expand_as(x).clone()
    elif how == "one huge":
        x[:, -1] *= 1e3
    elif how == "opposite":
        x[:, 1::2] = -x[:, : x.shape[1] // 2 * 2 : 2]
    elif how == "nearly constant":
        x = x[..., :1] + 1e-3 * x
    elif how == "one sink":  # a first token that all others look at, or none
        x[:, 1:] = 1e-2 * x[:, 1:] + x[:, :1].abs()
    return x


@dataclass
class Case:
    spec: Spec
    curvature: Curvature
    scalars: dict[str, float]
    target: str


def decades(least: int, most: int) -> st.SearchStrategy[float]:
    return st.floats(least, most).map(lambda power: 10.0**power)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Blocks at any scale of six decades of their data, and of two of each weight."""
    heads, rotary = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([False, False, True]))
    width = draw(st.sampled_from([2] if rotary else [1, 2, 3]))
    spec = Spec(
        d_model=max(2, heads * width),
        d_ff=draw(st.sampled_from([0, 3, 5])),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        placement=draw(st.sampled_from(["pre", "post", "parallel"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm", "none"])),
        norm_eps=draw(st.sampled_from([0.0, 1e-5, 0.3])),
        causal=draw(st.booleans()),
        activation=draw(st.sampled_from(list(reference.ACTIVATIONS))),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        positions="rotary" if rotary else "none",
        seq_len=draw(st.sampled_from([1, 2, 4, 6])),
    )
    batch, padding = draw(st.sampled_from([1, 2])), draw(st.sampled_from([0, 0, 1])) if spec.seq_len > 1 else 0
    leaves, data = reference.draw(spec, draw(st.integers(0, 2**32)), batch, padding=padding)
    data["data"] = draw(decades(-3, 3)) * arrange(data["data"], draw(st.sampled_from(ARRANGEMENTS)))
    target = draw(st.sampled_from(["input", "zero", "random"]))
    data["target"] = {
        "input": data["data"],
        "zero": torch.zeros_like(data["data"]),
        "random": draw(decades(-2, 2)) * data["target"],
    }[target]
    data["weights"] = data["keep"] * torch.rand(data["keep"].shape, generator=torch.Generator().manual_seed(batch))
    sharp = draw(st.sampled_from([1.0, 1.0, 30.0]))  # attention that is saturated, with some tokens between
    for name in leaves:
        leaves[name] = leaves[name] * draw(decades(-1, 1)) * (sharp if "attn.q" in name else 1)
    curvature = Curvature(model(spec), inputs(spec, **data) | leaves)
    return Case(spec, curvature, of_weights(spec, leaves) | of_data(curvature, spec), target)


def beyond(case: Case, found: dict[Any, Bound], rounding: dict[Any, Bound]) -> Iterator[tuple[Any, ...]]:
    """The pairs that exceed their bounds, with the part, the norm and the bound."""
    ends, end = {}, 0
    for name in case.curvature.parameters:
        ends[name.removeprefix("blocks.0.")] = slice(end, end := end + case.curvature.leaves[name].numel())
    ends[WHOLE] = slice(0, end)
    for part, terms in enumerate((outer, inner)):
        matrix = case.curvature.dense(terms=terms)
        assert matrix.isfinite().all()
        for (a, b), bound in found.items():
            most = bound[part] * (1 + 1e-9) + ROUNDING * rounding[a, b][part]
            block = matrix[ends[a], ends[b]]
            if not block.norm() <= most:  # the norm below is at most this one, which is faster
                norm = float(torch.linalg.matrix_norm(block, 2))
                if not norm <= most:
                    yield a, b, "outer" if part == 0 else "functional", norm, bound[part]


def without(scalars: dict[str, float], *dropped: str) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if name not in dropped}


@settings(max_examples=50, deadline=None)
@given(cases())
def test_no_block_goes_beyond_what_follows_from_its_scalars(case: Case) -> None:
    length, least = case.spec.seq_len, without(case.scalars, *filter(derived, case.scalars))
    assert sorted(case.scalars) == sorted(names(case.spec))
    loosest = apriori(case.spec, least, length, "random")
    for dropped in ((), ("residual.norm",), tuple(n for n in case.scalars if n.endswith("deviation"))):
        found = apriori(case.spec, without(case.scalars, *dropped), length, case.target)
        assert not list(beyond(case, found, loosest))
    assert not list(beyond(case, apriori(case.spec, least, length, case.target), loosest))


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(cases())
def test_none_of_many_blocks_goes_beyond_its_bounds(case: Case) -> None:
    least = without(case.scalars, *filter(derived, case.scalars))
    loosest = apriori(case.spec, least, case.spec.seq_len, "random")
    for scalars in (case.scalars, least):
        found = apriori(case.spec, scalars, case.spec.seq_len, case.target)
        assert not list(beyond(case, found, loosest))


@settings(max_examples=20, deadline=None)
@given(cases(), st.data())
def test_a_larger_scalar_never_gives_a_smaller_bound(case: Case, data: st.DataObject) -> None:
    """So one that is given may be any that the block's own does not exceed; of row scales, none that it undercuts."""
    length = case.spec.seq_len
    before = apriori(case.spec, case.scalars, length, case.target)
    for name, value in case.scalars.items():
        factor = data.draw(st.floats(1, 10))
        if name == "attn.peak":
            moved = min(1.0, value * factor)
        else:
            moved = value / factor if name.endswith(".scale") else value * factor + 1e-3
        after = apriori(case.spec, case.scalars | {name: moved}, length, case.target)
        assert no_smaller(after, before), name
        if derived(name):
            assert no_smaller(apriori(case.spec, without(case.scalars, name), length, case.target), before), name


@given(cases())
@settings(max_examples=20, deadline=None)
def test_what_a_block_adds_up_to_is_as_long_as_is_said(case: Case) -> None:
    """The bound of one block's output is the next one's scalar."""
    (point,) = case.curvature.points
    last = next(node for node in point.graph.nodes if node.name == "loss").sources[0]
    name = point.graph.nodes[last].name
    (output,) = type(point)(point.graph, point.leaves, watch={name}).watched.values()
    least = without(case.scalars, *filter(derived, case.scalars))
    for scalars in (case.scalars, least):
        longest = output_norm(case.spec, scalars, case.spec.seq_len)
        assert output.norm(dim=-1).max() <= longest * (1 + 1e-9)


def no_smaller(after: dict[Any, Bound], before: dict[Any, Bound]) -> bool:
    return all(after[pair][part] >= before[pair][part] * (1 - 1e-12) for pair in before for part in (0, 1))


def attention(length: int, **fields: Any) -> Spec:
    """Of one head, alone."""
    alone: dict[str, Any] = {"d_ff": 0, "norm": "none", "bias": False, "causal": False}
    return Spec(**(alone | {"seq_len": length} | fields))


def test_keys_that_are_turned_may_come_to_lie_along_one_direction():
    """Tokens that go round a circle as fast as rotary positions turn them back: their keys differ by a sign alone."""
    length = 8
    spec = attention(length, d_model=4, positions="rotary")
    n, sign = torch.arange(length, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)
    x = sign[:, None] * torch.stack((n.cos(), torch.full_like(n, sqrt(0.5)), -n.sin(), torch.zeros_like(n)), 1)
    leaves = {f"blocks.0.attn.{part}.weight": torch.zeros(4, 4, dtype=torch.float64) for part in "qkvo"}
    leaves["blocks.0.attn.k.weight"][[0, 2], [0, 2]] = 1
    leaves["blocks.0.attn.v.weight"][1, 1] = 1
    leaves["blocks.0.attn.o.weight"] += torch.eye(4)
    curvature = Curvature(model(spec), inputs(spec, x[None], x[None]) | leaves)
    scalars = of_weights(spec, leaves) | of_data(curvature, spec)
    exact = spectral(curvature, QQ, outer)
    assert exact <= apriori(spec, scalars, length, "input")[QQ].outer <= 1.25 * exact
    spread = apriori(spec.model_copy(update={"positions": "none"}), scalars, length, "input")[QQ].outer
    assert exact > 1.2 * spread  # what would bound it if turning left the spread of keys alone


def spectral(curvature: Curvature, pair: tuple[str, str], terms: Any) -> float:
    a, b = (f"blocks.0.{name}" for name in pair)
    return float(torch.linalg.matrix_norm(curvature.block(a, b, terms).dense(), 2))


@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_a_key_bias_has_curvature_only_where_keys_are_turned(positions):
    spec = Spec(d_model=4, d_ff=3, heads=2, causal=False, positions=positions, seq_len=5)
    leaves, data = reference.draw(spec, seed=3)
    curvature = Curvature(model(spec), inputs(spec, **data) | leaves)
    row = curvature.block("blocks.0.attn.k.bias", curvature.parameters).dense()
    found = apriori(spec, of_weights(spec, leaves) | of_data(curvature, spec), 5, "random")
    bounded = {name for pair in found for name in pair}
    every = {name.removeprefix("blocks.0.") for name in curvature.parameters} | {WHOLE}
    if positions == "none":
        assert row.abs().max() < 1e-15
        assert every - bounded == {"attn.k.bias"}
    else:
        assert row.abs().max() > 1e-4
        assert every == bounded


def test_the_bound_of_a_whole_block_is_the_norm_of_the_matrix_of_bounds():
    found = {("a", "a"): Bound(1.0, 0.0), ("a", "b"): Bound(2.0, 1.0), ("b", "b"): Bound(1.0, float("inf"))}
    assert whole(found).outer == pytest.approx(3.0)
    assert whole(found).functional == float("inf")


def test_values_alone_meet_their_bound():
    """Two tokens in every direction, seen alike: nothing is lost in the outer block of W_V."""
    spec = attention(4, d_model=2)
    x = torch.tensor([[[1.0, 0.0]] * 4], dtype=torch.float64)
    leaves = {f"blocks.0.attn.{part}.weight": torch.eye(2, dtype=torch.float64) for part in "qkvo"}
    curvature = Curvature(model(spec), inputs(spec, x, x) | leaves)
    bound = apriori(spec, of_weights(spec, leaves) | of_data(curvature, spec), 4, "input")
    assert spectral(curvature, VV, outer) == pytest.approx(bound[VV].outer, rel=1e-12)
    wo = ("attn.o.weight", "attn.o.weight")
    assert spectral(curvature, wo, outer) == pytest.approx(bound[wo].outer, rel=1e-12)


# Scalars


SPECS = [
    Spec(d_model=64, d_ff=128, heads=4, kv_heads=2, seq_len=32),
    Spec(d_model=128, d_ff=0, heads=2, norm="none", causal=False, bias=False, seq_len=64),
    Spec(d_model=96, d_ff=64, heads=3, norm="rmsnorm", gated=True, init_std=0.05, seq_len=16, batch=2),
    Spec(d_model=64, d_ff=256, placement="post", norm_eps=0.1, seq_len=128),
]


@pytest.mark.parametrize("spec", SPECS)
def test_expected_scalars_are_near_to_what_seeded_blocks_have(spec):
    """Means over seeds lie within a quarter, and the norms of weights are expected from above."""
    seeds, length = range(4), spec.seq_len
    found: dict[str, list[float]] = {}
    for seed in seeds:
        leaves = parameters(spec, seed)
        rng = torch.Generator().manual_seed(seed)
        data, target = torch.randn(2, spec.batch, length, spec.d_model, generator=rng, dtype=torch.float64)
        curvature = Curvature(model(spec), inputs(spec, data, target) | leaves)
        for name, value in (of_weights(spec, leaves) | of_data(curvature, spec)).items():
            found.setdefault(name, []).append(value)
    scalars = expected(spec, length, "random")
    assert {name for name in names(spec) if not derived(name)} <= set(scalars)
    for name, value in scalars.items():
        mean = sum(found[name]) / len(seeds)
        if name == "attn.peak":
            assert value == 1
        elif name == "norm2.scale":
            assert value <= 1.25 * mean or spec.placement == "post"
        elif name != "norm2.entry":
            assert value == pytest.approx(mean, rel=0.25), name
        if name.endswith((".weight", ".head", ".heads")):
            assert mean <= value, name


def test_expected_tokens_are_as_long_as_is_asked_for():
    spec, length = SPECS[0], 50
    scalars = expected(spec, length, "input", input_norm=3.0)
    free = expected(spec, length, "random")
    assert scalars["input.norm"] == scalars["target.norm"] == pytest.approx(3.0)
    assert scalars["input.spread"] / 3 == pytest.approx(free["input.spread"] / free["input.norm"])
    assert free["target.norm"] == pytest.approx(sqrt(64) + sqrt(log(length)))
    assert expected(spec, length, "zero")["target.norm"] == 0


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_bounded_without_the_scalars_that_a_block_needs(spec):
    scalars = expected(spec, spec.seq_len, "random")
    for name in names(spec):
        assert meaning(name)
        least = without(scalars, name)
        if derived(name):
            found = apriori(spec, least, spec.seq_len, "random")
            assert all(isfinite(bound) for pair in found.values() for bound in pair)
        else:
            with pytest.raises(KeyError, match=name):
                apriori(spec, least, spec.seq_len, "random")
            with pytest.raises(KeyError, match=name):
                output_norm(spec, least, spec.seq_len)


def test_scalars_of_weights_are_norms_of_their_parts():
    spec = Spec(d_model=6, d_ff=5, heads=3, kv_heads=1, gated=True)
    leaves, _ = reference.draw(spec, seed=1)
    found = of_weights(spec, leaves)
    q, k = leaves["blocks.0.attn.q.weight"].numpy(), leaves["blocks.0.attn.k.weight"].numpy()
    each = [np.linalg.svd(q[:, i : i + 2])[1][0] for i in (0, 2, 4)]
    assert found["attn.q.weight"] == pytest.approx(np.linalg.svd(q)[1][0])
    assert found["attn.q.head"] == pytest.approx(max(each))
    assert found["attn.q.heads"] == pytest.approx(sqrt(sum(one**2 for one in each)))
    assert found["attn.k.head"] == found["attn.k.heads"] == pytest.approx(np.linalg.svd(k)[1][0])
    assert found["norm2.gain"] == pytest.approx(np.abs(leaves["blocks.0.norm2.weight"].numpy()).max())
    assert found["mlp.gate.bias"] == pytest.approx(np.sqrt((leaves["blocks.0.mlp.gate.bias"].numpy() ** 2).sum()))
    assert set(found) == {n for n in names(spec) if n.split(".")[-1] in ("weight", "head", "heads", "gain", "bias")}


@pytest.mark.parametrize("causal", [False, True])
def test_scalars_of_data_are_those_of_a_plain_forward_pass(causal):
    spec = Spec(d_model=6, d_ff=5, heads=3, causal=causal, gated=True, seq_len=4, norm_eps=0.1)
    leaves, data = reference.draw(spec, seed=2, padding=1)
    x, keep = data["data"], data["keep"]
    p = {name.removeprefix("blocks.0."): leaf for name, leaf in leaves.items()}

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def norm(name: str, y: Tensor) -> Tensor:
        return F.layer_norm(y, (6,), p[f"{name}.weight"], p[f"{name}.bias"], 0.1)

    seen = norm("norm1", x)
    q, k, v = (linear(f"attn.{part}", seen).view(2, 4, 3, 2).transpose(1, 2) for part in "qkv")
    mask = keep[:, None, None, :] & (torch.ones(4, 4).tril().bool() if causal else True)
    share = (q @ k.mT / sqrt(2)).masked_fill(~mask, -torch.inf).softmax(-1)
    joined = (share @ v).transpose(1, 2).flatten(2)
    middle = x + linear("attn.o", joined)
    into = norm("norm2", middle)
    hidden = linear("mlp.up", into) * F.gelu(linear("mlp.gate", into))
    output = middle + linear("mlp.down", hidden)

    def spread(y: Tensor) -> float:
        of_each = [float(torch.linalg.matrix_norm(one, 2)) / 2 for one in y]
        return max(*of_each, float(torch.linalg.matrix_norm(y[keep], 2)) / sqrt(7))

    def deviation(y: Tensor) -> float:
        worst = 0.0
        for row in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)):
            b, h, i = row.tolist()
            a = share[b, h, i]
            moments = torch.einsum("j,jk,jl->kl", a, y[b, h], y[b, h]) - torch.outer(a @ y[b, h], a @ y[b, h])
            worst = max(worst, float(torch.linalg.eigvalsh(moments)[-1]))
        return sqrt(worst)

    centred = [y - y.mean(-1, keepdim=True) for y in (x, middle)]
    scales = [(y.square().mean(-1) + 0.1).sqrt() for y in centred]
    wanted = {
        "target.norm": float(data["target"].norm(dim=-1).max()),
        "residual.norm": float((output - data["target"])[keep].norm(dim=-1).max()),
        "attn.k.deviation": deviation(k),
        "attn.v.deviation": deviation(v),
        "norm1.scale": float(scales[0].min()),
        "norm2.scale": float(scales[1].min()),
        "norm1.entry": float((centred[0] / scales[0].unsqueeze(-1)).abs().max()),
        "norm2.entry": float((centred[1] / scales[1].unsqueeze(-1)).abs().max()),
    }
    for name, y in ("", x), ("attn.", seen), ("attn.o.", joined), ("mlp.", into), ("mlp.down.", hidden):
        wanted |= {f"{name}input.norm": float(y.norm(dim=-1).max()), f"{name}input.spread": spread(y)}
    if not causal:
        wanted["attn.peak"] = float(share.max())
    curvature = Curvature(model(spec), inputs(spec, **data) | leaves)
    assert of_data(curvature, spec) == pytest.approx(wanted, rel=1e-12)


# The published bounds


def opposed(length: int) -> tuple[Spec, Curvature, dict[str, float]]:
    """Two tokens that agree in what W_Q sees, and differ in the rest; all others are zero."""
    spec = attention(length, d_model=2)
    leaves = {f"blocks.0.attn.{part}.weight": torch.eye(2, dtype=torch.float64) for part in "qkvo"}
    leaves["blocks.0.attn.q.weight"][1, 1] = 0
    x = torch.zeros(1, length, 2, dtype=torch.float64)
    x[0, :2] = torch.tensor([[3.0, 1.0], [3.0, -1.0]])
    curvature = Curvature(model(spec), inputs(spec, x, x) | leaves)  # the output less its input is what attention adds
    return spec, curvature, of_weights(spec, leaves) | of_data(curvature, spec)


def test_a_published_bound_is_beaten_by_two_tokens_that_stand_out():
    spec, curvature, scalars = opposed(32)
    truth, claimed = spectral(curvature, QQ, outer), published(spec, scalars | {"target.norm": 0.0}, 32)[QQ].outer
    proved = apriori(spec, scalars, 32, "input")[QQ].outer
    assert [round(number, 3) for number in (truth, claimed)] == [0.267, 0.089]
    assert proved == pytest.approx(truth, rel=1e-12)  # nothing is lost in any step


def test_how_far_it_is_beaten_grows_like_the_square_of_the_length():
    ratios = []
    for length in (8, 16, 32, 64):
        spec, curvature, scalars = opposed(length)
        truth = spectral(curvature, QQ, outer)
        ratios.append(truth / published(spec, scalars, length)[QQ].outer)
        assert truth <= apriori(spec, scalars, length, "input")[QQ].outer * (1 + 1e-12)
    assert [log(after / before, 2) for before, after in pairwise(ratios)] == pytest.approx([2] * 3, abs=0.1)
    assert ratios[0] < 1 < ratios[-1]


def test_published_bounds_are_as_printed():
    """By the spectral norm of the tokens, which is that of all of them together."""
    spec = attention(3, d_model=4, heads=1)
    scalars = {"input.spread": 2 / sqrt(3), "target.norm": 5 / sqrt(3)} | {
        f"attn.{part}.weight": float(n) for part, n in zip("qkv", (7, 11, 13), strict=True)
    }
    rho = sqrt(3) * (3 * 2 * 13 + 5)
    found = published(spec, scalars, 3)
    assert found[VV] == pytest.approx((2 * 3 / 4 * 4, 0))
    assert found[QQ] == pytest.approx((2 * 121 * 169 * 64 / (27 * 16), 12 * rho * 13 * 121 * 32 / 16))
    assert found[QV] == pytest.approx((2 * 13 * 11 * 16 / (3 * 8), 2 * rho * 11 * 8 / (9 * 4)))
    assert found[QK] == pytest.approx(
        (2 * 11 * 7 * 169 * 64 / (27 * 16), 12 * rho * 13 * 77 * 32 / (3 * 16) + 2 * rho * 13 * 8 / (9 * 4))
    )


# The tiers beside each other


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "none", "d_ff": 0},
        {"placement": "post", "causal": False},
        {"placement": "parallel", "gated": True, "norm": "rmsnorm", "bias": False},
    ],
)
def test_tiers_come_in_their_order(fields):
    spec = Spec(**({"d_model": 4, "d_ff": 3, "heads": 2, "seq_len": 4} | fields))
    leaves, data = reference.draw(spec, seed=5)
    curvature = Curvature(model(spec), inputs(spec, **data) | leaves)
    scalars = of_weights(spec, leaves) | of_data(curvature, spec)
    found = list(rows(spec, scalars, 4, "random", tuple(TIERS), layer=7, curvature=curvature))
    matrices = [name for name in curvature.parameters if not name.endswith("bias")]
    assert {f"blocks.0.{name}" for name in blocks_of(spec)} == set(matrices)
    expected_pairs = [*combinations_with_replacement(blocks_of(spec), 2), (WHOLE, WHOLE)]
    assert [(row.part, row.row, row.column) for row in found] == [(p, *pair) for p in PARTS for pair in expected_pairs]
    for row in found:
        at, by = (curvature.parameters if name == WHOLE else f"blocks.0.{name}" for name in (row.row, row.column))
        terms = {"full": None, "outer": outer, "functional": inner}[row.part]
        truth = float(torch.linalg.matrix_norm(curvature.block(at, by, terms).dense(), 2))
        assert (row.layer, row.seq_len, row.width, row.heads, row.input_norm) == (7, 4, 4, 2, scalars["input.norm"])
        assert row.exact is not None and abs(row.exact - truth) <= (row.exact_error or 0) + 1e-12 * truth
        assert row.enclosure_lower is not None and row.enclosure_upper is not None
        assert row.enclosure_lower <= truth + 1e-14 and truth <= row.enclosure_upper + 1e-14
        assert row.swept is not None and row.apriori is not None
        assert truth <= row.swept * (1 + 1e-9) + 1e-14
        assert truth <= row.apriori * (1 + 1e-9)
        printed = {row.row, row.column} <= {f"attn.{part}.weight" for part in "qkv"}
        assert (row.published is not None) == (
            printed and (row.row, row.column) not in [("attn.k.weight",) * 2, ("attn.k.weight", "attn.v.weight")]
        )


def test_rows_without_data_need_no_curvature():
    spec = Spec(d_model=768, d_ff=3072, heads=12)
    found = list(rows(spec, expected(spec, 512, "input"), 512, "input", ["apriori"]))
    assert len(found) == 3 * (8 * 9 // 2 + 1)
    assert all(row.apriori is not None and isfinite(row.apriori) and row.exact is None for row in found)
    parts = {(row.row, row.column, row.part): row.apriori or 0.0 for row in found}
    for a, b, _ in parts:
        assert parts[a, b, "full"] == pytest.approx(parts[a, b, "outer"] + parts[a, b, "functional"])


def test_weights_have_the_parts_that_pairs_are_made_of():
    spec = Spec(d_model=4, d_ff=3, gated=True)
    assert len(weights(spec)) == 7
    assert pairs("ba") == [("a", "a"), ("a", "b"), ("b", "b")]
