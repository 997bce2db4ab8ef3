"""Explicit Jacobians and Hessians of maps that act on each token alone, against autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.func import jacfwd, jacrev, vmap

from hesscore.bench.contestants import ours
from hesscore.bench.drawn import named
from hesscore.bench.timing import TOLERANCE, Case, Contestant, writing
from hesscore.components.layernorm import LayerNorm
from hesscore.explicit.ffn import FeedForward
from hesscore.explicit.norm import norm_hessian, norm_jacobian
from hesscore.explicit.tokens import TokenJacobian, block_diagonal

SIZES = ((8, 16, 32), (16, 32, 128), (32, 64, 256))
"""Tokens, d and d_ff; the first are the paper's."""


def cases(quick: bool) -> Iterator[Case]:
    for size in SIZES[: 1 if quick else None]:
        yield from _cases(*size, torch.float32)


def _cases(tokens: int, d: int, d_ff: int, dtype: torch.dtype) -> Iterator[Case]:
    """The Jacobians of a LayerNorm and of an FFN with ReLU, and the Hessians of the LayerNorm."""
    rng = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    x, gain, shift = randn(tokens, d), randn(d), randn(d)
    up, down, bias, out = randn(d, d_ff), randn(d_ff, d), randn(d_ff), randn(d)
    size = f"{tokens} tokens, d {d}, d_ff {d_ff}, {named(dtype)}"

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (d,), gain, shift)

    def ffn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.relu(x @ up + bias) @ down + out

    def case(
        name: str,
        columns: int,
        structured: Callable[[], Tensor | TokenJacobian],
        plain: Callable[[], Tensor],
        func: Callable[[], Tensor],
    ) -> Case:
        contestants = (
            *ours(structured, _dense),
            Contestant("autograd, a pass an output", "rival", lambda: plain, _matrix),
            Contestant("torch.func, by token", "rival", lambda: func, _matrix),
            writing(tokens * d, columns, dtype=dtype),
        )
        return Case(name, size, contestants, TOLERANCE[dtype], tokens * d * columns * dtype.itemsize)

    def _matrix(found: Tensor) -> Tensor:
        return found.reshape(tokens * d, -1)

    layernorm = LayerNorm(1e-5)
    yield case(
        "LayerNorm Jacobian",
        tokens * d,
        lambda: norm_jacobian(layernorm, x, gain),
        lambda: jacobian(norm, x),
        lambda: block_diagonal(vmap(jacrev(norm))(x)),
    )
    yield Case(
        "LayerNorm Hessian",
        size,
        (
            Contestant("by token", "ours", lambda: lambda: norm_hessian(layernorm, x, gain), _matrix),
            Contestant("autograd, all tokens in a pass", "rival", lambda: lambda: _twice(norm, x), _matrix),
            Contestant("torch.func, by token", "rival", lambda: lambda: vmap(jacfwd(jacrev(norm)))(x), _matrix),
            writing(tokens * d, d * d, dtype=dtype),
        ),
        TOLERANCE[dtype],
        tokens * d**3 * dtype.itemsize,
    )
    yield case(
        "FFN Jacobian by W_1",
        d * d_ff,
        lambda: FeedForward(x, up, down, "relu", bias).by_up(),
        lambda: jacobian(lambda w: ffn(x, w, down), up),
        lambda: vmap(jacrev(lambda w, x: ffn(x, w, down)), (None, 0))(up, x),
    )
    yield case(
        "FFN Jacobian by W_2",
        d * d_ff,
        lambda: FeedForward(x, up, down, "relu", bias).by_down(),
        lambda: jacobian(lambda w: ffn(x, up, w), down),
        lambda: vmap(jacrev(lambda w, x: ffn(x, up, w)), (None, 0))(down, x),
    )
    yield case(
        "FFN Jacobian by the input",
        tokens * d,
        lambda: FeedForward(x, up, down, "relu", bias).by_input(),
        lambda: jacobian(lambda x: ffn(x, up, down), x),
        lambda: block_diagonal(vmap(jacrev(lambda x: ffn(x, up, down)))(x)),
    )


def _dense(found: Tensor | TokenJacobian) -> Tensor:
    return found.dense() if isinstance(found, TokenJacobian) else block_diagonal(found)


def _twice(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``D^2 f (N, d, d, d)`` of an ``f`` of each token alone: so a pass serves the same entry of all of them."""
    x = x.clone().requires_grad_()

    def grad(y: Tensor, again: bool) -> Tensor:
        return torch.autograd.grad(y.sum(), x, create_graph=again, retain_graph=True)[0]

    rows = [grad(output, again=True) for output in f(x).unbind(-1)]
    return torch.stack([torch.stack([grad(entry, again=False) for entry in row.unbind(-1)], 1) for row in rows], 1)
