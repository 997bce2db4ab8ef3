"""The closed forms against the channels: what is right passes, and every fault that is put in is found."""

from itertools import combinations, product
from math import inf, isnan, nan

import pytest
import torch

from hesscore import verify
from hesscore.component import Component
from hesscore.components.activation import ACTIVATIONS, Activation
from hesscore.components.add import Add
from hesscore.components.hadamard import Hadamard
from hesscore.components.product import Product
from hesscore.components.rmsnorm import RMSNorm
from hesscore.components.softmax import Softmax
from hesscore.curvature import Batch, Curvature
from hesscore.errors import InputError
from hesscore.spec import Spec
from hesscore.verify import Check, count, grid, parts, verify_maps, verify_model
from hesscore.verify.channels import Products, autograd
from hesscore.verify.models import AXES
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference

SPEC = Spec(d_model=4, d_ff=3, layers=2, heads=2, vocab=5, gated=True, activation="silu", tied=True, seq_len=4)


def small(spec=SPEC, dtype=torch.float64):
    weights, data = reference.draw(spec)
    leaves = inputs(spec, **data) | weights
    return model(spec), {name: x.to(dtype) if x.is_floating_point() else x for name, x in leaves.items()}


def failing(checks):
    return {check.object for check in checks if not check.passed}


# --- what is right passes ---


def test_in_the_grid_every_two_options_that_fit_together_meet():
    met = {pair for name in grid() for pair in combinations(sorted(split(name)), 2)}
    options = [[(i, option) for option in axis] for i, axis in enumerate(AXES)]
    wanted = {pair for a, b in combinations(options, 2) for pair in product(a, b)}
    images = {
        (option, kind)
        for option in ("window", "learned from padding on", "head transform", "tied", "tied transform")
        for kind in ("images", "class token")
    }
    narrow = {("narrow embedding", "tied"), ("bidirectional", "window")}
    stack = {(option, "squared error") for option in (*EMBEDDED, "learned from padding on")}
    assert {frozenset(option for _, option in pair) for pair in wanted - met} == set(
        map(frozenset, images | narrow | stack)
    )


EMBEDDED = ("segments", "embedding norm", "narrow embedding")


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


# --- neither is what is zero, nor what is left of larger terms that cancel, a fault ---


def weighed(factor, *kinds, **fields):
    """A small model with the weights whose names hold one of ``kinds`` multiplied by ``factor``."""
    graph, leaves = small(Spec(**{"d_model": 4, "d_ff": 3, "layers": 2, "heads": 2, "vocab": 5, "seq_len": 4} | fields))
    return graph, {
        name: leaf * factor if name in graph.parameters and any(kind in name for kind in kinds) else leaf
        for name, leaf in leaves.items()
    }


DEGENERATE = {
    "one token": weighed(1, vocab=1),
    "all zero": weighed(0, "", positions="learned"),
    "no FFN": weighed(0, "mlp"),
    "no attention": weighed(0, "attn"),
    "no queries and keys": weighed(0, ".q.", ".k."),
    "one feature": weighed(1, d_model=1, heads=1, norm="rmsnorm"),
    "two features, far out": weighed(100, "embed", d_model=2, heads=1),
    "saturated": weighed(30, "head"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", DEGENERATE.values(), ids=DEGENERATE)
def test_what_is_zero_but_for_rounding_passes(case, dtype):
    graph, leaves = case
    leaves = {name: leaf.to(dtype) if leaf.is_floating_point() else leaf for name, leaf in leaves.items()}
    checks = list(verify_model(graph, leaves))
    assert not failing(checks)
    assert all(check.error <= check.tolerance <= 1e-3 for check in checks)


def test_zero_agrees_with_zero():
    checks = list(verify_model(*DEGENERATE["one token"]))
    assert {(check.error, check.tolerance) for check in checks} == {(0.0, 1e-10)}
    assert {check.asymmetry for check in checks} == {0.0, None}


@pytest.mark.parametrize("case", [DEGENERATE["no FFN"], weighed(1e-9, "1.mlp")], ids=["nothing", "next to nothing"])
def test_a_fault_in_rows_that_are_next_to_nothing_is_found(case, monkeypatch):
    """One part in a million of what is 1e-9 of the whole, and 1e-14 where there is nothing."""
    right = Curvature.hvp

    def wrong(self, tangent, *args):
        products = right(self, tangent, *args)
        gain = "blocks.1.norm2.weight"
        products[gain] = products[gain] * (1 + 1e-6) + 1e-14 * tangent.get(gain, torch.zeros(1).double())
        return products

    assert not failing(verify_model(*case))
    monkeypatch.setattr(Curvature, "hvp", wrong)
    found = [check for check in verify_model(*case) if not check.passed]
    assert {check.object for check in found} == {"blocks.1.norm2"}
    assert {check.channel for check in found} >= {"autograd", "jacfwd"}


def test_a_fault_in_what_is_left_of_larger_terms_is_found(monkeypatch):
    monkeypatch.setattr(Softmax, "curvature", scaled(Softmax.curvature, 1 + 1e-4))
    assert "blocks.0.attn" in failing(verify_model(*DEGENERATE["two features, far out"]))


# --- how a row is judged ---


def judged(monkeypatch, off=0.0, rounding=0.0, doubt=0.0, **tolerance):
    """The rows of a channel that is ``off`` and says so much of its errors, each over its ``|H v|``."""

    def channel(terms, x, directions):
        values = autograd(terms, x, directions).values
        return Products(values * (1 - off), values * rounding, values * doubt)

    monkeypatch.setattr("hesscore.verify.CHANNELS", (channel,))
    return list(verify_model(*small(), **tolerance))


@pytest.mark.parametrize("asked", [1e-4, 1e-10, 1e-12])
def test_as_a_rule_a_row_is_judged_by_what_was_asked(monkeypatch, asked):
    for off in asked / 2, asked * 2:
        for check in judged(monkeypatch, off, tolerance=asked):
            assert check.error == pytest.approx(off, rel=1e-2)
            assert check.tolerance == asked
            assert check.passed == (off < asked)


@pytest.mark.parametrize(
    ("asked", "rounding", "at_best"), [(1e-6, 1e-5, 1e-6), (1e-10, 1e-5, 1e-10), (1e-12, 0.1, 1e-10)]
)
def test_rounding_beyond_the_tolerance_is_excused_and_no_more(monkeypatch, asked, rounding, at_best):
    for off in rounding / 2, rounding * 2:
        for check in judged(monkeypatch, off, rounding, tolerance=asked):
            assert check.error == pytest.approx(off / rounding * at_best, rel=1e-3)
            assert check.tolerance == at_best
            assert check.passed == (off < rounding)


def test_rounding_is_no_excuse_where_more_was_asked_for(monkeypatch):
    checks = judged(monkeypatch, off=1e-7, rounding=1e-6, tolerance=1e-12)
    assert {check.tolerance for check in checks} == {1e-12}
    assert not any(check.passed for check in checks)


def test_doubt_beyond_the_tolerance_is_excused_and_no_more(monkeypatch):
    for off in 0.5e-5, 2e-5:
        for check in judged(monkeypatch, off, doubt=1e-5):
            assert check.error == pytest.approx(off, rel=1e-3)
            assert check.tolerance == pytest.approx(1e-5, rel=1e-3)
            assert check.passed == (off < 1e-5)


def test_a_channel_that_can_tell_nothing_confirms_nothing(monkeypatch):
    checks = judged(monkeypatch, off=0.01, doubt=1.0)
    assert {check.tolerance for check in checks} == {1e-3}
    assert not any(check.passed for check in checks)


# --- what is wrong does not ---


def test_what_is_not_a_number_never_passes():
    assert Check("x", "autograd", 1e-10, 1e-10, 1e-10).passed
    assert not Check("x", "autograd", 1.1e-10, 1e-10).passed
    for bad in nan, inf:
        assert not Check("x", "autograd", bad, 1e-10).passed
        assert not Check("x", "autograd", 0.0, 1e-10, bad).passed


def test_a_map_that_is_not_a_number_fails_every_row(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "silu", ACTIVATIONS["silu"]._replace(value=lambda x: x * nan))
    graph, leaves = small()
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
    right = Softmax.curvature

    def wrong(self, *args):
        (curved,) = right(self, *args)
        assert curved is not None
        return (curved * torch.linspace(1, 2, curved.shape[-1]),)

    monkeypatch.setattr(Softmax, "curvature", wrong)
    monkeypatch.setattr(Component, "registry", {"Softmax": Softmax})
    assert all(check.asymmetry is not None and check.asymmetry > 1e-3 for check in verify_maps())
    whole = [check for check in verify_model(*small()) if check.asymmetry is not None]
    assert all(check.asymmetry > 1e-10 for check in whole if check.asymmetry is not None)


@pytest.mark.parametrize("cls", [Product, Add, Hadamard])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_fault_where_one_argument_alone_moves_is_found(monkeypatch, cls, missing):
    """``hess analyze`` moves one parameter at a time, so most products take that path."""
    right = cls.jvp

    def wrong(self, kept, tangents):
        moved = right(self, kept, tangents)
        return moved * (1 + 1e-6) if tangents[missing] is None else moved

    monkeypatch.setattr(cls, "jvp", wrong)
    assert any(cls.__name__ in name for name in failing(verify_maps()))
    assert "model" in failing(verify_model(*small()))


def test_a_fault_in_a_cotangent_that_is_asked_for_alone_is_found(monkeypatch):
    right = Product.vjp

    def wrong(self, kept, cotangent, needs, onto=(None, None)):
        a, b = right(self, kept, cotangent, needs, onto)
        return a, None if b is None else b * (1 if needs[0] else 1 + 1e-6)

    monkeypatch.setattr(Product, "vjp", wrong)
    assert any("Product" in name for name in failing(verify_maps()))


def test_what_would_not_fit_in_memory_is_refused_before_it_is_taken(monkeypatch):
    graph, leaves = small()
    taken = []
    monkeypatch.setattr(verify.memory, "check", lambda need, what: taken.append((need, what)))
    list(verify_model(graph, leaves))
    size = sum(leaves[name].numel() for name in graph.parameters)
    point = Curvature(graph, leaves).part
    assert taken[1] == (8 * 40 * size + 12 * point, f"verifying {size:,} parameters")
    monkeypatch.undo()
    monkeypatch.setattr(verify.memory, "free", lambda: taken[1][0] - 1)
    with pytest.raises(InputError, match=f"verifying {size:,} parameters would take"):
        next(verify_model(graph, leaves))
