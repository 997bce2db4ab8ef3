"""The Hessian of a block as a token-wise Kronecker sum: against the sweeps, and against double backward."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hesscore.curvature import Batch, Curvature, inner, outer
from hesscore.errors import UsageError
from hesscore.explicit.block import block_hessian, block_jacobian
from hesscore.explicit.kronecker import KroneckerSum, Place, Term
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference
from tests.test_hessian import flat, twice, unflat

SPECS = {
    "pre": {},
    "post": {"placement": "post"},
    "parallel, RMSNorm": {"placement": "parallel", "norm": "rmsnorm"},
    "gated": {"gated": True, "activation": "silu"},
    "no biases": {"bias": False},
    "rotary": {"positions": "rotary"},
    "grouped": {"heads": 4, "kv_heads": 2},
    "one group": {"heads": 4, "kv_heads": 1},
    "one key a token": {"d_model": 4, "heads": 4, "kv_heads": 1},
    "one head, bidirectional": {"heads": 1, "causal": False},
    "ReLU": {"activation": "relu"},
    "cross entropy": {"vocab": 11, "positions": "learned"},
    "tied": {"vocab": 7, "tied": True},
    "attention alone": {"norm": "none", "d_ff": 0},
}


def draw(fields):
    """A spec of one layer, its weights, and data that end in a pad."""
    spec = Spec(**({"d_model": 8, "d_ff": 6, "heads": 2, "seq_len": 4} | fields))
    return spec, *reference.draw(spec, padding=1)


def curvature(spec, weights, data):
    return Curvature(model(spec), inputs(spec, **data) | weights)


def own(found):
    return [name for name in found.parameters if name.startswith("blocks.0.")]


def far(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("terms", [None, outer, inner])
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS.keys())
def test_it_is_what_the_sweeps_say(fields, terms):
    spec, weights, data = draw(fields)
    swept = curvature(spec, weights, data)
    right, found = swept.dense(own(swept), terms), block_hessian(swept, spec, terms)
    dense = found.dense()
    assert far(dense, right) < 1e-13
    assert far(dense, dense.T) < 1e-14
    v = torch.randn(len(right), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert far(found @ v, right @ v) < 1e-13
    assert far(found @ v[:, 0], right @ v[:, 0]) < 1e-13
    assert far(found @ v.T.contiguous()[1], right @ v[:, 1]) < 1e-13  # a slice that does not start its memory
    assert far(found.diagonal(), right.diagonal()) < 1e-13
    assert found.trace() == pytest.approx(float(right.trace()), abs=1e-13 * float(right.diagonal().abs().sum()))
    assert found.frobenius() == pytest.approx(float(right.norm()), rel=1e-13)


@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS.keys())
def test_it_is_double_backward(fields):
    spec, weights, data = draw(fields)
    swept = curvature(spec, weights, data)
    moving = {name: weights[name] for name in own(swept)}

    def loss(x):
        return reference.loss(spec, weights | unflat(x, moving), **data)

    _, right = twice(loss, flat(moving.values()))
    assert far(block_hessian(swept, spec).dense(), right) < 1e-12


@pytest.mark.parametrize("fields", [SPECS["pre"], SPECS["grouped"], SPECS["rotary"]], ids=["pre", "grouped", "rotary"])
def test_every_pair_of_parameters(fields):
    spec, weights, data = draw(fields)
    swept = curvature(spec, weights, data)
    found, names = block_hessian(swept, spec), own(swept)
    whole, place, start = swept.dense(names), {}, 0
    for name in names:
        place[name] = range(start, start := start + weights[name].numel())
    for a, b in product(names, repeat=2):
        rows, columns = place[a], place[b]
        right = whole[rows.start : rows.stop, columns.start : columns.stop]
        block = found.block(rows, columns)
        assert block.shape == right.shape
        assert float((block.dense() - right).norm()) < 1e-13 * float(whole.norm())
        assert abs(block.frobenius() - float(right.norm())) < 1e-13 * float(whole.norm())
        v = torch.ones(len(columns), dtype=torch.float64)
        assert float((block @ v - right @ v).norm()) < 1e-13 * float(whole.norm() * v.norm())


@pytest.mark.parametrize("parts", [["attn.q"], ["attn.v", "attn.k"], ["norm1", "mlp.down"], ["norm2"]], ids=repr)
@pytest.mark.parametrize("name", ["pre", "grouped", "rotary", "no biases"])
def test_some_parts_of_the_block(name, parts):
    """Their rows and columns are those of the whole."""
    spec, weights, data = draw(SPECS[name])
    swept = curvature(spec, weights, data)
    names = own(swept)
    sizes = [weights[other].numel() for other in names]
    mine = [other.removeprefix("blocks.0.").rpartition(".")[0] in parts for other in names]
    kept = torch.tensor(mine).repeat_interleave(torch.tensor(sizes))
    for terms in None, inner:
        found = block_hessian(swept, spec, terms, parts)
        whole = block_hessian(swept, spec, terms).dense()
        assert float((found.dense() - whole[kept][:, kept]).norm()) < 1e-14 * float(whole.norm())
    jacobian = block_jacobian(swept.points[0], spec, "blocks.0.residual2", parts).dense()
    assert far(jacobian, block_jacobian(swept.points[0], spec, "blocks.0.residual2").dense()[:, kept]) < 1e-14
    with pytest.raises(UsageError, match=r"is named attn\.x"):
        block_hessian(swept, spec, parts=["attn.x"])


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["pre", "post", "parallel"]),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_shape(placement, heads, width, d_ff, length, batch, causal):
    spec = Spec(d_model=heads * width, d_ff=d_ff, heads=heads, seq_len=length, placement=placement, causal=causal)
    weights, data = reference.draw(spec, batch=batch)
    swept = curvature(spec, weights, data)
    assert far(block_hessian(swept, spec).dense(), swept.dense()) < 1e-12


def test_batches_add_up():
    spec, weights, data = draw({})
    halves = [Batch(0.5, inputs(spec, data["data"][i : i + 1], data["target"][i : i + 1])) for i in range(2)]
    parts = Curvature(model(spec), weights, halves)
    assert far(block_hessian(parts, spec).dense(), parts.dense()) < 1e-13


def test_the_order_of_tokens_does_not_matter_where_none_is_hidden():
    spec, weights, data = draw({"causal": False})
    order = torch.tensor([2, 0, 3, 1])
    shuffled = {name: tensor[:, order] for name, tensor in data.items()}
    here, there = (block_hessian(curvature(spec, weights, d), spec).dense() for d in (data, shuffled))
    assert far(there, here) < 1e-13


def test_one_hot_attention_leaves_queries_and_keys_no_curvature():
    """Scores so far apart that the softmax is 0 and 1 in float64, and each token sees one other."""
    spec, weights, data = draw({"seq_len": 5, "causal": False})
    weights |= {name: 1e4 * weight for name, weight in weights.items() if ".attn.q." in name or ".attn.k." in name}
    swept = curvature(spec, weights, data)
    (point,) = swept.points
    attention = point.kept[swept.graph.index["blocks.0.attn.mix"]][0]
    assert torch.equal(attention, attention.round())
    assert torch.equal(attention.sum(-1), torch.ones_like(attention[..., 0]))
    assert len({tuple(row) for row in attention[1, :, 0].argmax(-1).tolist()}) > 1
    found, start = block_hessian(swept, spec).dense(), 0
    for name in own(swept):
        rows = slice(start, start := start + weights[name].numel())
        moved = found[rows].abs().max()
        assert moved == 0 if ".attn.q." in name or ".attn.k." in name else moved > 1e-6


def test_more_than_one_layer_is_refused():
    spec = Spec(d_model=4, d_ff=4, layers=2, seq_len=2)
    weights, data = reference.draw(spec)
    with pytest.raises(UsageError, match=r"^a graph of several blocks: "):
        block_hessian(curvature(spec, weights, data), spec)
    one = Spec(d_model=4, d_ff=4, seq_len=2)
    weights, data = reference.draw(one)
    with pytest.raises(UsageError, match=r"a matrix of \(\d+, \d+\) in torch.float64 does not take \(3,\)"):
        block_hessian(curvature(one, weights, data), one) @ torch.ones(3, dtype=torch.float64)


def test_what_is_no_block_and_no_vector_is_refused():
    spec, weights, data = draw(SPECS["pre"])
    swept = curvature(spec, weights, data)
    found, (point,) = block_hessian(swept, spec, parts=["attn.q", "attn.v"]), swept.points
    n, right = len(found.dense()), found.dense()
    rows = 8 * 8  # of W_Q; its bias is one more row
    assert torch.equal(found.block(range(rows), range(rows + 8, n)).dense(), right[:rows, rows + 8 :])
    assert found.block(range(0), range(n)).dense().shape == (0, n)
    for wrong in range(-1, 8), range(0, n + 1), range(0, 8, 2), range(n, n + 5):
        with pytest.raises(UsageError, match="give a range of rows or columns that there are"):
            found.block(wrong, range(n))
    for wrong in range(3, n), range(0, 13), range(rows - 1, rows + 1):
        with pytest.raises(UsageError, match="cuts through a row of a weight"):
            found.block(range(n), wrong)
    with pytest.raises(UsageError, match="has no diagonal"):
        found.block(range(rows), range(n)).diagonal()

    jacobian = block_jacobian(point, spec, "blocks.0.residual2", ["attn.q"])
    v = torch.ones(jacobian.shape[1], dtype=torch.float64)
    assert torch.equal(jacobian @ v, (jacobian @ v[:, None])[:, 0])
    for matrix in found, jacobian:
        v = torch.ones(matrix.shape[1], dtype=torch.float64)
        for bad in v[1:], torch.cat([v, v]), v.float(), v.long(), v[:, None, None], v.numpy(), v.to_sparse():
            with pytest.raises(UsageError):
                matrix @ bad
    with pytest.raises(UsageError, match="no node of the graph is named blocks"):
        block_jacobian(point, spec, "blocks.0.attn.x")
    with pytest.raises(UsageError, match=r"blocks\.0\.norm1 does not depend on attn\.q"):
        block_jacobian(point, spec, "blocks.0.norm1", ["attn.q"])


def test_a_jacobian_is_zero_where_the_node_does_not_depend_on_a_part():
    spec, weights, data = draw({"bias": False})
    (point,) = curvature(spec, weights, data).points
    jacobian = block_jacobian(point, spec, "blocks.0.attn.o", ["attn.q", "mlp.down"])
    used = torch.full_like(jacobian.dense(), 7.7)  # what memory may hold
    del used
    unit = torch.eye(jacobian.shape[1], dtype=torch.float64)
    assert far(jacobian.dense(), jacobian @ unit) < 1e-14
    assert not jacobian.dense()[:, weights["blocks.0.attn.q.weight"].numel() :].any()


def test_a_term_on_its_own_cells_with_one_side_crossed_has_a_diagonal():
    rng = torch.Generator().manual_seed(0)
    phi, psi, maps = (torch.randn(5, *shape, generator=rng, dtype=torch.float64) for shape in ((3,), (4,), (4, 3)))
    term = Term(Place(0, (3, 4), (4, 1)), Place(0, (4, 1), (3, 4)), phi, psi, maps)
    found = KroneckerSum((12, 12), torch.float64, [term, *term.symmetric()])
    assert far(found.diagonal(), found.dense().diagonal()) < 1e-14
    assert found.trace() == pytest.approx(float(found.dense().trace()), rel=1e-13)


@pytest.mark.parametrize("crossed", list(product([False, True], repeat=2)), ids=repr)
def test_the_norm_of_terms_that_call_other_indices_the_feature(crossed):
    """On the same cells, the second with the indices of its rows, its columns, both or none the other way round."""
    rng = torch.Generator().manual_seed(0)

    def term(rows, columns):
        at, by = Place(0, (2, 3), (3, 1)), Place(1, (4, 5), (5, 1))
        a, b = (Place(p.start, p.outputs, p.features) if flip else p for p, flip in ((at, rows), (by, columns)))
        shapes = (a.features[0],), (b.features[0],), (a.outputs[0], b.outputs[0])
        phi, psi, maps = (torch.randn(7, *shape, generator=rng, dtype=torch.float64) for shape in shapes)
        return Term(a, b, phi, psi, maps)

    for first in product([False, True], repeat=2):
        second = [a != b for a, b in zip(first, crossed, strict=True)]
        found = KroneckerSum((6, 21), torch.float64, [term(*first), term(*second)])
        assert found.frobenius() == pytest.approx(float(found.dense().norm()), rel=1e-13)
        unit = torch.eye(21, dtype=torch.float64)
        assert far(found.dense(), found @ unit) < 1e-14
