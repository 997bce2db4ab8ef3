"""Explicit Jacobians and Hessians against autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.func import jacrev, vmap

from hesscore.bench.timing import Case, Contestant
from hesscore.components.layernorm import LayerNorm
from hesscore.explicit.ffn import FeedForward
from hesscore.explicit.norm import norm_jacobian
from hesscore.explicit.tokens import TokenJacobian, block_diagonal

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

PLAIN = "autograd, a pass an output"
FUNC = "torch.func, by token"


SIZES = ((8, 16, 32), (16, 32, 128), (32, 64, 256))
"""Tokens, d and d_ff; the first are the paper's."""


def cases(quick: bool) -> Iterator[Case]:
    for tokens, d, d_ff in SIZES[: 1 if quick else None]:
        yield from _cases(tokens, d, d_ff, torch.float32)


def _cases(tokens: int, d: int, d_ff: int, dtype: torch.dtype) -> Iterator[Case]:
    """The Jacobians of a LayerNorm and of an FFN with ReLU."""
    rng = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    x, gain, shift = randn(tokens, d), randn(d), randn(d)
    up, down, bias, out = randn(d, d_ff), randn(d_ff, d), randn(d_ff), randn(d)
    size = f"{tokens} tokens, d {d}, d_ff {d_ff}, {str(dtype).removeprefix('torch.')}"

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (d,), gain, shift)

    def ffn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.relu(x @ up + bias) @ down + out

    def case(name: str, ours: tuple[Contestant, ...], plain: Callable[[], Tensor], func: Callable[[], Tensor]) -> Case:
        rivals = Contestant(PLAIN, "rival", lambda: plain, _matrix), Contestant(FUNC, "rival", lambda: func, _tokens)
        return Case(name, size, (*ours, *rivals), TOLERANCE[dtype])

    def _matrix(found: Tensor) -> Tensor:
        return found.reshape(tokens * d, -1)

    def _tokens(found: Tensor) -> Tensor:
        return block_diagonal(found) if found.shape == (tokens, d, d) else _matrix(found)

    def both(structured: Callable[[], Tensor | TokenJacobian]) -> tuple[Contestant, ...]:
        def dense() -> Tensor:
            found = structured()
            return found.dense() if isinstance(found, TokenJacobian) else block_diagonal(found)

        return (
            Contestant("dense", "ours", lambda: dense, _matrix),
            Contestant("structured", "ours", lambda: structured),
        )

    layernorm = LayerNorm(1e-5)
    yield case(
        "LayerNorm Jacobian",
        both(lambda: norm_jacobian(layernorm, x, gain)),
        lambda: jacobian(norm, x),
        lambda: vmap(jacrev(norm))(x),
    )
    yield case(
        "FFN Jacobian by W_1",
        both(lambda: FeedForward(x, up, down, "relu", bias).by_up()),
        lambda: jacobian(lambda w: ffn(x, w, down), up),
        lambda: vmap(jacrev(lambda w, x: ffn(x, w, down)), (None, 0))(up, x),
    )
    yield case(
        "FFN Jacobian by W_2",
        both(lambda: FeedForward(x, up, down, "relu", bias).by_down()),
        lambda: jacobian(lambda w: ffn(x, up, w), down),
        lambda: vmap(jacrev(lambda w, x: ffn(x, up, w)), (None, 0))(down, x),
    )
    yield case(
        "FFN Jacobian by the input",
        both(lambda: FeedForward(x, up, down, "relu", bias).by_input()),
        lambda: jacobian(lambda x: ffn(x, up, down), x),
        lambda: vmap(jacrev(lambda x: ffn(x, up, down)))(x),
    )
