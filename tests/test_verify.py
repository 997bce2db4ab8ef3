"""``hess verify``: it passes what is right, and finds every fault that is put in."""

import csv
import io
import json
from itertools import combinations, product
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch
import typer
from hesscore_cli.verify import verify
from typer.testing import CliRunner

from hesscore.component import Component
from hesscore.components.activation import ACTIVATIONS, Activation
from hesscore.components.hadamard import Hadamard
from hesscore.components.product import Product
from hesscore.components.rmsnorm import RMSNorm
from hesscore.components.softmax import Softmax
from hesscore.curvature import Batch
from hesscore.errors import UsageError
from hesscore.spec import Spec
from hesscore.verify import (
    AXES,
    CHANNELS,
    Check,
    autograd,
    count,
    differences,
    grid,
    jacfwd,
    maps,
    parts,
    verify_maps,
    verify_model,
)
from hesscore.wiring.model import inputs, model
from tests import reference

CONFIGS = Path(__file__).parent.parent / "configs"

SPEC = Spec(d_model=4, d_ff=3, layers=2, heads=2, vocab=5, gated=True, activation="silu", tied=True, seq_len=4)


def run(*arguments):
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, arguments)


def small(spec=SPEC, dtype=torch.float64):
    weights, data = reference.draw(spec)
    leaves = inputs(spec, **data) | weights
    return model(spec), {name: x.to(dtype) if x.is_floating_point() else x for name, x in leaves.items()}


def failing(checks):
    return {check.object for check in checks if not check.passed}


# --- what is right passes ---


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """``hess verify`` without a source, and its rows as CSV."""
    path = tmp_path_factory.mktemp("verify") / "rows.csv"
    result = run("--json", "-", "--csv", str(path))
    return result, list(csv.DictReader(io.StringIO(path.read_text())))


def test_every_map_and_the_grid_pass(everything):
    result, rows = everything
    assert result.exit_code == 0
    assert result.stderr.startswith(f"verified: {count()} checks within 1.")
    content = json.loads(result.stdout)
    assert content["passed"] is True
    assert content["source"] is None
    assert len(content["rows"]) == len(rows) == count()
    names = [*maps(torch.Generator()), *grid()]
    assert [row["object"] for row in rows] == [name for name in names for _ in CHANNELS]
    for row in content["rows"]:
        assert row["asymmetry"] < 1e-14
        if row["channel"] == "differences":
            assert row["error"] < row["tolerance"] < 5e-10
        else:
            assert row["error"] < 1e-13
            assert row["tolerance"] == 1e-10


def test_in_the_grid_every_two_options_that_fit_together_meet():
    met = {pair for name in grid() for pair in combinations(sorted(split(name)), 2)}
    options = [[(i, option) for option in axis] for i, axis in enumerate(AXES)]
    wanted = {pair for a, b in combinations(options, 2) for pair in product(a, b)}
    assert {tuple(option for _, option in pair) for pair in wanted - met} == {("learned", "squared error")}


def split(name):
    """The options of a name by axis; an axis that is not named stands at its first."""
    for i, axis in enumerate(AXES):
        found = [option for option in axis if option and option in name]
        yield i, max(found, key=len, default=next(iter(axis)))


def test_a_model_passes_whole_and_in_parts():
    graph, leaves = small()
    checks = list(verify_model(graph, leaves))
    assert len(checks) == count(graph)
    assert not failing(checks)
    places = ["norm1", "attn", "norm2", "mlp"]
    expected = ["model", "embed.token", *(f"blocks.{i}.{place}" for i in range(2) for place in places), "final_norm"]
    assert [check.object for check in checks] == expected * 3
    assert [check.channel for check in checks[:: len(expected)]] == ["autograd", "jacfwd", "differences"]
    for check in checks:
        assert (check.asymmetry is None) == (check.object != "model")
        assert check.error < (1e-10 if check.channel == "differences" else 1e-14)


def test_parts_hold_every_parameter_once():
    graph, _ = small()
    columns = [i for places in parts(graph).values() for place in places for i in range(place.start, place.stop)]
    assert sorted(columns) == list(range(sum(torch.Size(shape).numel() for shape in graph.parameters.values())))


def test_batches_are_those_of_the_curvature():
    weights, data = reference.draw(SPEC, batch=3)
    rows = [inputs(SPEC, **{name: x[i] for name, x in data.items()}) for i in (slice(2), slice(2, 3))]
    batches = [Batch(2 / 3, rows[0]), Batch(1 / 3, rows[1])]
    assert not failing(verify_model(model(SPEC), weights, batches))


def test_float32_is_held_to_what_float32_can_do():
    graph, leaves = small(dtype=torch.float32)
    checks = list(verify_model(graph, leaves))
    assert not failing(checks)
    assert {check.tolerance for check in checks} == {1e-4}
    assert all(1e-8 < check.error < 1e-5 for check in checks)
    assert failing(verify_model(graph, leaves, tolerance=1e-10)) == {check.object for check in checks}


# --- what is wrong does not ---


def test_what_is_not_a_number_never_passes():
    assert Check("x", "autograd", 1e-10, 1e-10, 1e-10).passed
    assert not Check("x", "autograd", 1.1e-10, 1e-10).passed
    for bad in nan, inf:
        assert not Check("x", "autograd", bad, 1e-10).passed
        assert not Check("x", "autograd", 0.0, 1e-10, bad).passed


def test_a_weight_that_is_not_a_number_fails_every_row():
    graph, leaves = small()
    leaves["blocks.1.mlp.up.weight"][0, 0] = nan
    checks = list(verify_model(graph, leaves))
    assert len(checks) == count(graph)
    assert not any(check.passed for check in checks)
    assert all(isnan(check.error) for check in checks)


def scaled(method, factor):
    """The method with every tensor that it returns multiplied by ``factor``."""

    def wrong(self, *args):
        result = method(self, *args)
        if isinstance(result, torch.Tensor):
            return result * factor
        return tuple(part if part is None else part * factor for part in result)

    return wrong


@pytest.mark.parametrize("method", ["jvp", "vjp", "curvature"])
@pytest.mark.parametrize("cls", Component.registry.values(), ids=Component.registry)
def test_a_slightly_wrong_derivative_of_a_map_is_found(cls, method, monkeypatch):
    if method == "curvature" and cls.kind is None:
        return
    monkeypatch.setattr(cls, method, scaled(getattr(cls, method), 1 + 1e-6))
    monkeypatch.setattr(Component, "registry", {cls.__name__: cls})
    checks = list(verify_maps())
    flat = [repr(Activation("relu"))] if method == "curvature" else []
    assert {check.object for check in checks if check.passed} == set(flat if cls is Activation else [])
    assert len({check.channel for check in checks if not check.passed}) == 3


@pytest.mark.parametrize("cls", [Product, Hadamard, RMSNorm, Activation, Softmax], ids=lambda cls: cls.__name__)
def test_a_slightly_wrong_curvature_is_found_in_a_model(cls, monkeypatch):
    monkeypatch.setattr(cls, "curvature", scaled(cls.curvature, 1 + 1e-6))
    graph, leaves = small(SPEC.model_copy(update={"norm": "rmsnorm"}))
    checks = [check for check in verify_model(graph, leaves) if not check.passed]
    assert {check.channel for check in checks} == {"autograd", "jacfwd", "differences"}
    assert {"model", "blocks.0.attn", "embed.token"} <= failing(checks)


def test_a_fault_in_one_place_is_found_there(monkeypatch):
    """The curvature of gains is wrong in the rows of the gains alone."""
    right = Hadamard.curvature

    def wrong(self, *args):
        turned, gain = right(self, *args)
        return turned, None if gain is None else gain * (1 + 1e-6)

    monkeypatch.setattr(Hadamard, "curvature", wrong)
    found = failing(verify_model(*small(SPEC.model_copy(update={"gated": False}))))
    assert found == {"model", "blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "final_norm"}


def test_a_fault_that_only_a_missing_tangent_shows_is_found(monkeypatch):
    right = Product.jvp

    def wrong(self, kept, tangents):
        return right(self, kept, tangents) * (1 if None not in tangents else 1 + 1e-6)

    monkeypatch.setattr(Product, "jvp", wrong)
    assert "model" in failing(verify_model(*small()))


def test_an_asymmetric_hessian_is_found(monkeypatch):
    def wrong(self, a, w, tangents, needs):
        return (w * (tangents[0] - (a * tangents[0]).sum(-1, keepdim=True)),)

    monkeypatch.setattr(Softmax, "curvature", wrong)
    monkeypatch.setattr(Component, "registry", {"Softmax": Softmax})
    assert all(check.asymmetry is not None and check.asymmetry > 1e-3 for check in verify_maps())
    whole = [check for check in verify_model(*small()) if check.asymmetry is not None]
    assert all(check.asymmetry > 1e-10 for check in whole if check.asymmetry is not None)


# --- the channels ---


def quartic(x):
    return (x**4).sum() + (x[0] * x[1] * x[2]) ** 2


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_channel_knows_a_known_hessian(channel):
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    a, b, c = x.tolist()
    hessian = torch.diag(12 * x**2) + 2 * torch.tensor(
        [
            [b * b * c * c, 2 * a * b * c * c, 2 * a * b * b * c],
            [2 * a * b * c * c, a * a * c * c, 2 * a * a * b * c],
            [2 * a * b * b * c, 2 * a * a * b * c, a * a * b * b],
        ],
        dtype=torch.float64,
    )
    directions = torch.tensor([[1.0, 0, 0], [1, 2, 3]], dtype=torch.float64)
    halves = [lambda x: 0.25 * quartic(x), lambda x: 0.75 * quartic(x)]
    found, doubt = channel(halves, x, directions)
    assert (found - directions @ hessian).norm() <= 1e-11 * (directions @ hessian).norm()
    assert doubt.norm() <= 1e-11 * found.norm()


def test_differences_find_a_step_beside_a_kink():
    x = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    found, doubt = differences([lambda x: (x[0] ** 2 * torch.relu(x[1])).sum()], x, torch.ones(1, 2).double())
    expected = torch.tensor([[2 * 1e-4 + 2, 2.0]], dtype=torch.float64)
    assert (found - expected).norm() < 1e-10
    assert doubt.norm() < 1e-10


def test_differences_say_what_they_cannot_tell():
    """A slope so steep that its rounding drowns the curvature."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def f(x):
        return 1e8 * x.sum() + torch.cos(x).sum()

    direction = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    exact, none = autograd([f], x, direction)
    found, doubt = differences([f], x, direction)
    assert not none.any()
    error = (found - exact).norm() / exact.norm()
    assert 1e-10 < error <= 2 * doubt.norm() / found.norm() < 1e-3
    assert (jacfwd([f], x, direction)[0] - exact).norm() <= 1e-15 * exact.norm()


def test_differences_find_a_step_between_many_kinks():
    """Where thousands of activations change sign along the way, the limit is a step that none of them sees."""
    spec = Spec(d_model=8, d_ff=64, vocab=11, activation="relu", seq_len=32)
    weights, data = reference.draw(spec, batch=16)
    checks = [check for check in verify_model(model(spec), inputs(spec, **data) | weights) if check.object == "model"]
    assert [check.passed for check in checks] == [True] * 3
    assert checks[-1].error < 1e-6
    assert 1e-10 < checks[-1].tolerance < 1e-6


def test_a_channel_that_can_tell_nothing_confirms_nothing(monkeypatch):
    def blind(terms, x, directions):
        products, _ = autograd(terms, x, directions)
        return products * 1.01, products.abs()

    monkeypatch.setattr("hesscore.verify.CHANNELS", (blind,))
    checks = list(verify_model(*small()))
    assert {check.tolerance for check in checks} == {1e-3}
    assert not any(check.passed for check in checks)


def test_differences_of_what_is_not_a_number_are_not_a_number():
    found, _ = differences([lambda x: (x * nan).sum()], torch.ones(2).double(), torch.ones(1, 2).double())
    assert found.isnan().all()


# --- the command ---


@pytest.fixture
def block(tmp_path):
    path = tmp_path / "block.yaml"
    path.write_text("d_model: 4\nd_ff: 3\nheads: 2\nseq_len: 3\n")
    return str(path)


def test_a_spec_is_verified_on_its_own(block):
    result = run(block)
    assert result.exit_code == 0
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["object", "channel", "error", "tolerance", "asymmetry", "passed"]
    assert len(rows) == 3 * 5
    assert result.stderr.splitlines()[-1].startswith("verified: 15 checks within 1.0e-10; the largest error is ")


def test_beyond_the_tolerance_is_1(block):
    assert run(block, "--dtype", "float32").exit_code == 0
    result = run(block, "--dtype", "float32", "--tolerance", "1e-9", "--json", "-")
    assert result.exit_code == 1
    assert "NOT verified: 15 of 15 checks are beyond their tolerance; the first: model by autograd" in result.stderr
    assert json.loads(result.stdout)["passed"] is False


def test_what_is_not_a_number_is_1_and_null(block, monkeypatch):
    nothing = ACTIVATIONS["gelu"]._replace(triple=lambda x: (x * nan, x, x))
    monkeypatch.setitem(ACTIVATIONS, "gelu", nothing)
    result = run(block, "--json", "-")
    assert result.exit_code == 1
    assert {row["error"] for row in json.loads(result.stdout)["rows"]} == {None}


def test_the_same_seed_gives_the_same_rows(block):
    first, again, other = run(block), run(block), run(block, "--seed", "1")
    assert first.stdout == again.stdout != other.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tolerance", "nan"],
        ["--tolerance", "-1e-9"],
        ["--tolerance", "0"],
        ["--tolerance", "inf"],
        ["--dtype", "float32"],
        ["--max-tokens", "5"],
        ["--csv", "-", "--json", "-"],
        [str(CONFIGS / "blocks/paper-block.yaml"), "--dtype", "int8"],
        ["--csv", "nowhere/rows.csv"],
        ["nowhere.yaml"],
    ],
    ids=" ".join,
)
def test_nonsense_is_2(arguments):
    error = run(*arguments).exception
    assert isinstance(error, UsageError)
    assert error.code == 2


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--tolerance", "small"], ["--seed", "-1"]], ids=" ".join)
def test_what_is_no_such_value_is_2(block, arguments):
    assert run(block, *arguments).exit_code == 2


def test_interrupted_it_writes_what_is_finished(block, tmp_path, monkeypatch):
    def some(*args):
        yield Check("model", "autograd", 0.0, 1e-10)
        raise KeyboardInterrupt

    monkeypatch.setattr("hesscore.verify.verify_model", some)
    path = tmp_path / "rows.json"
    assert run(block, "--json", str(path)).exit_code == 130
    content = json.loads(path.read_text())
    assert content["passed"] is False
    assert [row["object"] for row in content["rows"]] == ["model"]
