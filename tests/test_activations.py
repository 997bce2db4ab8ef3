"""Curvature at activations against double backward; norms and units against their definitions."""

import math
from typing import Any

import pytest
import torch

from hesscore import activations as module
from hesscore.activations import COLLAPSED, TOKENS, units
from hesscore.budget import Budget
from hesscore.component import dot
from hesscore.components.activation import ACTIVATIONS
from hesscore.components.layernorm import LayerNorm
from hesscore.components.rmsnorm import RMSNorm
from hesscore.curvature import Batch, Curvature
from hesscore.extrema import EXTREMA
from hesscore.problem import split
from hesscore.spec import make_spec
from hesscore.spectrum.sampling import NORMAL
from hesscore.wiring.model import model, parameters
from tests import reference


def sites(*arguments: Any) -> Any:
    """Without their types, as the others: what is checked here is there."""
    return list(module.sites(*arguments))


def norms(*arguments: Any) -> Any:
    return module.norms(*arguments)


def measure(*arguments: Any, **options: Any) -> Any:
    return module.measure(*arguments, **options)


FIELDS: dict[str, Any] = {"d_model": 6, "d_ff": 10, "heads": 2, "layers": 2, "seq_len": 5, "vocab": 7, "causal": True}
SPECS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"placement": "post"},
    "parallel, RMSNorm": {"placement": "parallel", "norm": "rmsnorm", "activation": "silu"},
    "no biases": {"bias": False},
}


def case(name):
    """A spec, its weights, and two sequences, the second of which is padded."""
    spec = make_spec(FIELDS | SPECS[name])
    weights = parameters(spec, 1)
    rng = torch.Generator().manual_seed(2)
    for weight in weights.values():
        if weight.ndim == 1:
            weight += torch.randn(weight.shape, generator=rng, dtype=torch.float64) / 3
    ids = torch.randint(7, (2, 5), generator=rng)
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    targets = torch.where(keep, torch.randint(7, (2, 5), generator=rng), -100)
    return spec, weights, ids, targets, keep


def curvature_of(spec, weights, ids, targets, keep, parts=1):
    from hesscore.inputs.data import Data

    data = Data(ids, targets, keep=keep)
    batches = split(spec, data)
    if parts == 2:
        (whole,) = batches
        count = (targets != -100).sum(1)
        batches = [
            Batch(
                float(count[i] / count.sum()),
                {n: c[i : i + 1] if len(c) == 2 else c for n, c in whole.constants.items()},
            )
            for i in range(2)
        ]
    return Curvature(model(spec), weights, batches)


class Plain:
    """The same graph under autograd, with the value of a node shifted by a leaf."""

    def __init__(self, curvature, weights):
        self.graph, self.points, self.weights = curvature.graph, curvature.points, weights

    def loss(self, point, node, shift):
        values = {}
        for i, at in enumerate(self.graph.nodes):
            if at.component is None:
                values[i] = point.leaves[at.name]
            else:
                values[i] = at.component.value(*(values[source] for source in at.sources))[0]
            if i == node:
                values[i] = values[i] + shift
        return point.share * values[len(self.graph.nodes) - 1]

    def shape(self, point, node):
        captured = {}
        values = {}
        for i, at in enumerate(self.graph.nodes[: node + 1]):
            if at.component is None:
                values[i] = point.leaves[at.name]
            else:
                values[i] = at.component.value(*(values[source] for source in at.sources))[0]
            captured[i] = values[i].shape
        return captured[node]

    def top(self, point, node, token):
        """The largest eigenvalue of the Hessian by one token, by autograd twice."""
        shift = torch.zeros(self.shape(point, node), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(self.loss(point, node, shift), shift, create_graph=True)
        rows = [torch.autograd.grad(g, shift, retain_graph=True)[0][tuple(token)] for g in gradient[tuple(token)]]
        matrix = torch.stack(rows)
        return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])


LAST = {"norm1": "norm1", "norm2": "norm2", "attn": "attn.o", "mlp": "mlp.down", "final_norm": "final_norm"}


def last_node(graph, layer, site):
    base = LAST[site] if layer is None else f"blocks.{layer}.{LAST[site]}"
    return next(graph.index[f"{base}{after}"] for after in (".shift", ".gain", "") if f"{base}{after}" in graph.index)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", SPECS)
def test_every_site_is_double_backwards_where_all_tokens_are_taken(name, parts):
    """Eight tokens are there, and eight are drawn: the mean and the peak are exact."""
    spec, weights, ids, targets, keep = case(name)
    curvature = curvature_of(spec, weights, ids, targets, keep, parts)
    plain = Plain(curvature, weights)
    found = list(sites(curvature))
    finals = [(None, "final_norm")] if spec.ends_normed else []
    places = [(layer, site) for layer in range(2) for site in ("norm1", "attn", "norm2", "mlp")]
    assert sorted((s.layer, s.site) for s in found if s.layer is not None) == sorted(places)
    assert [(s.layer, s.site) for s in found if s.layer is None] == finals
    for site in found:
        assert (site.tokens, site.of_tokens) == (8, 8) == (TOKENS, int(keep.sum()))
        node = last_node(curvature.graph, site.layer, site.site)
        tops = []
        for p, point in enumerate(curvature.points):
            seen = keep if parts == 1 else keep[p : p + 1]
            tops += [plain.top(point, node, token) for token in seen.nonzero().tolist()]
        assert abs(site.mean - sum(tops) / 8) <= site.mean_stderr, site
        assert abs(site.peak - max(tops)) <= site.peak_error, site
        assert site.peak_error <= 0.011 * max(tops)
        if site.gap is not None:
            assert site.gap == pytest.approx((site.peak - site.mean) / site.mean, rel=1e-12)


def test_the_mean_of_a_sample_is_within_its_interval():
    """Of 64 tokens, of which eight are drawn, from 100 seeds."""
    spec = make_spec(FIELDS | {"seq_len": 16, "layers": 1})
    rng = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(7, (2, 4, 16), generator=rng)
    keep = torch.ones(4, 16, dtype=torch.bool)
    curvature = curvature_of(spec, parameters(spec, 1), ids, targets, keep)
    plain = Plain(curvature, None)
    node = last_node(curvature.graph, 0, "norm2")
    tops = []
    for point in curvature.points:
        batch = plain.shape(point, node)[0]
        tops += [plain.top(point, node, (b, t)) for b in range(batch) for t in range(16)]
    assert len(tops) == 64
    mean, inside = sum(tops) / 64, 0
    for seed in range(100):
        site = next(s for s in sites(curvature, seed) if s.site == "norm2")
        assert (site.tokens, site.of_tokens) == (8, 64)
        inside += abs(site.mean - mean) <= NORMAL * site.mean_stderr
    assert inside >= 93


def test_when_the_time_is_up_the_errors_are_larger():
    spec, weights, ids, targets, keep = case("pre")
    curvature = curvature_of(spec, weights, ids, targets, keep)
    whole = measure(curvature).sites
    short = measure(curvature, budget=Budget(0.0, 1.0)).sites
    assert [site.site for site in short] == [site.site for site in whole]
    for one, other in zip(short, whole, strict=True):
        assert one.peak_error > other.peak_error
        assert abs(one.mean - other.mean) <= one.mean_stderr + other.mean_stderr


# --- norms ---


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_the_curvature_of_a_norm_is_that_of_its_matrix(kind):
    """``<delta, D^2 y>`` of each token as a matrix, by autograd twice, for tokens of every length."""
    norm = kind(1e-3)
    rng = torch.Generator().manual_seed(0)
    x, delta = torch.randn(2, 4, 3, 5, generator=rng, dtype=torch.float64)
    x[0] *= 0.01
    _, kept = norm.value(x)
    found = norm.curvature_norm(kept, norm.bend(kept, delta))
    leaf = x.clone().requires_grad_()
    y, _ = norm.value(leaf)
    (gradient,) = torch.autograd.grad((y * delta).sum(), leaf, create_graph=True)
    for i in range(4):
        for j in range(3):
            rows = [torch.autograd.grad(g, leaf, retain_graph=True)[0][i, j] for g in gradient[i, j]]
            right = torch.linalg.eigvalsh(torch.stack(rows)).abs().max()
            assert float(found[i, j, 0]) == pytest.approx(float(right), rel=1e-9)


def test_what_is_said_of_every_norm():
    spec, weights, ids, targets, keep = case("pre")
    curvature = curvature_of(spec, weights, ids, targets, keep)
    (point,) = curvature.points
    found = norms(curvature)
    assert [(n.layer, n.norm) for n in found] == [
        (0, "norm1"),
        (0, "norm2"),
        (1, "norm1"),
        (1, "norm2"),
        (None, "final_norm"),
    ]
    for norm in found:
        i = curvature.graph.index[f"blocks.{norm.layer}.{norm.norm}" if norm.layer is not None else norm.norm]
        _, inverse = point.kept[i]
        scales = (1 / inverse)[keep].flatten()
        assert norm.tokens == 8
        assert (norm.scale_min, norm.scale_max) == (float(scales.min()), float(scales.max()))
        assert norm.scale_median == float(scales.median())
        sizes = curvature.graph.nodes[i].component.curvature_norm(point.kept[i], point.bent[i])[keep]
        assert norm.curvature_mean == pytest.approx(float(sizes.mean()), rel=1e-12)
        assert norm.curvature_peak == pytest.approx(float(sizes.max()), rel=1e-12)
        seed = point.output.new_full((1,), point.share)
        from hesscore import chain

        gradient = chain.cotangents(point, {i}, seed)[i][0]
        gradient = gradient - gradient.mean(-1, keepdim=True)
        heuristic = (dot(gradient, gradient) * inverse.square())[keep]
        assert norm.heuristic_mean == pytest.approx(float(heuristic.mean()), rel=1e-9)
        assert -1 <= norm.heuristic_correlation <= 1
        assert (norm.collapsed, norm.note) == (0, "")


def test_tokens_that_are_nearly_constant_are_told():
    spec, weights, ids, targets, keep = case("pre")
    table = weights["embed.token.weight"]
    table[ids[0, 0]] = 1 + 1e-3 * torch.arange(6, dtype=torch.float64)
    share = float((ids[keep] == ids[0, 0]).double().mean())
    weights = {n: w * (0 if n.startswith("embed.position") else 1) for n, w in weights.items()}
    first = norms(curvature_of(spec, weights, ids, targets, keep))[0]
    assert COLLAPSED * spec.norm_eps > 3e-6
    assert first.collapsed == pytest.approx(share)
    assert first.note == f"{100 * share:.2g} % of the tokens are nearly constant: eps divides them"


# --- units ---


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "tanh"])
def test_units_are_counted(activation):
    spec = make_spec(FIELDS | {"activation": activation})
    ids = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))
    curvature = curvature_of(spec, parameters(spec, 1), ids, ids, torch.ones(2, 5, dtype=torch.bool))
    facts, limits = ACTIVATIONS[activation], EXTREMA[activation]
    values: dict[int, Any] = {}
    point = curvature.points[0]
    for i, node in enumerate(curvature.graph.nodes):
        arguments = [values[source] for source in node.sources]
        values[i] = point.leaves[node.name] if node.component is None else node.component.value(*arguments)[0]
    found = units(curvature)
    assert [(u.layer, u.component, u.activation) for u in found] == [(i, "mlp.activation", activation) for i in (0, 1)]
    for unit in found:
        node = curvature.graph.nodes[curvature.graph.index[f"blocks.{unit.layer}.mlp.activation"]]
        x = values[node.sources[0]]
        flat = facts.slope(x).abs() <= 0.1 * limits.slope
        bent = (facts.bend(x).abs() >= 0.1 * limits.bend) & (limits.bend > 0)
        assert unit.values == x.numel() == 2 * 5 * 10
        assert unit.saturated == pytest.approx(float((flat & bent).double().mean()))
        assert unit.dead == pytest.approx(float((flat & ~bent).double().mean()))
    assert activation != "relu" or found[0].saturated == 0


def test_all_of_it_is_finite_on_the_reference_model():
    from tests.test_curvature import SPEC

    weights, data = reference.draw(SPEC, padding=1)
    from hesscore.wiring.inputs import inputs

    found = measure(Curvature(model(SPEC), inputs(SPEC, **data) | weights))
    assert all(math.isfinite(site.peak) for site in found.sites)
    assert found.records["sites"][0]["site"] == found.sites[0].site
