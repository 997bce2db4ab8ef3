"""Whole Hessians of small models against double ``autograd.grad`` of a plain PyTorch Transformer."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hesscore.curvature import Curvature
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference


def curvature(spec, weights, data) -> Curvature:
    return Curvature(model(spec), inputs(spec, **data) | weights)


def flat(tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def unflat(vector, like) -> dict[str, Tensor]:
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def twice(f, x) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of ``f`` by reverse over reverse: all rows at once, and the last one also alone."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
    rows = torch.eye(len(x), dtype=x.dtype)
    (hessian,) = torch.autograd.grad(gradient, x, rows, retain_graph=True, is_grads_batched=True)
    (last,) = torch.autograd.grad(gradient, x, rows[-1])
    assert distance(hessian[-1], last) < 1e-13
    return gradient.detach(), hessian


def distance(a, b) -> float:
    return float((a - b).norm() / b.norm())


def check(spec, **draw):
    """Loss, gradient and Hessian of ``spec`` are those of the reference."""
    weights, data = reference.draw(spec, **draw)
    assert sum(value.numel() for value in weights.values()) < 700
    gradient, hessian = twice(lambda x: reference.loss(spec, unflat(x, weights), **data), flat(weights.values()))
    ours = curvature(spec, weights, data)
    assert set(ours.parameters) == set(weights)
    assert distance(ours.loss, reference.loss(spec, weights, **data)) < 1e-13
    assert distance(flat(ours.gradient[name] for name in weights), gradient) < 1e-12
    assert distance(ours.dense(list(weights)), hessian) < 1e-12


OPTIONS = {
    "placement": ("pre", "post", "parallel"),
    "norm": ("layernorm", "rmsnorm"),
    "gated": (False, True),
    "causal": (True, False),
    "tied": (False, True),
    "layers": (1, 2, 4),
}


@pytest.mark.parametrize("options", list(product(*OPTIONS.values())), ids=lambda options: "-".join(map(str, options)))
def test_every_architecture(options):
    check(Spec(d_model=3, d_ff=2, vocab=4, seq_len=3, **dict(zip(OPTIONS, options, strict=True))), batch=1)


VARIANTS = {
    **{f"{name}, gated": {"activation": name, "gated": True} for name in reference.ACTIVATIONS},
    **{name: {"activation": name, "layers": 2} for name in reference.ACTIVATIONS},
    "no biases": {"bias": False},
    "no biases, post": {"bias": False, "placement": "post"},
    "two heads": {"heads": 2},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "one key for all": {"heads": 4, "kv_heads": 1, "causal": False},
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary"},
    "rotary, another base": {"positions": "rotary", "rotary_base": 50.0, "causal": False},
    "rotary, grouped heads": {"positions": "rotary", "heads": 2, "kv_heads": 1, "layers": 2},
    "coarse eps": {"norm_eps": 0.5, "layers": 2},
    "squared error": {"vocab": None},
    "squared error, post": {"vocab": None, "placement": "post", "heads": 2},
    "squared error, parallel": {"vocab": None, "placement": "parallel", "norm": "rmsnorm", "gated": True},
    "no norms": {"norm": "none", "layers": 2},
    "no FFN": {"d_ff": 0, "layers": 2},
    "no FFN, post": {"d_ff": 0, "placement": "post"},
    "attention alone": {"vocab": None, "norm": "none", "d_ff": 0},
}


@pytest.mark.parametrize("padding", [0, 2], ids=["full", "padded"])
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_every_variant(fields, padding):
    check(Spec(**{"d_model": 4, "d_ff": 3, "vocab": 5, "seq_len": 4, **fields}), padding=padding)


SMALL = Spec(d_model=4, d_ff=3, heads=2, vocab=5, seq_len=4)
LLAMA = Spec(
    d_model=4,
    d_ff=3,
    layers=2,
    heads=2,
    kv_heads=1,
    vocab=5,
    norm="rmsnorm",
    activation="silu",
    gated=True,
    bias=False,
    positions="rotary",
    tied=True,
    seq_len=4,
)
STACK = Spec(d_model=4, d_ff=3, heads=2, placement="post", seq_len=4)
three_specs = pytest.mark.parametrize("spec", [SMALL, LLAMA, STACK], ids=["small", "llama", "stack"])


def test_a_shorter_text_than_the_table_of_positions():
    check(SMALL.model_copy(update={"positions": "learned"}), length=2)


@three_specs
def test_gauss_newton_is_the_curvature_of_the_loss_between_jacobians(spec):
    """``J^T S J``, where ``S = (diag(p) - p p^T)/N`` for cross entropy and ``2/(N d)`` for squared error."""
    weights, data = reference.draw(spec, padding=1)
    keep = data["keep"]

    def output(x):
        return reference.output(spec, unflat(x, weights), data["data"], keep)[keep]

    x = flat(weights.values())
    z, jacobian = output(x), torch.autograd.functional.jacobian(output, x)
    if spec.vocab:
        p = z.softmax(-1)
        s = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(z)
    else:
        s = torch.eye(spec.d_model, dtype=x.dtype).expand(len(z), -1, -1) * 2 / z.numel()
    expected = torch.einsum("nip,nij,njq->pq", jacobian, s, jacobian)

    ours = curvature(spec, weights, data)
    columns = unflat_columns(torch.eye(len(x), dtype=x.dtype), weights)
    assert distance(flat_columns(ours.gauss_newton(columns), weights), expected) < 1e-12
    assert torch.linalg.eigvalsh(expected)[0] > -1e-12

    _, hessian = twice(lambda x: reference.loss(spec, unflat(x, weights), **data), x)
    assert distance(flat_columns(ours.functional(columns), weights), hessian - expected) < 1e-12
    assert distance(hessian, expected) > 0.1


def unflat_columns(matrix, like) -> dict[str, Tensor]:
    parts = matrix.split([tensor.numel() for tensor in like.values()], 1)
    return {name: part.reshape(-1, *tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def flat_columns(tangents, order) -> Tensor:
    return torch.cat([tangents[name].flatten(1) for name in order], 1)


@three_specs
def test_every_block_is_a_slice_of_the_whole(spec):
    weights, data = reference.draw(spec)
    _, hessian = twice(lambda x: reference.loss(spec, unflat(x, weights), **data), flat(weights.values()))
    ours = curvature(spec, weights, data)
    sizes = [value.numel() for value in weights.values()]
    for a, rows in zip(weights, hessian.split(sizes), strict=True):
        for b, expected in zip(weights, rows.split(sizes, 1), strict=True):
            found = ours.block(a, b).dense()
            assert found.shape == expected.shape
            assert (found - expected).norm() <= 1e-13 * hessian.norm(), (a, b)


@three_specs
def test_forty_pads_change_nothing(spec):
    spec = spec.model_copy(update={"seq_len": 44})
    weights, data = reference.draw(spec, length=4)
    padded = {name: torch.cat((tensor, tensor.new_zeros(2, 40, *tensor.shape[2:])), 1) for name, tensor in data.items()}
    plain, longer = curvature(spec, weights, data), curvature(spec, weights, padded)
    assert distance(longer.loss, plain.loss) < 1e-13
    assert distance(longer.dense(), plain.dense()) < 1e-13


def test_what_is_not_labelled_is_not_scored():
    weights, data = reference.draw(SMALL)
    data["target"][:, 1:3] = -100
    _, hessian = twice(lambda x: reference.loss(SMALL, unflat(x, weights), **data), flat(weights.values()))
    assert distance(curvature(SMALL, weights, data).dense(list(weights)), hessian) < 1e-12


@three_specs
def test_a_batch_three_times_over_changes_nothing(spec):
    weights, data = reference.draw(spec, padding=1)
    plain = curvature(spec, weights, data).dense()
    thrice = {name: torch.cat((tensor,) * 3) for name, tensor in data.items()}
    assert distance(curvature(spec, weights, thrice).dense(), plain) < 1e-13


@st.composite
def specs(draw) -> Spec:
    width = draw(st.sampled_from([2, 4]))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]))
    vocab = draw(st.sampled_from([None, 2, 7]))
    return Spec(
        d_model=width * heads,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=draw(st.integers(0, 6)),
        layers=draw(st.integers(1, 3)),
        vocab=vocab,
        tied=vocab is not None and draw(st.booleans()),
        positions=draw(st.sampled_from(["none", "rotary"] + ["learned"] * bool(vocab))),
        placement=draw(st.sampled_from(["pre", "post", "parallel"])),
        # without norms logits grow, and autograd loses the digits of the small probabilities
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"] + ["none"] * (vocab is None))),
        norm_eps=draw(st.sampled_from([1e-5, 0.1])),
        activation=draw(st.sampled_from(sorted(reference.ACTIVATIONS))),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        causal=draw(st.booleans()),
        seq_len=draw(st.integers(1, 5)),
    )


@settings(max_examples=100)
@given(spec=specs(), batch=st.integers(1, 3), seed=st.integers(0, 99), data=st.data())
def test_a_product_is_double_backward(spec, batch, seed, data):
    padding = data.draw(st.integers(0, spec.seq_len - 1))
    weights, constants = reference.draw(spec, seed, batch, padding=padding)
    x = flat(weights.values())
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reference.loss(spec, unflat(leaf, weights), **constants), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(gradient, leaf, v)
    found = curvature(spec, weights, constants).hvp(unflat(v, weights))
    assert distance(flat(found[name] for name in weights), expected) < 1e-11
