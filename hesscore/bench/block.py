"""One block: its Jacobian, its Hessian and the trace of that, from weights and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

import torch
from torch import Tensor
from torch.func import grad, jacfwd

from hesscore.bench.contestants import for_hessian, for_jacobian
from hesscore.bench.drawn import Drawn
from hesscore.bench.plain import flat, of_flat
from hesscore.bench.timing import TOLERANCE, Case, Contestant, Run
from hesscore.explicit.block import block_hessian, block_jacobian
from hesscore.explicit.kronecker import KroneckerSum
from hesscore.explicit.tokens import TokenJacobian
from hesscore.spec import Spec


def cases(quick: bool) -> Iterator[Case]:
    small = Spec(d_model=8, d_ff=16, heads=2, seq_len=8, bias=False)
    yield _jacobian(small if quick else Spec(d_model=32, d_ff=128, heads=2, seq_len=16, bias=False))
    spec = small if quick else Spec(d_model=16, d_ff=64, heads=2, seq_len=16, bias=False)
    yield _hessian(spec)
    yield trace(spec, 0.1 if quick else 0.01)


def _jacobian(spec: Spec) -> Case:
    """Of the block's output."""
    drawn = Drawn(spec, torch.float32)
    output, x = of_flat(drawn.output, drawn.weights), flat(drawn.weights)
    outputs = drawn.data.numel()

    def structured() -> TokenJacobian:
        return block_jacobian(drawn.point(), spec, "blocks.0.residual2")

    return Case(
        f"block Jacobian, {outputs} x {drawn.count}",
        drawn.size,
        tuple(for_jacobian(structured, output, x, outputs)),
        TOLERANCE[torch.float32],
        outputs * drawn.count * torch.float32.itemsize,
    )


def _hessian(spec: Spec) -> Case:
    drawn = Drawn(spec, torch.float64)
    loss, x, n = of_flat(drawn.loss, drawn.weights), flat(drawn.weights), drawn.count

    def structured() -> KroneckerSum:
        return block_hessian(drawn.curvature(), spec)

    return Case(
        f"block Hessian, {n} x {n}",
        drawn.size,
        tuple(for_hessian(structured, loss, x)),
        TOLERANCE[torch.float64],
        n**2 * torch.float64.itemsize,
    )


def trace(spec: Spec, accuracy: float) -> Case:
    """The exact trace, and Hutchinson's estimate with a standard error of ``accuracy`` times it."""
    drawn = Drawn(spec, torch.float64)
    loss, x = of_flat(drawn.loss, drawn.weights), flat(drawn.weights)
    probes = probes_for(block_hessian(drawn.curvature(), spec), accuracy)

    def number(found: float | Tensor) -> Tensor:
        return torch.as_tensor(found, dtype=torch.float64)

    def estimate() -> Run:
        rng = torch.Generator().manual_seed(0)
        return lambda: hutchinson(loss, x, probes, rng)

    return Case(
        "trace of the block Hessian",
        drawn.size,
        (
            Contestant("exact", "ours", lambda: lambda: block_hessian(drawn.curvature(), spec).trace(), number),
            Contestant("torch.func: jacfwd(grad)", "rival", lambda: lambda: jacfwd(grad(loss))(x).trace(), number),
            Contestant(f"Hutchinson to {accuracy:.0%}, all {probes} probes", "rival", estimate),
        ),
        TOLERANCE[torch.float64],
    )


def probes_for(hessian: KroneckerSum, accuracy: float) -> int:
    """How many: with random signs ``v^T H v`` has the variance ``2 (|H|_F^2 - sum_i h_ii^2)``."""
    variance = 2 * (hessian.frobenius() ** 2 - float(hessian.diagonal().square().sum()))
    return ceil(variance / (accuracy * hessian.trace()) ** 2)


def hutchinson(loss: Callable[[Tensor], Tensor], x: Tensor, probes: int, rng: torch.Generator) -> float:
    """The mean of ``v^T H v`` over random signs ``v``, by double backward on one graph."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    total = 0.0
    for _ in range(probes):
        v = torch.randint(2, x.shape, generator=rng).to(x) * 2 - 1
        total += float(torch.autograd.grad(gradient, x, v, retain_graph=True)[0] @ v)
    return total / probes
