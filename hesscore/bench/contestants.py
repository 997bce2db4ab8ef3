"""Who takes part where a matrix is wanted: ours, the rivals that are right, and the floor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.func import grad, jacfwd, jacrev

from hesscore.bench.timing import Contestant, writing
from hesscore.explicit.kronecker import KroneckerSum
from hesscore.explicit.tokens import TokenJacobian

Function = Callable[[Tensor], Tensor]
Structured = TypeVar("Structured")


def for_jacobian(
    structured: Callable[[], TokenJacobian], f: Function, x: Tensor, outputs: int, forward: bool = False
) -> list[Contestant]:
    """The Jacobian of ``f`` at ``x``, as ``(outputs, n)``; ``forward`` where ``n`` is small enough for that mode."""

    def matrix(found: Tensor) -> Tensor:
        return found.reshape(outputs, -1)

    return [
        *ours(structured, TokenJacobian.dense),
        Contestant("autograd, a pass an output", "rival", lambda: lambda: jacobian(f, x), matrix),
        Contestant("torch.func: jacrev", "rival", lambda: lambda: jacrev(f)(x), matrix),
        *[Contestant("torch.func: jacfwd", "rival", lambda: lambda: jacfwd(f)(x), matrix)] * forward,
        writing(outputs, x.numel(), dtype=x.dtype),
    ]


def for_hessian(structured: Callable[[], KroneckerSum], f: Function, x: Tensor) -> list[Contestant]:
    """The Hessian of ``f (n,) -> ()`` at ``x``."""

    def by_rows() -> Tensor:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.stack(
            [torch.autograd.grad(gradient, leaf, unit, retain_graph=True)[0] for unit in torch.eye(len(x)).to(x)]
        )

    return [
        *ours(structured, KroneckerSum.dense),
        Contestant("autograd, a pass a row", "rival", lambda: by_rows, itself),
        Contestant("torch.func: jacfwd(grad)", "rival", lambda: lambda: jacfwd(grad(f))(x), itself),
        writing(len(x), len(x), dtype=x.dtype),
    ]


def ours(structured: Callable[[], Structured], dense: Callable[[Structured], Tensor]) -> list[Contestant]:
    """The matrix, and what it is written out from."""
    return [
        Contestant("dense", "ours", lambda: lambda: dense(structured()), itself),
        Contestant("structured", "ours", lambda: structured, dense),
    ]


def itself(found: Tensor) -> Tensor:
    return found
