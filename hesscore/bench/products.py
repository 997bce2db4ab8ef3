"""Hessian-vector products of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.utils._python_dispatch import TorchDispatchMode

from hesscore import chain
from hesscore.bench import libraries
from hesscore.bench.drawn import Drawn
from hesscore.bench.plain import flat
from hesscore.bench.timing import Case, Contestant, Run
from hesscore.curvature import pool
from hesscore.spec import Spec


def product_case(spec: Spec) -> Case:
    """``H v`` by all parameters."""
    drawn = Drawn(spec, torch.float32)
    names = list(drawn.weights)

    def vector(found: Mapping[str, Tensor]) -> Tensor:
        return flat({name: found[name] for name in names}).double()

    def ours() -> Run:
        curvature = drawn.curvature()
        return lambda: curvature.hvp(drawn.tangent)

    def gradient() -> tuple[list[Tensor], list[Tensor]]:
        leaves = {name: weight.clone().requires_grad_() for name, weight in drawn.weights.items()}
        return list(leaves.values()), list(
            torch.autograd.grad(drawn.loss(leaves), list(leaves.values()), create_graph=True)
        )

    def backward(leaves: list[Tensor], slopes: list[Tensor], keep: bool) -> dict[str, Tensor]:
        found = torch.autograd.grad(slopes, leaves, list(drawn.tangent.values()), retain_graph=keep)
        return dict(zip(names, found, strict=True))

    def kept() -> Run:
        leaves, slopes = gradient()
        return lambda: backward(leaves, slopes, keep=True)

    def forward() -> dict[str, Tensor]:
        found: dict[str, Tensor] = jvp(grad(drawn.loss), (drawn.weights,), (drawn.tangent,))[1]
        return found

    return Case(
        "Hessian-vector product",
        drawn.size,
        (
            Contestant("two sweeps", "ours", ours, vector),
            Contestant("double backward, kept graph", "rival", kept, vector),
            Contestant("double backward", "rival", lambda: lambda: backward(*gradient(), keep=False), vector),
            Contestant("jvp of grad", "rival", lambda: forward, vector),
            *libraries.contestants(drawn),
            Contestant("its matrix products", "floor", lambda: _matrix_products(drawn)),
        ),
        tolerance=1e-3,
    )


class _Recorder(TorchDispatchMode):
    """All matrix products, with the very arrays: what is read from memory, or lies transposed, takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Run] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.products.append(partial(torch.bmm, *args, out=result))
        elif func is torch.ops.aten.baddbmm_.default:
            self.products.append(partial(Tensor.baddbmm_, *args))
        return result


def _matrix_products(drawn: Drawn) -> Run:
    """The matrix products of one ``H v`` alone, part by part as the product goes; all of their arrays are kept."""
    curvature = drawn.curvature()
    graph = curvature.graph
    seeds = {graph.index[name]: tangent[None] for name, tangent in drawn.tangent.items()}
    parts = []
    for point in curvature.points:
        with _Recorder() as recorder:
            chain.product(point, seeds, set(graph.parameter_positions), graph.curved)
        parts.append(recorder.products)

    def replay(part: list[Run]) -> None:
        for run in part:
            run()

    workers = pool(len(parts))
    return lambda: list(workers.map(replay, parts))


def cases(quick: bool) -> Iterator[Case]:
    small = Spec(d_model=32, d_ff=64, layers=2, heads=2, vocab=17, seq_len=16, batch=2, bias=False)
    nanogpt = Spec(d_model=384, d_ff=1536, layers=6, heads=6, vocab=65, seq_len=256, batch=2, bias=False)
    yield product_case(small if quick else nanogpt)
