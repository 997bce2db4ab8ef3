"""Hessian-vector products of a model, and the whole Hessian of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacfwd, jvp
from torch.utils._python_dispatch import TorchDispatchMode

from hesscore import chain
from hesscore.bench.plain import loss_of
from hesscore.bench.timing import Case, Contestant, Run
from hesscore.curvature import Curvature, pool
from hesscore.explicit.block import block_hessian
from hesscore.problem import split
from hesscore.spec import Spec
from hesscore.wiring.model import model, parameters


class Drawn:
    """A spec with seeded weights and data."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(0)
        shape = spec.batch, spec.seq_len
        if spec.vocab:
            self.data, self.target = torch.randint(spec.vocab, (2, *shape), generator=rng)
        else:
            self.data, self.target = torch.randn(2, *shape, spec.d_model, generator=rng, dtype=dtype)
        self.spec = spec
        self.weights = {name: weight.to(dtype) for name, weight in parameters(spec).items()}
        self.tangent = {
            name: torch.randn(weight.shape, generator=rng, dtype=dtype) for name, weight in self.weights.items()
        }
        self.loss = loss_of(spec, self.data, self.target)

    def curvature(self) -> Curvature:
        return Curvature(model(self.spec), self.weights, split(self.spec, self.data, self.target))

    def size(self) -> str:
        spec = self.spec
        dtype = str(next(iter(self.weights.values())).dtype).removeprefix("torch.")
        tokens = spec.batch * spec.seq_len
        return f"{spec.layers} layers, d {spec.d_model}, d_ff {spec.d_ff}, {tokens} tokens, {dtype}"


def product_case(spec: Spec) -> Case:
    """``H v`` by all parameters."""
    drawn = Drawn(spec, torch.float32)
    names = list(drawn.weights)

    def flat(found: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([found[name].flatten() for name in names]).double()

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
        drawn.size(),
        (
            Contestant("two sweeps", "ours", ours, flat),
            Contestant("double backward, kept graph", "rival", kept, flat),
            Contestant("double backward", "rival", lambda: lambda: backward(*gradient(), keep=False), flat),
            Contestant("jvp of grad", "rival", lambda: forward, flat),
            Contestant("its matrix products", "floor", lambda: _matrix_products(drawn)),
        ),
        tolerance=1e-3,
        memory=True,
    )


def block_case(spec: Spec) -> Case:
    """The whole dense Hessian of one block, from weights and data."""
    drawn = Drawn(spec, torch.float64)
    n = sum(weight.numel() for weight in drawn.weights.values())
    shapes = {name: weight.shape for name, weight in drawn.weights.items()}

    def flat_loss(x: Tensor) -> Tensor:
        parts = x.split([prod(shape) for shape in shapes.values()])
        return drawn.loss({name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)})

    def rival() -> Run:
        x = torch.cat([weight.flatten() for weight in drawn.weights.values()])
        return lambda: jacfwd(grad(flat_loss))(x)

    def identity(found: Tensor) -> Tensor:
        return found

    return Case(
        f"dense block Hessian, {n} x {n}",
        drawn.size(),
        (
            Contestant("dense", "ours", lambda: lambda: block_hessian(drawn.curvature(), spec).dense(), identity),
            Contestant("jacfwd(grad)", "rival", rival, identity),
            Contestant("writing it once", "floor", lambda: lambda: torch.empty(n, n, dtype=torch.float64).fill_(1.0)),
        ),
        tolerance=1e-12,
        memory=True,
    )


class _Recorder(TorchDispatchMode):
    """The shapes of all matrix products, ``(batch, rows, inner, columns)``."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm_.default):
            x, y = args[-2:]
            self.shapes.append((*x.shape, y.shape[2]))
        return func(*args, **(kwargs or {}))


def _matrix_products(drawn: Drawn) -> Run:
    """The matrix products of one ``H v`` alone, on arrays that are there already, part by part as the product goes."""
    curvature = drawn.curvature()
    graph = curvature.graph
    seeds = {graph.index[name]: tangent[None] for name, tangent in drawn.tangent.items()}
    parts = []
    for point in curvature.points:
        with _Recorder() as recorder:
            chain.product(point, seeds, set(graph.parameter_positions), graph.curved)
        parts.append(recorder.shapes)
    rng = torch.Generator().manual_seed(0)
    arrays = {
        shape: (torch.randn(b, m, k, generator=rng), torch.randn(b, k, n, generator=rng), torch.empty(b, m, n))
        for shape in {shape for part in parts for shape in part}
        for b, m, k, n in [shape]
    }

    def replay(part: list[tuple[int, int, int, int]]) -> None:
        for shape in part:
            x, y, out = arrays[shape]
            torch.bmm(x, y, out=out)

    workers = pool(len(parts))
    return lambda: list(workers.map(replay, parts))


def cases(quick: bool) -> Iterator[Case]:
    if quick:
        yield product_case(Spec(d_model=32, d_ff=64, layers=2, heads=2, vocab=17, seq_len=16, batch=2, bias=False))
        yield block_case(Spec(d_model=8, d_ff=16, heads=2, seq_len=8, bias=False))
        return
    yield product_case(Spec(d_model=384, d_ff=1536, layers=6, heads=6, vocab=65, seq_len=256, batch=2, bias=False))
    yield block_case(Spec(d_model=16, d_ff=64, heads=2, seq_len=16, bias=False))
