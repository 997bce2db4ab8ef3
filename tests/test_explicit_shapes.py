"""Matrices of norms and feed-forward layers at any shape, against ``autograd.grad`` of plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from hesscore.components.activation import ACTIVATIONS
from hesscore.components.layernorm import LayerNorm
from hesscore.components.rmsnorm import RMSNorm
from hesscore.explicit.ffn import FeedForward
from hesscore.explicit.norm import norm_hessian, norm_jacobian
from hesscore.explicit.tokens import block_diagonal
from tests.reference import ACTIVATIONS as PLAIN

SEEDS = st.integers(0, 2**32)
SIDES = st.integers(1, 6)


def rows(y, x, **how):
    """``dy/dx`` with the axes of both, an ``autograd.grad`` for each entry of ``y``."""
    found = [torch.autograd.grad(entry, x, retain_graph=True, **how)[0] for entry in y.flatten()]
    return torch.stack(found).view(*y.shape, *x.shape)


def randn(seed, *shapes):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]


def close(found, right):
    assert found.shape == right.shape
    assert float((found - right).detach().norm()) <= 1e-12 * float(right.detach().norm())


def of_a_token(jacobian):
    """``(N, a, N, b, ...)`` as ``(N, a, b, ...)``, and nothing between different tokens."""
    n = len(jacobian)
    apart = jacobian.movedim(2, 1)
    assert not apart[~torch.eye(n, dtype=torch.bool)].any()
    return apart[range(n), range(n)]


@pytest.mark.parametrize("plain", ["layernorm", "rmsnorm"])
@settings(max_examples=20, deadline=None)
@given(n=SIDES, d=st.integers(3, 7), eps=st.sampled_from([0.0, 1e-5, 0.5]), has_gain=st.booleans(), seed=SEEDS)
def test_norms(plain, n, d, eps, has_gain, seed):
    """Of two features or fewer, LayerNorm leaves signs alone."""
    x, gain, shift = randn(seed, (n, d), (d,), (d,))
    scale = gain if has_gain else torch.ones(d, dtype=torch.float64)
    norm = LayerNorm(eps) if plain == "layernorm" else RMSNorm(eps)
    y = F.layer_norm(x, (d,), scale, shift, eps) if plain == "layernorm" else F.rms_norm(x, (d,), scale, eps)
    by_token = {"x": x.detach()} | ({"gain": gain.detach()} if has_gain else {})
    jacobian = rows(y, x, create_graph=True)
    first = of_a_token(jacobian)
    close(norm_jacobian(norm, **by_token), first)
    close(block_diagonal(norm_jacobian(norm, **by_token)), jacobian.reshape(n * d, n * d))
    second = rows(first.sum(0), x)  # a token's Jacobian moves with it alone
    close(norm_hessian(norm, **by_token), second.movedim(2, 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=12, deadline=None)
@given(n=SIDES, d=SIDES, h=SIDES, z=SIDES, bias=st.booleans(), seed=SEEDS)
def test_feed_forward(activation, n, d, h, z, bias, seed):
    x, up, down, shift, added = randn(seed, (n, d), (d, h), (h, z), (h,), (z,))
    y = PLAIN[activation](x @ up + (shift if bias else 0 * shift)) @ down + added
    layer = FeedForward(x.detach(), up.detach(), down.detach(), activation, shift.detach() if bias else None)
    close(layer.by_up().dense(), rows(y, up).reshape(n * z, d * h))
    close(layer.by_down().dense(), rows(y, down).reshape(n * z, h * z))
    close(layer.by_input(), of_a_token(rows(y, x)))
    if bias:
        close(layer.by_up_bias(), rows(y, shift))
    (tangent,) = randn(seed + 1, (d * h, 2))
    close(layer.by_up() @ tangent.detach(), rows(y, up).reshape(n * z, d * h) @ tangent)
