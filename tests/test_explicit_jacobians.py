"""Explicit Jacobians and the norms' Hessians, against autograd and against the sweeps."""

import pytest
import torch
from torch.autograd.functional import jacobian

from hesscore.chain import Point
from hesscore.components.activation import ACTIVATIONS
from hesscore.components.layernorm import LayerNorm
from hesscore.components.rmsnorm import RMSNorm
from hesscore.curvature import Curvature
from hesscore.errors import UsageError
from hesscore.explicit.block import block_jacobian
from hesscore.explicit.ffn import FeedForward
from hesscore.explicit.norm import norm_curvature, norm_hessian, norm_jacobian
from hesscore.explicit.tokens import block_diagonal
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference
from tests.reference import ACTIVATIONS as PLAIN
from tests.test_explicit_block import SPECS, draw, far
from tests.test_hessian import twice

RNG = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


def plain(norm, gain):
    """The same norm of one token by other operations, as far from ``F.layer_norm`` as from ours."""

    def of(x):
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1] if isinstance(norm, LayerNorm) else x
        return gain * centred / ((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + norm.eps) ** 0.5

    return of


@pytest.mark.parametrize("norm", [LayerNorm(1e-5), LayerNorm(0.3), RMSNorm(1e-5), RMSNorm(0.0)], ids=repr)
@pytest.mark.parametrize(("n", "d"), [(1, 3), (3, 5), (4, 16)])  # of two features, eps alone leaves a Jacobian
def test_norms(norm, n, d):
    x, gain = randn(n, d), randn(d)
    f = plain(norm, gain)
    jacobians = torch.stack([jacobian(f, token) for token in x])
    assert far(norm_jacobian(norm, x, gain), jacobians) < 1e-12
    assert far(block_diagonal(norm_jacobian(norm, x, gain)), jacobian(f, x).reshape(n * d, n * d)) < 1e-12
    hessians = torch.stack([jacobian(lambda t: jacobian(f, t, create_graph=True), token) for token in x])
    found = norm_hessian(norm, x, gain)
    assert far(found, hessians) < 1e-12
    assert far(found, found.mT) < 1e-13
    assert far(norm_jacobian(norm, x), torch.stack([jacobian(plain(norm, 1), token) for token in x])) < 1e-12


@pytest.mark.parametrize("eps", [0.0])
def test_the_scale_of_a_token_does_not_reach_its_norm(eps):
    """Homogeneous of degree 0: ``J x = 0`` and ``D^2 y [x] = -J`` (Euler)."""
    for norm in LayerNorm(eps), RMSNorm(eps):
        x = randn(3, 6)
        first, second = norm_jacobian(norm, x), norm_hessian(norm, x)
        assert float((first @ x[:, :, None]).norm()) < 1e-14 * float(first.norm() * x.norm())
        assert far(torch.einsum("nabc,nc->nab", second, x), -first) < 1e-13


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward(activation):
    n, d, h, z = 3, 4, 5, 2
    x, up, down, bias = randn(n, d), randn(d, h), randn(h, z), randn(h)
    layer = FeedForward(x, up, down, activation, bias)

    def f(x, up, bias, down):
        return PLAIN[activation](x @ up + bias) @ down

    by_x, by_up, by_bias, by_down = jacobian(f, (x, up, bias, down))
    assert far(layer.by_up().dense(), by_up.reshape(n * z, d * h)) < 1e-12
    assert far(layer.by_down().dense(), by_down.reshape(n * z, h * z)) < 1e-12
    assert far(layer.by_up_bias(), by_bias) < 1e-12
    assert far(block_diagonal(layer.by_input()), by_x.reshape(n * z, n * d)) < 1e-12
    tangent = randn(d * h, 2)
    assert far(layer.by_up() @ tangent, by_up.reshape(n * z, d * h) @ tangent) < 1e-12
    unbiased = FeedForward(x, up, down, activation)
    assert far(unbiased.by_up().dense(), jacobian(lambda w: f(x, w, 0, down), up).reshape(n * z, d * h)) < 1e-12


@pytest.mark.parametrize("part", ["residual1", "residual2"])
@pytest.mark.parametrize("name", ["pre", "no biases", "grouped", "one head, bidirectional", "rotary", "gated"])
def test_attention_and_the_block(name, part):
    """By every parameter: of what comes after the attention (the FFN cut off), and of the block's output."""
    spec, weights, data = draw(SPECS[name])
    if part == "residual1":
        weights |= {name: torch.zeros_like(weight) for name, weight in weights.items() if ".mlp.down." in name}
    curvature = Curvature(model(spec), inputs(spec, **data) | weights)
    found = block_jacobian(curvature.points[0], spec, f"blocks.0.{part}")
    dense, start = found.dense(), 0
    for parameter in curvature.parameters:
        columns = slice(start, start := start + weights[parameter].numel())
        if part == "residual1" and (".mlp." in parameter or ".norm2." in parameter):
            assert not dense[:, columns].any()
            continue

        def output(weight, parameter=parameter):
            return reference.output(spec, weights | {parameter: weight}, data["data"], data["keep"])

        right = jacobian(output, weights[parameter]).reshape(len(dense), -1)
        assert float((dense[:, columns] - right).norm()) < 1e-12 * float(dense.norm())
    tangents = randn(start, 2)
    assert far(found @ tangents, dense @ tangents) < 1e-13


@pytest.mark.parametrize("fields", [{}, {"bias": False}, {"placement": "post", "gated": True}, {"positions": "rotary"}])
def test_every_node_of_a_block(fields):
    """By central differences of the node's value.  What has no features, or hangs on no weight, is refused."""
    spec = Spec(**({"d_model": 4, "d_ff": 3, "heads": 2, "kv_heads": 1, "seq_len": 3} | fields))
    weights, data = reference.draw(spec, padding=1)
    graph, constants, step = model(spec), inputs(spec, **data), 1e-5
    nodes = {node.name for node in graph.nodes}

    def moved(name, direction):
        at = (
            Point(graph, constants | weights | {name: weights[name] + h * direction}, watch=nodes)
            for h in (step, -step)
        )
        up, down = (point.watched for point in at)
        return {node: (up[node] - down[node]) / (2 * step) for node in nodes if up[node].is_floating_point()}

    point = Point(graph, constants | weights, watch=nodes)
    units = {name: torch.eye(w.numel(), dtype=w.dtype).view(-1, *w.shape) for name, w in weights.items()}
    columns = [moved(name, unit) for name in graph.parameters for unit in units[name]]
    found = set()
    for node in nodes:
        hangs = node in columns[0] and any(column[node].any() for column in columns)
        if not hangs or point.watched[node].ndim != 3:
            with pytest.raises(UsageError, match="depend" if not hangs else "features"):
                block_jacobian(point, spec, node)
            continue
        found.add(node)
        right = torch.stack([column[node].flatten() for column in columns], 1)
        jacobian = block_jacobian(point, spec, node)
        assert far(jacobian.dense(), right) < 1e-8
        assert far(jacobian @ right.T.contiguous(), right @ right.T) < 1e-8
    assert {f"blocks.0.{part}" for part in ("attn.q", "attn.k", "attn.v", "attn.join", "mlp.down")} <= found


@pytest.mark.parametrize("norm", [LayerNorm(1e-5), LayerNorm(0.3), RMSNorm(1e-5), RMSNorm(0.0)], ids=repr)
@pytest.mark.parametrize("curvature", [0.0, 0.7])
@pytest.mark.parametrize("gains", ["none", "a number", "a vector"])
def test_the_curvature_before_a_norm_is_a_diagonal_and_a_low_rank(norm, curvature, gains):
    """Of ``curvature/2 |y|^2 + <gradient, y>`` by each token, whose gradient at ``y`` is made the given one."""
    x, gradient = randn(3, 8), randn(3, 8)
    gain = {"none": 1.0, "a number": -0.4, "a vector": randn(8)}[gains]
    y = plain(norm, gain)(x)

    def loss(token, n):
        moved = plain(norm, gain)(token) - y[n]
        return curvature / 2 * moved @ moved + gradient[n] @ moved

    right = torch.stack([twice(lambda t, n=n: loss(t, n), x[n])[1] for n in range(3)])
    found = norm_curvature(norm, x, gradient, curvature, gain)
    dense, vectors = found.dense(), randn(3, 8, 2)
    assert far(dense, right) < 1e-12
    assert far(dense, dense.mT) < 1e-13
    assert far(found @ vectors, dense @ vectors) < 1e-13
    assert far(found.trace(), torch.einsum("naa->n", dense)) < 1e-13
    rank = torch.linalg.matrix_rank(dense - found.diagonal.diag_embed(), hermitian=True)
    assert int(rank.max()) <= (5 if gains == "a vector" else 3)
