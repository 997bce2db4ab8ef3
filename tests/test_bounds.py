"""Bounds from scalars: no block goes beyond them, whatever its shape, its scale, and how its tokens lie."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import floor, isfinite, log, log10, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hesscore.blocks import open_blocks
from hesscore.bounds.apriori import WHOLE, Bound, apriori, output_norm, whole
from hesscore.bounds.data import OnData
from hesscore.bounds.jets import ONE, ZERO, Head, Jet, Size, activate, attend, multiply, pairs
from hesscore.bounds.measure import of_data, of_weights
from hesscore.bounds.published import published
from hesscore.bounds.scalars import derived, expected, meaning, names, weights
from hesscore.bounds.swept import swept
from hesscore.bounds.tiers import PARTS, TIERS, BoundRow, blocks_of, rows
from hesscore.chain import Point
from hesscore.curvature import Curvature, inner, outer
from hesscore.extrema import EXTREMA
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters
from tests import reference

QQ, QK, QV, KV, VV = ((f"attn.{a}.weight", f"attn.{b}.weight") for a, b in ("qq", "kq", "qv", "kv", "vv"))

ROOT = Path(__file__).parents[1]

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
    (output,) = Point(point.graph, point.leaves, watch={name}).watched.values()
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
    assert [round(exact, 4), round(spread, 4)] == [0.0353, 0.0290]  # as if turning left the spread of keys alone


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


@pytest.mark.parametrize(
    ("pair", "queries", "keys"),
    [
        (QK, 0.0, 0.0),
        (QV, 0.0, 1.0),
        (KV, 1.0, 0.0),
        (("attn.k.weight", "norm1.weight"), 1.0, 0.0),
        (("attn.q.weight", "norm1.weight"), 0.0, 1.0),
    ],
)
def test_covariances_meet_their_bound(pair, queries, keys):
    """Two opposite tokens, seen alike: scores, keys and values are as far from their means as they can be.

    A gain moves values, keys, and how a weight moves these: three terms that all have one sign here.
    """
    spec = attention(2, d_model=2, norm="rmsnorm" if "norm1.weight" in pair else "none", norm_eps=0.0)
    x = torch.tensor([[[3.0, 0.0], [-3.0, 0.0]]], dtype=torch.float64)
    leaves = {f"blocks.0.attn.{part}.weight": torch.eye(2, dtype=torch.float64) for part in "qkvo"}
    leaves["blocks.0.attn.q.weight"] *= queries
    leaves["blocks.0.attn.k.weight"] *= keys
    if spec.norm != "none":
        leaves["blocks.0.norm1.weight"] = torch.ones(2, dtype=torch.float64)
    curvature = Curvature(model(spec), inputs(spec, x, torch.zeros_like(x)) | leaves)
    bound = apriori(spec, of_weights(spec, leaves) | of_data(curvature, spec), 2, "zero")
    exact = spectral(curvature, pair, inner)
    assert exact > 0 and exact == pytest.approx(bound[pair].functional, rel=1e-12)


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


# Jets


def test_bounds_do_not_depend_on_what_parameters_are_called():
    """Pairs are kept in alphabetical order, whichever of the two comes first on the way."""
    sizes = (Size(n + 1.0, n + 0.5) for n in itertools.count())
    late, later = Jet(next(sizes), {"x": next(sizes)}), Jet(next(sizes), {"y": next(sizes)})
    head = Head(2, 3.0, Size(4.0, 1.0), Size(5.0, 2.0))
    still = Jet(next(sizes))
    maps: list[Callable[[Jet, Jet], Jet]] = [
        multiply,
        lambda x, y: attend(x, y, still, head, 0.5, 3),
        lambda x, y: attend(x, still, y, head, 0.5, 3),
        lambda x, y: attend(still, x, y, head, 0.5, 3),
        lambda x, y: (x + y).behind(2.0, 3.0, ONE),
    ]
    for apply in maps:
        one = apply(late, later)
        other = apply(Jet(late.value, {"y": late.along("x")}), Jet(later.value, {"x": later.along("y")}))
        assert (one.along("x"), one.along("y")) == (other.along("y"), other.along("x"))
        assert (one.across("x", "x"), one.across("y", "y")) == (other.across("y", "y"), other.across("x", "x"))
        assert one.across("x", "y") == other.across("x", "y") != ZERO


def size(x: Tensor) -> Size:
    """Of tokens ``(N, d)``."""
    return Size(float(x.norm(dim=1).max()), float(torch.linalg.matrix_norm(x, 2)) / sqrt(len(x)))


def test_the_spread_of_products_and_activations_is_no_product_of_spreads():
    """Of tokens that all lie apart: they are the same in each factor, or an activation makes them more alike."""
    apart = torch.eye(4)
    both = size(apart * apart)
    bound = multiply(Jet(size(apart)), Jet(size(apart))).value
    assert (both.peak, both.mean) == (bound.peak, bound.mean) == (1, 0.5)
    signs = torch.tensor(scipy.linalg.hadamard(4), dtype=torch.float64)
    bent, bound = size(signs.relu()), activate(Jet(size(signs)), *EXTREMA["relu"]).value
    assert size(signs).mean < bent.mean <= bound.mean
    assert bent.peak == bound.peak == 2


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


# docs/bounds.md

RUN = ROOT / "sample_runs/pydoc"

TABLES: dict[str, tuple[int, dict[str, Any]]] = {
    "sample": (2, {"source": RUN / "ckpt-end.pt", "data": RUN / "val.bin", "max_tokens": 64}),
    "paper": (0, {"source": ROOT / "configs/blocks/paper-block.yaml"}),
}

ROWS = {
    **{
        f"{a}, {b}": (f"attn.{a.lower()}.weight", f"attn.{b.lower()}.weight") for a, b in ("QQ", "KK", "KQ", "QV", "VV")
    },
    "O, O": ("attn.o.weight",) * 2,
    "W_1, W_1": ("mlp.up.weight",) * 2,
    "W_2, W_2": ("mlp.down.weight",) * 2,
    "first gain": ("norm1.weight",) * 2,
    "second gain": ("norm2.weight",) * 2,
    "all": (WHOLE, WHOLE),
}


def block_of(key: str) -> tuple[Curvature, Spec, int]:
    layer, source = TABLES[key]
    problem = open_blocks(**source)
    curvature = problem.block(layer)
    return curvature, problem.spec.alone, curvature.points[0].leaves["input"].shape[1]


def tiers_of(key: str) -> dict[str, list[float | None]]:
    """For each row and each part the exact norm, and over it the bounds; none of what is zero."""
    curvature, spec, length = block_of(key)
    scalars = of_weights(spec, curvature.leaves) | of_data(curvature, spec)
    tiers = published(spec, scalars, length), apriori(spec, scalars, length, "input"), swept(curvature, spec)
    found: dict[str, list[float | None]] = {label: [] for label in ROWS}
    on_data = OnData(curvature, spec, ("enclosure", "exact"), seed=0)
    for part, (label, pair) in itertools.product(("outer", "functional"), ROWS.items()):
        row = BoundRow(0, length, 0.0, spec.d_model, spec.heads, *pair, part)
        row = on_data.measure(row)
        assert row.exact is not None and row.enclosure_upper is not None
        bounds = [getattr(tier[pair], part) if pair in tier else None for tier in tiers] + [row.enclosure_upper]
        assert all(bound is None or row.exact <= bound * (1 + 1e-9) for bound in bounds[1:])
        found[label] += [
            row.exact,
            *(bound / row.exact if bound is not None and row.exact else None for bound in bounds),
        ]
    return found


@pytest.mark.parametrize("key", [pytest.param("sample", marks=pytest.mark.slow), "paper"])
def test_the_tables_of_the_documentation_are_what_is_measured(key):
    """To two digits."""
    tables = (ROOT / "docs/bounds.md").read_text().split("| | outer |")
    cells = [
        line.split(" | ") for line in tables[1 + list(TABLES).index(key)].splitlines() if "," in line or "gain" in line
    ]
    for label, values in tiers_of(key).items():
        (shown,) = ([cell.strip("| ") for cell in row[1:]] for row in cells if row[0] == f"| {label}")
        for cell, value in zip(shown, values, strict=True):
            if value is None or cell == "-":
                assert value is None and cell == "-"
            else:
                unit = 10.0 ** (floor(log10(value)) - 1) if value else 0.0
                assert float(cell.replace(",", "")) == pytest.approx(value, rel=1e-3, abs=0.51 * unit), label


def test_where_a_trained_block_is_far_from_its_bound_is_as_documented():
    curvature, spec, _ = block_of("sample")
    (point,) = curvature.points
    graph, leaves = point.graph, {name.removeprefix("blocks.0."): leaf for name, leaf in curvature.leaves.items()}
    s = of_weights(spec, curvature.leaves) | of_data(curvature, spec)
    behind = s["mlp.down.weight"] * EXTREMA["gelu"].slope * s["mlp.up.weight"] * s["norm2.gain"] / s["norm2.scale"]
    after = s["attn.v.deviation"] * s["attn.o.weight"] * (1 + behind)
    moved = s["attn.input.spread"] * s["attn.k.deviation"] / 4 * after
    longest = s["attn.q.head"] * s["attn.input.norm"] + s["attn.q.bias"]
    found = apriori(spec, s, 64, "input")
    kk = ("attn.k.weight",) * 2
    assert found[QQ].outer == pytest.approx(moved**2 / 32)
    assert found[kk].outer == pytest.approx((longest * s["attn.input.norm"] / 4 * after) ** 2 / 32)

    share = point.kept[graph.index["blocks.0.attn.softmax"]][0].flatten(1, 2)
    queries, keys = point.kept[graph.index["blocks.0.attn.scores"]]
    values = point.kept[graph.index["blocks.0.attn.mix"]][1]
    k, v = (y.transpose(1, 2) for y in (keys, values))
    products = torch.einsum("bgij,bgjk,bgjl->bgikl", share, k, v)
    covariance = products - torch.einsum("bgik,bgil->bgikl", share @ k, share @ v)
    covered = torch.linalg.matrix_norm(covariance, 2).square().mean().sqrt()

    def fed(x: Tensor) -> Tensor:
        y = F.layer_norm(x, (64,), leaves["norm2.weight"], leaves["norm2.bias"], spec.norm_eps)
        hidden = F.gelu(y @ leaves["mlp.up.weight"] + leaves["mlp.up.bias"])
        return x + hidden @ leaves["mlp.down.weight"]

    middle = Point(graph, point.leaves, watch={"blocks.0.residual1"}).watched["blocks.0.residual1"][0]
    steepest = max(torch.linalg.matrix_norm(torch.autograd.functional.jacobian(fed, x), 2) for x in middle)
    text = " ".join((ROOT / "docs/bounds.md").read_text().split())
    for said in (
        f"{s['attn.input.spread']:.2f} tokens' mean x {s['attn.k.deviation']:.2f}/4 key deviation",
        f"{s['attn.v.deviation']:.2f} value deviation x {s['attn.o.weight']:.2f} W_O x {1 + behind:.1f} feed-forward",
        f"part = {moved:.0f}",
        f"but {steepest:.1f} on the token where it is steepest",
        f"is {s['attn.k.deviation'] * s['attn.v.deviation']:.2f} by the two deviations, {covered:.2f} in the root mean",
        f"{longest:.1f} for the longest query (it is {queries.norm(dim=-1).max():.2f}) and {s['attn.input.norm']:.2f}",
    ):
        assert said in text, said
