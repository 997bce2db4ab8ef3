"""One contract for every map in ``hesscore/components``, its values against PyTorch's, and known facts."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import exp, pi, sqrt
from pathlib import Path
from pkgutil import iter_modules
from shutil import copytree

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Generator, Tensor

import hesscore.components
from hesscore.component import KINDS, Component, randn
from hesscore.components.activation import ACTIVATIONS, Activation
from hesscore.components.add import Add
from hesscore.components.cross_entropy import CrossEntropy
from hesscore.components.embedding import Embedding
from hesscore.components.hadamard import Hadamard
from hesscore.components.layernorm import LayerNorm
from hesscore.components.product import Product
from hesscore.components.reshape import Reshape
from hesscore.components.rmsnorm import RMSNorm
from hesscore.components.rotary import Rotary
from hesscore.components.softmax import Softmax
from hesscore.components.squared_error import SquaredError
from hesscore.curvature import Curvature
from hesscore.extrema import EXTREMA
from hesscore.graph import Graph

MAPS = [cls for cls in Component.registry.values() if cls.__module__.startswith("hesscore.components.")]


@dataclass
class Case:
    """A map at one of its examples, and its derivatives as autograd sees them."""

    name: str
    f: Component
    arguments: tuple[Tensor, ...]

    def __post_init__(self):
        self.y, self.kept = self.f.value(*self.arguments)
        self.bounds = self.f.norms(self.kept)
        m = len(self.bounds.jacobian)
        self.x, self.constants = self.arguments[:m], self.arguments[m:]
        self.needs = [True] * m
        self.rng = Generator().manual_seed(0)
        self.delta = torch.randn(self.y.shape, generator=self.rng, dtype=torch.float64)

    def directions(self, k=3):
        return [randn(self.rng, k, *x.shape) for x in self.x]

    def codirections(self, k=3):
        return randn(self.rng, k, *self.y.shape)

    def curvature(self, tangents, delta=None, needs=None):
        """As the chain asks for it: constants have a tangent too, which is zero."""
        bent = self.f.bend(self.kept, self.delta if delta is None else delta)
        still = [None for _ in self.constants]
        return self.f.curvature(self.kept, bent, [*tangents, *still], [*(needs or self.needs), *map(bool, still)])

    @cached_property
    def jacobians(self):
        """``dy/dx_i`` as ``(outputs, n_i)``."""
        x = [part.clone().requires_grad_() for part in self.x]
        y = self.f.value(*x, *self.constants)[0].flatten()
        rows = [torch.autograd.grad(entry, x, retain_graph=True, materialize_grads=True) for entry in y]
        return [torch.stack(column).flatten(1) for column in zip(*rows, strict=True)]

    @cached_property
    def hessian(self):
        """``<delta, D^2 f>`` over all leading arguments as ``(n, n)``."""
        x = [part.clone().requires_grad_() for part in self.x]
        paired = (self.f.value(*x, *self.constants)[0] * self.delta).sum()
        gradient = flat([g[None] for g in torch.autograd.grad(paired, x, create_graph=True)])[0]
        if not gradient.requires_grad:
            return torch.zeros(len(gradient), len(gradient), dtype=torch.float64)
        grad = torch.autograd.grad
        rows = [grad(entry, x, retain_graph=True, materialize_grads=True) for entry in gradient]
        return torch.stack([flat([g[None] for g in row])[0] for row in rows])

    @cached_property
    def trilinear(self):
        """``D^2 f`` as ``(outputs, n, n)``: the curvature for each unit ``delta`` in turn."""
        tangents = blocks(torch.eye(sum(x.numel() for x in self.x), dtype=torch.float64), self.x)
        deltas = torch.eye(self.y.numel(), dtype=torch.float64)
        return torch.stack([flat(self.curvature(tangents, delta.view(self.y.shape))) for delta in deltas])


def flat(tensors):
    """Tensors ``(k, *shape)`` side by side as ``(k, n)``."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1)


def blocks(vectors, like):
    """Vectors ``(k, n)`` as tensors ``(k, *shape)``."""
    parts = vectors.split([x.numel() for x in like], 1)
    return [part.reshape(-1, *x.shape) for part, x in zip(parts, like, strict=True)]


def distance(a, b):
    """Relative, in the norm of ``b``; absolute where that is zero."""
    return float((a - b).norm() / (b.norm() or 1))


def same(a, b, tolerance=1e-14):
    return a is b is None or distance(a, b) <= tolerance


CASES = [
    Case(f"{cls.__name__}-{i}", *example)
    for cls in MAPS
    for i, example in enumerate(cls.examples(Generator().manual_seed(0)))
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
curved_case = pytest.mark.parametrize("case", [c for c in CASES if c.f.kind], ids=lambda case: case.name)
linear_case = pytest.mark.parametrize("case", [c for c in CASES if not c.f.kind], ids=lambda case: case.name)


# --- the contract ---


def test_every_file_holds_a_map_and_every_map_has_examples_of_more_than_one_shape():
    files = {f"hesscore.components.{module.name}" for module in iter_modules(hesscore.components.__path__)}
    assert files == {cls.__module__ for cls in MAPS}
    for cls in MAPS:
        assert cls.kind in (None, *KINDS)
        shapes = {tuple(x.shape for x in arguments) for _, arguments in cls.examples(Generator())}
        assert len(shapes) > 1, cls


def test_a_new_file_is_found_and_verified(tmp_path):
    copytree(Path(hesscore.components.__file__).parent.parent, tmp_path / "hesscore")
    source = (tmp_path / "hesscore/components/hadamard.py").read_text()
    (tmp_path / "hesscore/components/gate.py").write_text(source.replace("class Hadamard", "class Gate"))
    program = "from hesscore.verify import verify_maps; print({c.object for c in verify_maps() if c.passed})"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = run.stdout
    assert "'Gate()'" in found
    assert "'Hadamard()'" in found


@every_case
def test_jvp_is_the_first_derivative(case):
    tangents = case.directions()
    expected = sum(t.flatten(1) @ j.T for t, j in zip(tangents, case.jacobians, strict=True))
    assert distance(case.f.jvp(case.kept, tangents).reshape(3, -1), expected) < 1e-13


@every_case
def test_vjp_is_the_transpose(case):
    cotangent = case.codirections()
    parts = case.f.vjp(case.kept, cotangent, case.needs)
    assert [part.shape for part in parts] == [(3, *x.shape) for x in case.x]
    expected = [cotangent.reshape(3, -1) @ j for j in case.jacobians]
    assert distance(flat(parts), flat(expected)) < 1e-13

    tangents = case.directions()
    pushed = (case.f.jvp(case.kept, tangents) * cotangent).reshape(3, -1).sum(1)
    pulled = sum((t * p).flatten(1).sum(1) for t, p in zip(tangents, parts, strict=True))
    assert distance(pushed, pulled) < 1e-13


@curved_case
def test_curvature_is_the_second_derivative(case):
    tangents = case.directions()
    parts = case.curvature(tangents)
    assert [part.shape for part in parts] == [(3, *x.shape) for x in case.x]
    assert distance(flat(parts), flat(tangents) @ case.hessian) < 1e-13


@linear_case
def test_a_linear_map_has_no_curvature_and_says_so(case):
    assert not case.hessian.any()
    assert not case.bounds.curvature
    with pytest.raises(TypeError, match="linear"):
        case.curvature(case.directions())


@every_case
def test_several_tangents_at_once_are_one_by_one(case):
    tangents, cotangent = case.directions(), case.codirections()
    pushed, pulled = case.f.jvp(case.kept, tangents), case.f.vjp(case.kept, cotangent, case.needs)
    curved = case.curvature(tangents) if case.f.kind else ()
    for k in range(3):
        one = [t[k : k + 1] for t in tangents]
        assert same(case.f.jvp(case.kept, one), pushed[k : k + 1])
        for part, all_parts in zip(case.f.vjp(case.kept, cotangent[k : k + 1], case.needs), pulled, strict=True):
            assert same(part, all_parts[k : k + 1])
        for part, all_parts in zip(case.curvature(one) if case.f.kind else (), curved, strict=True):
            assert same(part, all_parts[k : k + 1])


@every_case
def test_a_missing_tangent_is_zero(case):
    tangents = case.directions()
    for given in product([True, False], repeat=len(tangents)):
        if not any(given):
            continue
        missing = [t if here else None for t, here in zip(tangents, given, strict=True)]
        zeroed = [t if here else 0 * t for t, here in zip(tangents, given, strict=True)]
        assert same(case.f.jvp(case.kept, missing), case.f.jvp(case.kept, zeroed))
        if case.f.kind:
            for part, full in zip(case.curvature(missing), case.curvature(zeroed), strict=True):
                assert not full.any() if part is None else same(part, full)


@every_case
def test_only_what_is_needed_is_returned(case):
    tangents, cotangent = case.directions(), case.codirections()
    pulled = case.f.vjp(case.kept, cotangent, case.needs)
    curved = case.curvature(tangents) if case.f.kind else ()
    for needs in product([True, False], repeat=len(case.x)):
        if not any(needs):
            continue
        for need, part, full in zip(needs, case.f.vjp(case.kept, cotangent, needs), pulled, strict=True):
            assert same(part, full) if need else part is None
        parts = case.curvature(tangents, needs=needs) if case.f.kind else ()
        for need, part, full in zip(needs if curved else (), parts, curved, strict=True):
            assert same(part, full) if need else part is None


@curved_case
def test_pull_is_vjp_and_curvature_at_once(case):
    """For every choice of what moves and what is asked for."""
    tangents, cotangent = case.directions(), case.codirections()
    bent, still = case.f.bend(case.kept, case.delta), [None for _ in case.constants]
    choices = [choice for choice in product([True, False], repeat=len(case.x)) if any(choice)]
    for needs, given in product(choices, choices):
        moved = [t if here else None for t, here in zip(tangents, given, strict=True)]
        passed = case.f.vjp(case.kept, cotangent, needs)
        own = case.curvature(moved, needs=needs)
        pulled = case.f.pull(case.kept, cotangent, bent, [*moved, *still], needs)
        for part, p, o in zip(pulled, passed, own, strict=True):
            assert same(part, p if o is None else p + o)


@every_case
def test_nothing_that_is_given_is_changed(case):
    """What is kept serves many products, and one cotangent may go to several sources."""
    tangents, cotangent = case.directions(), case.codirections()
    bent = case.f.bend(case.kept, case.delta) if case.f.kind else None
    given = tensors((case.arguments, case.kept, case.delta, bent, tangents, cotangent))
    before = [tensor.clone() for tensor in given]
    case.f.value(*case.arguments)
    case.f.jvp(case.kept, tangents)
    case.f.vjp(case.kept, cotangent, case.needs)
    if case.f.kind:
        case.f.bend(case.kept, case.delta)
        case.f.curvature(case.kept, bent, tangents, case.needs)
        case.f.pull(case.kept, cotangent, bent, tangents, case.needs)
    assert all(torch.equal(tensor, old) for tensor, old in zip(given, before, strict=True))


def tensors(nested) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for part in nested for tensor in tensors(part)] if isinstance(nested, tuple | list) else []


@every_case
def test_first_derivatives_are_within_their_norms_and_near(case):
    for bound, jacobian in zip(case.bounds.jacobian, case.jacobians, strict=True):
        norm = float(torch.linalg.matrix_norm(jacobian, 2))
        assert norm <= bound * (1 + 1e-9)
        assert bound <= 1.5 * norm


@curved_case
def test_curvature_is_within_its_norms_and_near(case):
    sizes = [x.numel() for x in case.x]
    for i, j in product(range(len(sizes)), repeat=2):
        bound = case.bounds.curvature.get((min(i, j), max(i, j)), 0.0)
        attained = injective_norm(case.trilinear.split(sizes, 1)[i].split(sizes, 2)[j])
        assert attained <= bound * (1 + 1e-9)
        assert bound <= 3 * attained


def injective_norm(t, starts=8, rounds=60):
    """The largest ``t(delta, u, w)`` over unit vectors that alternating maximisation climbs to."""
    rng = Generator().manual_seed(0)
    u, w = (F.normalize(randn(rng, starts, n), dim=1) for n in t.shape[1:])
    value = torch.zeros(starts)
    for _ in range(rounds):
        delta = F.normalize(torch.einsum("oij,si,sj->so", t, u, w), dim=1)
        u = F.normalize(torch.einsum("oij,so,sj->si", t, delta, w), dim=1)
        w = torch.einsum("oij,so,si->sj", t, delta, u)
        value, w = w.norm(dim=1), F.normalize(w, dim=1)
    return float(value.max())


# --- values against PyTorch's own functions ---

RNG = Generator().manual_seed(1)
X, Y, GATE = randn(RNG, 2, 3, 4), randn(RNG, 2, 3, 4), randn(RNG, 4)
IDS = torch.tensor([[0, 3, -100], [2, 2, 1]])
WEIGHTS = randn(RNG, 2, 3).abs()
KEEP = torch.tensor([[True, True, False, True], [True, False, False, False], [True, True, True, True]])
SCORED = IDS != -100

VALUES = {
    "relu": (Activation("relu"), (X,), F.relu(X)),
    "relu_squared": (Activation("relu_squared"), (X,), F.relu(X).square()),
    "gelu": (Activation("gelu"), (X,), F.gelu(X)),
    "gelu_tanh": (Activation("gelu_tanh"), (X,), F.gelu(X, approximate="tanh")),
    "silu": (Activation("silu"), (X,), F.silu(X)),
    "tanh": (Activation("tanh"), (X,), torch.tanh(X)),
    "add": (Add(), (X, GATE), X + GATE),
    "hadamard": (Hadamard(), (X, GATE), X * GATE),
    "linear": (Product("bld,de->ble"), (X, Y[0].T), F.linear(X, Y[0])),
    "head": (Product("bld,vd->blv"), (X, Y[1]), F.linear(X, Y[1])),
    "scores": (
        Product("bigqk,bjgk->bgqij", 0.5),
        (X[:, :, None, None], Y[:, :, None]),
        (X @ Y.mT / 2)[:, None, None],
    ),
    "reshape": (Reshape((4,), (2, 2)), (X,), X.unflatten(-1, (2, 2))),
    "embedding": (Embedding(), (X[0], IDS[1]), F.embedding(IDS[1], X[0])),
    "layernorm": (LayerNorm(1e-3), (X,), F.layer_norm(X, (4,), eps=1e-3)),
    "rmsnorm": (RMSNorm(1e-3), (X,), F.rms_norm(X, (4,), eps=1e-3)),
    "softmax": (Softmax(), (X, KEEP), F.softmax(X.masked_fill(~KEEP, -torch.inf), -1)),
    "cross entropy": (
        CrossEntropy(),
        (X, IDS, torch.ones(2, 3)),
        F.cross_entropy(X.flatten(0, 1), IDS.flatten()),
    ),
    "cross entropy, another label ignored": (
        CrossEntropy(ignore_index=2),
        (X, IDS.abs() % 4, torch.ones(2, 3)),
        F.cross_entropy(X.flatten(0, 1), IDS.flatten().abs() % 4, ignore_index=2),
    ),
    "cross entropy, weighted": (
        CrossEntropy(),
        (X, IDS, WEIGHTS),
        (F.cross_entropy(X.mT, IDS, reduction="none") * WEIGHTS).sum() / WEIGHTS[SCORED].sum(),
    ),
    "squared error": (SquaredError(), (X, Y, torch.ones(2, 3)), F.mse_loss(X, Y)),
    "squared error, some tokens": (SquaredError(), (X, Y, SCORED), F.mse_loss(X[SCORED], Y[SCORED])),
    "squared error, weighted": (
        SquaredError(),
        (X, Y, WEIGHTS),
        ((X - Y).square().mean(-1) * WEIGHTS).sum() / WEIGHTS.sum(),
    ),
}


@pytest.mark.parametrize(("f", "arguments", "expected"), VALUES.values(), ids=VALUES)
def test_values_are_those_of_pytorch(f, arguments, expected):
    torch.testing.assert_close(f.value(*arguments)[0], expected, rtol=1e-14, atol=1e-15)


def test_rotary_is_a_turn_of_complex_numbers():
    angle = randn(RNG, 3, 2)
    turned = torch.complex(X[..., :2], X[..., 2:]) * torch.polar(torch.ones_like(angle), angle)
    y, _ = Rotary().value(X[:, :, None], angle.cos(), angle.sin())
    torch.testing.assert_close(y[:, :, 0], torch.cat((turned.real, turned.imag), -1), rtol=1e-14, atol=1e-15)


# --- known facts ---


def bent(f, kept, delta, tangent):
    """``<delta, D^2 f>`` of a map of one argument."""
    return f.curvature(kept, f.bend(kept, delta), (tangent,), [True])[0]


@pytest.mark.parametrize("name", sorted(ACTIVATIONS.keys() | EXTREMA.keys()))
def test_the_extrema_of_activations_hold_and_are_attained(name):
    facts, extrema = ACTIVATIONS[name], EXTREMA[name]
    x = torch.linspace(-12, 12, 1_200_001, dtype=torch.float64)
    slope, bend = facts.slope(x), facts.bend(x)
    for stated, seen in (extrema.slope, slope.abs().max()), (extrema.bend, bend.abs().max()):
        assert float(seen) <= stated * (1 + 1e-12)
        assert float(seen) >= stated - 1e-6 or stated == float("inf")


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "tanh"])
@pytest.mark.parametrize("x", [-12.0, -8.0, -6.0, -4.0, 4.0, 8.0])
def test_activations_keep_their_digits_where_they_saturate(name, x):
    exact = {
        "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
        "gelu_tanh": lambda x: (
            x * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf(0.044715) * x**3))) / 2
        ),
        "silu": lambda x: x / (1 + mpmath.exp(-x)),
        "tanh": mpmath.tanh,
    }[name]
    facts, at = ACTIVATIONS[name], torch.tensor(x, dtype=torch.float64)
    with mpmath.workdps(200):
        for order, f in enumerate((facts.value, facts.slope, facts.bend)):
            assert float(f(at)) == pytest.approx(float(mpmath.diff(exact, x, order)), rel=1e-13, abs=0)


def test_gelu_is_steepest_at_the_square_root_of_two():
    cdf = float(torch.special.ndtr(torch.tensor(sqrt(2), dtype=torch.float64)))
    assert EXTREMA["gelu"].slope == pytest.approx(cdf + sqrt(2) * exp(-1) / sqrt(2 * pi), abs=1e-7)


def test_softmax_does_not_see_a_shift():
    keep = torch.ones(3, 4, dtype=torch.bool)
    y, a = Softmax().value(X, keep)
    torch.testing.assert_close(Softmax().value(X + 7, keep)[0], y, rtol=1e-14, atol=0)
    shift = torch.ones(1, *X.shape, dtype=torch.float64)
    assert Softmax().jvp(a, (shift,)).abs().max() < 1e-15
    assert bent(Softmax(), a, Y, shift).abs().max() < 1e-15


def test_one_hot_attention_is_flat():
    scores = torch.tensor([[0.0, 800, 0], [900, 0, 0]], dtype=torch.float64)
    y, a = Softmax().value(scores, torch.ones(2, 3, dtype=torch.bool))
    assert y.tolist() == [[0, 1, 0], [1, 0, 0]]
    tangent = randn(RNG, 2, 2, 3)
    assert not Softmax().jvp(a, (tangent,)).any()
    assert not bent(Softmax(), a, tangent[0], tangent).any()
    norms = Softmax().norms(a)
    assert (norms.jacobian, norms.curvature) == ((0.0,), {(0, 0): 0.0})


def test_a_row_that_is_masked_away_is_zero_and_stays_so():
    keep = torch.tensor([[True, True, False], [False, False, False]])
    y, a = Softmax().value(randn(RNG, 2, 3), keep)
    tangent = randn(RNG, 2, 2, 3)
    (pulled,) = Softmax().vjp(a, tangent, [True])
    for rows in y, Softmax().jvp(a, (tangent,)), pulled, bent(Softmax(), a, tangent[0], tangent):
        assert rows is not None
        assert rows[..., 0, :2].all()
        assert not rows[..., ~keep].any()


@pytest.mark.parametrize("norm", [LayerNorm(0.0), RMSNorm(0.0)])
def test_a_norm_does_not_see_the_scale(norm):
    y, kept = norm.value(X)
    torch.testing.assert_close(norm.value(3 * X)[0], y, rtol=1e-14, atol=0)
    assert norm.jvp(kept, (X[None],)).abs().max() < 1e-14


def test_layernorm_does_not_see_a_shift():
    y, kept = LayerNorm().value(X)
    torch.testing.assert_close(LayerNorm().value(X + 5)[0], y, rtol=1e-12, atol=1e-12)
    assert LayerNorm().jvp(kept, (torch.ones_like(X)[None],)).abs().max() < 1e-14


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_the_eigenvalues_of_layernorm_curvature(eps):
    """``-(g.y)/(d s^2)``, ``d - 3`` times; two on the span of ``y`` and ``P g``; zero on the ones."""
    d = 7
    x, g = randn(RNG, d), randn(RNG, d)
    y, kept = LayerNorm(eps).value(x)
    hessian = bent(LayerNorm(eps), kept, g, torch.eye(d, dtype=torch.float64))
    h, c, variance = g - g.mean(), float(g @ y), float((x - x.mean()).square().mean() + eps)
    yy, yh, hh = float(y @ y), float(y @ h), float(h @ h)
    two = np.array([[yh + c - 3 * c * yy / d, hh - 3 * c * yh / d], [yy, yh + c]])  # of y and h, by columns
    expected = sorted([0.0, *np.linalg.eigvals(-two / (d * variance)), *[-c / (d * variance)] * (d - 3)])
    np.testing.assert_allclose(np.linalg.eigvalsh(hessian.numpy()), expected, rtol=0, atol=1e-14)


def test_func_hessian_is_wrong_on_layernorm_and_we_are_not():
    """The fault of PyTorch for which ``torch.func.hessian`` is no oracle here (compare pytorch#196700)."""
    g = Graph()
    y = g.apply("y", LayerNorm(), g.parameter("x", (3, 4)))
    y = g.apply("gain", Hadamard(), y, g.parameter("weight", (4,)))
    y = g.apply("shift", Add(), y, g.parameter("bias", (4,)))
    g.apply("loss", SquaredError(), y, g.constant("target"), g.constant("weights"))
    leaves = {"x": X[0], "weight": GATE, "bias": Y[0, 0], "target": Y[1], "weights": torch.ones(3)}
    ours = Curvature(g, leaves).dense()

    def loss(vector: Tensor) -> Tensor:
        x, weight, bias = vector.split([12, 4, 4])
        return F.mse_loss(F.layer_norm(x.view(3, 4), (4,), weight, bias), Y[1])

    vector = torch.cat((X[0].flatten(), GATE, Y[0, 0])).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(vector), vector, create_graph=True)
    twice = torch.stack([torch.autograd.grad(entry, vector, retain_graph=True)[0] for entry in gradient])
    assert distance(ours, twice) < 1e-12
    wrong = torch.func.hessian(loss)(vector.detach())
    mended = "torch.func.hessian is right on F.layer_norm: say from which version of torch, here and in the docs"
    assert distance(wrong, twice) > 0.01, mended
    assert distance(wrong, wrong.T) > 0.01, mended


@pytest.mark.parametrize("gap", [1.0, 40.0, 300.0])
def test_saturated_probabilities_keep_their_digits(gap):
    """Of two logits ``gap`` apart, ``J = q (1 - q) [[1, -1], [-1, 1]]`` with ``q = 1/(1 + e^gap)``: no entry is 0."""
    q = exp(-gap) / (1 + exp(-gap))
    expected = q * (1 - q) * torch.tensor([[1, -1], [-1, 1]], dtype=torch.float64)
    logits, unit = torch.tensor([[0.0, gap]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)[:, None]

    def check(found, right):
        for one in found:
            torch.testing.assert_close(one[:, 0], right, rtol=1e-13, atol=0)

    softmax, scored = Softmax(), CrossEntropy()
    kept = softmax.value(logits, torch.ones(1, 1, dtype=torch.bool))[1]
    check([softmax.jvp(kept, [unit])], expected)
    check(softmax.vjp(kept, unit, [True]), expected)

    kept = scored.value(logits, torch.tensor([1]), torch.ones(1))[1]
    check(
        scored.vjp(kept, torch.ones(1, dtype=torch.float64), [True, False, False]),
        torch.tensor([[q, -q]], dtype=torch.float64),
    )
    bent = scored.bend(kept, torch.tensor(1.0, dtype=torch.float64))
    check(scored.curvature(kept, bent, [unit, None, None], [True, False, False]), expected)


def test_relu_squared_has_no_curvature_at_the_origin_as_autograd_says():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for square in F.relu(x) ** 2, Activation("relu_squared").value(x)[0]:
        (slope,) = torch.autograd.grad(square.sum(), x, create_graph=True)
        assert not torch.autograd.grad(slope.sum(), x)[0].any()
    y, (slope, bend) = Activation("relu_squared").value(x.detach())
    assert not y.any() and not slope.any() and not bend.any()
