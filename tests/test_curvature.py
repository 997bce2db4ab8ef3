"""The door for library users: sums over sources, blocks, several tangents, and what a product costs."""

import logging
import subprocess
import sys

import pytest
import torch

from hesscore import chain, memory
from hesscore.component import KINDS, Component
from hesscore.curvature import Batch, Curvature
from hesscore.errors import InputError, UsageError
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference

SPEC = Spec(d_model=4, d_ff=3, layers=2, heads=2, vocab=5, gated=True, positions="learned", seq_len=4)


@pytest.fixture(scope="module")
def ours() -> Curvature:
    weights, data = reference.draw(SPEC, padding=1)
    return Curvature(model(SPEC), inputs(SPEC, **data) | weights)


@pytest.fixture(scope="module")
def hessian(ours):
    return ours.dense()


def directions(curvature, k=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(k, *shape, generator=rng, dtype=torch.float64)
        for name, shape in curvature.graph.parameters.items()
    }


def flat(tangents):
    return torch.cat([t.flatten(1) for t in tangents.values()], 1)


def distance(a, b):
    return float((a - b).norm() / b.norm())


# --- what adds up ---


def test_the_hessian_is_symmetric(hessian):
    assert distance(hessian, hessian.T) < 1e-14


def test_every_kind_of_source_alone_adds_up_to_the_whole(ours, hessian):
    parts = [ours.dense(terms=lambda node, kind=kind: node.kind == kind) for kind in KINDS]
    assert all(part.any() for part in parts)
    assert distance(sum(parts), hessian) < 1e-14


def test_every_node_alone_adds_up_to_the_whole(ours, hessian):
    names = [ours.graph.nodes[i].name for i in sorted(ours.graph.curved)]
    parts = [ours.dense(terms=lambda node, name=name: node.name == name) for name in names]
    assert distance(sum(parts), hessian) < 1e-14


def test_gauss_newton_and_functional_add_up_to_the_whole(ours):
    v = directions(ours)
    outer, inner, whole = ours.gauss_newton(v), ours.functional(v), ours.hvp(v)
    for name in v:
        assert (outer[name] + inner[name] - whole[name]).norm() <= 1e-14 * flat(whole).norm()


def test_attribution_splits_the_quadratic_form_over_its_sources(ours, hessian):
    v = directions(ours)
    caused = ours.attribution(v)
    x = flat(v)
    torch.testing.assert_close(sum(caused.values()), ((x @ hessian) * x).sum(1), rtol=1e-13, atol=0)
    assert set(caused) == {ours.graph.nodes[i].name for i in ours.graph.curved}
    for name, part in caused.items():
        alone = flat(ours.hvp(v, terms=lambda node, name=name: node.name == name))
        torch.testing.assert_close(part, (alone * x).sum(1), rtol=1e-12, atol=1e-13)


def test_attribution_of_one_block_counts_only_what_it_moves(ours):
    v = {"blocks.1.mlp.down.weight": directions(ours)["blocks.1.mlp.down.weight"]}
    caused = ours.attribution(v)
    assert {name for name, part in caused.items() if part.any()} == {"final_norm", "loss"}
    block = ours.block("blocks.1.mlp.down.weight").dense()
    x = flat(v)
    torch.testing.assert_close(sum(caused.values()), ((x @ block) * x).sum(1), rtol=1e-13, atol=0)


# --- shapes ---


def test_several_tangents_at_once_are_one_by_one(ours):
    v = directions(ours)
    together, attributed = ours.hvp(v), ours.attribution(v)
    for k in range(3):
        one = {name: t[k] for name, t in v.items()}
        for name, product in ours.hvp(one).items():
            assert product.shape == ours.leaves[name].shape
            torch.testing.assert_close(product, together[name][k], rtol=1e-12, atol=1e-15)
        for name, part in ours.attribution(one).items():
            torch.testing.assert_close(part, attributed[name][k], rtol=1e-12, atol=1e-15)


def test_rows_and_columns_are_a_slice(ours, hessian):
    rows, columns = ["head.weight", "blocks.0.attn.k.weight"], ["blocks.1.norm1.bias", "embed.token.weight"]
    offsets, place = {}, 0
    for name, shape in ours.graph.parameters.items():
        size = torch.Size(shape).numel()
        offsets[name] = range(place, place + size)
        place += size
    i, j = ([k for name in names for k in offsets[name]] for names in (rows, columns))
    block = ours.block(rows, columns)
    assert block.shape == (len(i), len(j))
    assert distance(block.dense(), hessian[i][:, j]) < 1e-14
    assert distance(ours.dense(rows), hessian[i][:, i]) < 1e-14

    matrix = torch.randn(len(j), 2, dtype=torch.float64)
    assert distance(block @ matrix, hessian[i][:, j] @ matrix) < 1e-14
    assert distance(block @ matrix[:, 0], hessian[i][:, j] @ matrix[:, 0]) < 1e-14


def test_what_is_not_in_the_data_has_no_curvature():
    weights, data = reference.draw(SPEC)
    data["data"].fill_(1)
    curvature = Curvature(model(SPEC), inputs(SPEC, **data) | weights)
    row = directions(curvature)["embed.token.weight"]
    row[:, 1] = 0
    assert not flat(curvature.hvp({"embed.token.weight": row})).any()
    assert not curvature.gradient["embed.token.weight"][[0, *range(2, 5)]].any()


def test_float32_is_as_good_as_float32_can_be(ours):
    single = {name: x.float() if x.is_floating_point() else x for name, x in ours.leaves.items()}
    curvature = Curvature(ours.graph, single)
    v = directions(ours)
    product = curvature.hvp({name: t.float() for name, t in v.items()})
    assert {t.dtype for t in product.values()} == {torch.float32}
    assert 1e-8 < distance(flat(product).double(), flat(ours.hvp(v))) < 1e-5


def test_batches_of_unequal_size_are_weighed_by_what_they_score():
    """Three rows, one of them padded, as one batch and as two."""
    weights, data = reference.draw(SPEC, batch=3, padding=2)
    graph, whole = model(SPEC), inputs(SPEC, **data) | weights
    parts = [inputs(SPEC, **{name: x[rows] for name, x in data.items()}) for rows in (slice(1), slice(1, 3))]
    total = int(data["keep"].sum())
    batches = [Batch(int(part["weights"].sum()) / total, part) for part in parts]
    once, split = Curvature(graph, whole), Curvature(graph, whole, batches)
    assert [batch.share for batch in batches] == [2 / 10, 8 / 10]
    assert distance(split.loss, once.loss) < 1e-14
    assert distance(split.dense(), once.dense()) < 1e-14
    v = directions(once)
    for name, part in split.attribution(v).items():
        torch.testing.assert_close(part, once.attribution(v)[name], rtol=1e-12, atol=1e-14)
    for name, gradient in split.gradient.items():
        torch.testing.assert_close(gradient, once.gradient[name], rtol=1e-12, atol=1e-15)


# --- what is refused ---


def test_a_missing_or_misshapen_parameter_is_named(ours):
    name = "blocks.0.mlp.up.weight"
    with pytest.raises(InputError, match=f"no value for the parameter {name}"):
        Curvature(ours.graph, {key: value for key, value in ours.leaves.items() if key != name})
    with pytest.raises(InputError, match=rf"{name} has shape \(3, 4\), not \(4, 3\)"):
        Curvature(ours.graph, {**ours.leaves, name: ours.leaves[name].T})


def test_a_missing_constant_is_named(ours):
    constants = {name: ours.leaves[name] for name in ours.graph.constants}
    weights = {name: ours.leaves[name] for name in ours.parameters}
    for name in constants:
        few = {key: value for key, value in constants.items() if key != name}
        for leaves, batches in (weights | few, [Batch()]), (weights, [Batch(0.5, constants), Batch(0.5, few)]):
            with pytest.raises(InputError, match=f"no value for the constant {name}"):
                Curvature(ours.graph, leaves, batches)


def test_there_is_some_data(ours):
    with pytest.raises(UsageError, match="no parts of the data"):
        Curvature(ours.graph, ours.leaves, [])


def test_a_part_of_the_data_has_no_parameters(ours):
    name = "blocks.0.norm1.bias"
    with pytest.raises(InputError, match=f"{name} is a parameter"):
        Curvature(ours.graph, ours.leaves, [Batch(1.0, {name: ours.leaves[name]})])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.complex128])
def test_parameters_have_one_dtype_that_has_curvature(ours, dtype):
    name = "blocks.0.mlp.up.weight"
    with pytest.raises(InputError, match=r" is in torch\.\w+: all parameters are in float64, or all in float32"):
        Curvature(ours.graph, {**ours.leaves, name: ours.leaves[name].to(dtype)})
    if dtype != torch.float32:
        with pytest.raises(InputError, match=f"embed.token.weight is in {dtype}"):
            Curvature(ours.graph, ours.leaves | {name: ours.leaves[name].to(dtype) for name in ours.parameters})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["blocks.0.mlp.up.weight", "weights"])
def test_a_leaf_that_is_not_finite_is_named(ours, name, value):
    leaf = ours.leaves[name].clone()
    leaf[0, 1] = value
    ways = [({**ours.leaves, name: leaf}, [Batch()])]
    if name not in ours.parameters:
        ways.append((ours.leaves, [Batch(0.5), Batch(0.5, {name: leaf})]))
    for leaves, batches in ways:
        with pytest.raises(InputError, match=f"{name} is NaN or infinite in 1 of {leaf.numel()} places"):
            Curvature(ours.graph, leaves, batches)


def test_a_dense_block_is_announced_and_refused_beyond_free_memory(ours, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hesscore.memory")
    ours.block("blocks.0.norm1.bias", "head.weight").dense()
    assert "dense block of 4 x 20" in caplog.text
    monkeypatch.setattr(memory, "free", lambda: 100)
    with pytest.raises(InputError, match="4 x 20"):
        ours.block("blocks.0.norm1.bias", "head.weight").dense()


# --- what a product costs ---


@pytest.fixture
def visits(ours, monkeypatch):
    """The nodes at which ``jvp``, ``vjp`` and ``curvature`` were called, in order; ``pull`` is the last two at once."""
    nodes = {id(kept): node.name for kept, node in zip(ours.points[0].kept, ours.graph.nodes, strict=True)}
    counted = {"jvp": ["jvp"], "vjp": ["vjp"], "curvature": ["curvature"], "pull": ["vjp", "curvature"]}
    visited: dict[str, list[str]] = {"jvp": [], "vjp": [], "curvature": []}
    inside: list[str] = []  # RMSNorm.vjp calls its jvp

    def recording(method, original):
        def call(self, kept, *args):
            if not inside:
                for name in counted[method]:
                    visited[name].append(nodes[id(kept)])
            inside.append(method)
            result = original(self, kept, *args)
            inside.pop()
            return result

        return call

    for cls in Component.registry.values():
        for method in counted.keys() & vars(cls).keys():
            monkeypatch.setattr(cls, method, recording(method, vars(cls)[method]))
    return visited


def test_a_late_block_costs_only_what_lies_between_it_and_the_loss(ours, visits):
    name = "blocks.1.mlp.down.weight"
    ours.hvp({name: directions(ours)[name]}, [name])
    between = ["down", "down.shift", "residual2", "final_norm", "final_norm.gain", "final_norm.shift", "head"]
    between = [f"blocks.1.mlp.{node}" for node in between[:2]] + ["blocks.1.residual2", *between[3:]]
    assert visits["jvp"] == between
    assert visits["vjp"] == between[::-1]
    assert visits["curvature"] == ["loss", "head", "final_norm.gain", "final_norm", "blocks.1.mlp.down"]


def test_an_early_block_leaves_out_what_is_beside_it(ours, visits):
    name = "blocks.0.attn.q.weight"
    ours.hvp({name: directions(ours)[name]}, [name])
    pushed = set(visits["jvp"])
    assert {"blocks.0.attn.scores", "blocks.0.attn.softmax", "blocks.1.norm1", "head"} <= pushed
    beside = {"embed.token", "embed.sum", "blocks.0.norm1", "blocks.0.norm1.gain", "blocks.0.attn.k", "blocks.0.attn.v"}
    assert not pushed & beside
    assert not set(visits["vjp"]) & beside


def test_a_block_off_the_diagonal_costs_what_each_side_needs(ours, visits):
    first, last = "blocks.0.norm1.weight", "blocks.1.mlp.down.weight"
    ours.hvp({last: directions(ours)[last]}, [first])
    assert visits["jvp"][0] == "blocks.1.mlp.down"
    assert visits["vjp"][-1] == "blocks.0.norm1.gain"


def test_a_source_that_does_not_reach_the_rows_costs_nothing(ours, visits):
    product = ours.hvp(directions(ours), ["head.weight"], lambda node: node.name == "blocks.0.attn.softmax")
    assert not any(visits.values())
    assert not product["head.weight"].any()


def test_the_gauss_newton_part_bends_at_the_loss_alone(ours, visits):
    ours.gauss_newton(directions(ours))
    assert visits["curvature"] == ["loss"]


def test_products_leave_no_memory_behind_and_need_no_autograd():
    program = """
import gc, psutil, torch
from hesscore.curvature import Curvature
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters

torch.set_num_threads(1)
spec = Spec(d_model=32, d_ff=128, layers=2, heads=4, vocab=50, seq_len=64, batch=8)
tokens = torch.randint(50, (8, 64), generator=torch.Generator().manual_seed(0))
curvature = Curvature(model(spec), inputs(spec, tokens, tokens.roll(-1, 1)) | parameters(spec))
rss = psutil.Process().memory_info
for i in range(120):
    if i == 20:
        before = rss().rss
    v = curvature.hvp(curvature.gradient)
gc.collect()
tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
print(rss().rss - before, len(tensors) > 50, any(x.requires_grad for x in tensors))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, seen, attached = run.stdout.split()
    assert int(grown) < 10 * 2**20  # a hundred products are 22 MiB, were they kept
    assert (seen, attached) == ("True", "False")


def test_what_would_not_fit_in_memory_is_refused_with_the_number(ours, monkeypatch):
    """A part, three more that each thread works in, and the weights and two gradients in float64."""
    part, count = ours.points[0].nbytes, sum(ours.leaves[name].numel() for name in ours.parameters)
    free = 4 * part + 3 * 8 * count
    monkeypatch.setattr(memory, "free", lambda: free)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    Curvature(ours.graph, ours.leaves, [Batch()])
    sizes = [f"{size / 2**30:.3g}" for size in (5 * part + 3 * 8 * count, free)]
    with pytest.raises(InputError) as caught:
        Curvature(ours.graph, ours.leaves, [Batch(0.5), Batch(0.5)])
    assert str(caught.value) == f"2 parts of the data would take {sizes[0]} GiB of memory; {sizes[1]} are free"


def test_a_run_takes_no_more_memory_than_is_said():
    """Of a process of its own, with products and an attribution, beside what Python itself takes."""
    program = """
import sys, psutil, torch
from pathlib import Path
from hesscore import memory
from hesscore.curvature import Curvature
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters

torch.set_num_threads(1)
dtype, said = getattr(torch, sys.argv[1]), []
memory.check = lambda need, what: said.append(need)

def run(length):
    spec = Spec(d_model=128, d_ff=512, heads=8, layers=2, seq_len=length, batch=8)
    weights = {name: weight.to(dtype) for name, weight in parameters(spec).items()}
    data = torch.randn(8, length, 128, dtype=torch.float64)
    leaves = inputs(spec, data, data.flip(1)) | weights
    before = psutil.Process().memory_info().rss
    curvature = Curvature(model(spec), leaves)
    curvature.hvp(curvature.gradient)
    curvature.attribution(curvature.gradient)
    return before

run(2)  # what libraries take at their first use is theirs
before = run(128)
highest = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]  # getrusage begins at the parent's
print(said[1], int(highest) * 1024 - before)
"""
    for dtype in "float64", "float32":
        run = subprocess.run([sys.executable, "-c", program, dtype], capture_output=True, text=True, check=True)
        said, taken = map(int, run.stdout.split())
        assert 0.5 * said < taken < said


def test_the_memory_of_a_point_is_counted_once_and_without_the_weights(ours):
    """Between the values that are surely kept and all values and gradients that there are."""
    values = sum(a.numel() for a in chain.Point(ours.graph, ours.leaves, watch=set(ours.graph.index)).watched.values())
    weights = sum(leaf.numel() for leaf in ours.leaves.values())
    assert 0.5 * (values - weights) < ours.points[0].nbytes / 8 < 2 * (values - weights)


# --- what is refused: nothing is broadcast, cast or guessed ---


@pytest.mark.parametrize(
    ("tangent", "message"),
    [
        ({}, "no parameter is named at all"),
        ({"head": torch.ones(2)}, "no parameter is named head"),
        ({"blocks.0.norm1.bias": torch.ones(1).double()}, r"blocks.0.norm1.bias is \(1,\)"),
        ({"blocks.0.norm1.bias": torch.ones(3, 1).double()}, r"blocks.0.norm1.bias is \(3, 1\)"),
        ({"blocks.0.norm1.bias": torch.ones(4)}, "in torch.float32, not"),
        ({"blocks.0.norm1.bias": torch.ones(4, dtype=torch.int64)}, "in torch.int64, not"),
        (
            {"blocks.0.norm1.bias": torch.ones(4).double(), "blocks.0.norm2.bias": torch.ones(4, 4).double()},
            r"the tangent of blocks.0.norm1.bias is \(4,\)",
        ),
        (
            {"blocks.0.norm1.bias": torch.ones(2, 4).double(), "blocks.0.norm2.bias": torch.ones(3, 4).double()},
            r"the tangent of blocks.0.norm2.bias is \(3, 4\)",
        ),
    ],
)
def test_a_tangent_that_is_not_one_is_refused(ours, tangent, message):
    for job in ours.hvp, ours.gauss_newton, ours.functional, ours.attribution:
        with pytest.raises(UsageError, match=message):
            job(tangent)


def test_what_is_no_parameter_has_no_row_and_no_block(ours):
    tangent = {"blocks.0.norm1.bias": torch.ones(4).double()}
    for rows in ["blocks.0.norm1"], ["loss"], ["nothing"], []:
        with pytest.raises(UsageError, match="no parameter is named"):
            ours.hvp(tangent, rows)
        with pytest.raises(UsageError, match="no parameter is named"):
            ours.block(rows)
    with pytest.raises(UsageError, match=r"takes \(4,\) or \(4, k\), not \(5,\)"):
        ours.block("blocks.0.norm1.bias") @ torch.ones(5).double()


def test_a_dense_block_costs_as_many_tangents_as_its_shorter_side(ours, monkeypatch):
    asked = []
    hvp = Curvature.hvp

    def counting(self, tangent, rows=None, terms=None):
        asked.append(len(next(iter(tangent.values()))))
        return hvp(self, tangent, rows, terms)

    monkeypatch.setattr(Curvature, "hvp", counting)
    wide, tall = "blocks.0.mlp.up.weight", "blocks.0.norm1.bias"
    block = ours.block(tall, wide)
    assert block.shape[0] < block.shape[1]
    found = block.dense()
    assert (found.shape, sum(asked)) == (block.shape, block.shape[0])
    torch.testing.assert_close(found, ours.dense([tall, wide])[: block.shape[0], block.shape[0] :])


def test_weights_that_move_on_leave_the_curvature_where_it_was(ours):
    """As an optimizer's step does: products would belong to no point at all."""
    weights, data = reference.draw(SPEC, padding=1)
    curvature = Curvature(model(SPEC), inputs(SPEC, **data) | weights)
    v = curvature.gradient
    before = curvature.hvp(v)
    for weight in weights.values():
        weight.add_(1)
    after = curvature.hvp(v)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rows_are_one_name_or_any_several(ours):
    a, b = ours.parameters[:2]
    v = {a: torch.ones_like(ours.gradient[a])}
    both = ours.hvp(v, rows=(name for name in (a, b)))
    assert list(both) == [a, b]
    assert torch.equal(ours.hvp(v, rows=a)[a], both[a])
    for asked in (lambda: ours.block([b, b]), lambda: ours.hvp(v, rows=[a, a]), lambda: ours.dense([a, a])):
        with pytest.raises(UsageError, match=r"^a parameter is named twice$"):
            asked()
    with pytest.raises(UsageError, match=rf"^no parameter is named {a[:-1]}, did you mean {a}\?$"):
        ours.hvp(v, rows=a[:-1])


@pytest.mark.parametrize(
    "wrong",
    [None, [1.0], torch.ones(4).to_sparse(), torch.ones(4, device="meta"), 1.0],
    ids=["None", "list", "sparse", "meta", "float"],
)
def test_what_is_no_tensor_in_memory_is_refused(ours, wrong):
    name = "blocks.0.norm1.bias"
    for asked in (ours.hvp, ours.gauss_newton, ours.functional, ours.attribution):
        with pytest.raises(UsageError, match=f"^the tangent of {name} is not a dense tensor in memory$"):
            asked({name: wrong})
    with pytest.raises(UsageError, match=r"^what a block is applied to is not a dense tensor in memory$"):
        ours.block(name) @ wrong
