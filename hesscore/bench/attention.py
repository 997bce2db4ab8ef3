"""Attention alone: its Jacobians by W_Q, W_K and W_V, and the functional part of its Hessian by these."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hesscore.bench.contestants import for_hessian, for_jacobian
from hesscore.bench.drawn import named
from hesscore.bench.plain import Plain, Weights, flat, of_flat
from hesscore.bench.timing import TOLERANCE, Case
from hesscore.chain import Point
from hesscore.components.squared_error import SquaredError
from hesscore.curvature import Curvature, inner
from hesscore.explicit.block import block_hessian, block_jacobian
from hesscore.explicit.kronecker import KroneckerSum
from hesscore.explicit.tokens import TokenJacobian
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.attention import attention
from hesscore.wiring.inputs import inputs

NAME = "blocks.0.attn"
PARTS = "qkv"


def cases(quick: bool) -> Iterator[Case]:
    spec = Spec(d_model=8, d_ff=1, heads=2, seq_len=8) if quick else Spec(d_model=32, d_ff=1, heads=2, seq_len=16)
    for part in PARTS:
        yield _Attention(spec, torch.float32).jacobian_case(part)
    yield _Attention(spec, torch.float64).hessian_case()


class _Attention:
    """``Y = attention(X)`` with W_O under the mean squared error to a target, without biases."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        spec = spec.model_copy(update={"bias": False})
        d, length = spec.d_model, spec.seq_len
        rng = torch.Generator().manual_seed(0)
        weights = torch.randn(4, d, d, generator=rng, dtype=torch.float64).to(dtype) / d**0.5
        x, target = torch.randn(2, 1, length, d, generator=rng, dtype=torch.float64).to(dtype)
        self.weights = {f"{NAME}.{part}.weight": weight for part, weight in zip("qkvo", weights, strict=True)}
        self.spec, self.dtype, self.x, self.target = spec, dtype, x, target
        self.plain = Plain(spec)
        self.size = f"{length} tokens, d {d}, {spec.heads} heads, {named(dtype)}"

    def leaves(self) -> dict[str, Tensor]:
        return self.weights | inputs(self.spec, self.x, self.target)

    def point(self) -> Point:
        g = Graph()
        attention(g, NAME, g.constant("input"), self.spec)
        return Point(g, self.leaves())

    def curvature(self) -> Curvature:
        g = Graph()
        y = attention(g, NAME, g.constant("input"), self.spec)
        g.apply("loss", SquaredError(), y, g.constant("target"), g.constant("weights"))
        return Curvature(g, self.leaves())

    def jacobian_case(self, part: str) -> Case:
        name = f"{NAME}.{part}.weight"
        weight = self.weights[name]

        def structured() -> TokenJacobian:
            return block_jacobian(self.point(), self.spec, f"{NAME}.o", [f"attn.{part}"])

        def plain(w: Tensor) -> Tensor:
            return self.plain.attention(self.weights | {name: w}, NAME, self.x)

        return Case(
            f"attention Jacobian by W_{part.upper()}",
            self.size,
            tuple(for_jacobian(structured, plain, weight, self.x.numel(), forward=True)),
            TOLERANCE[self.dtype],
            self.x.numel() * weight.numel() * self.dtype.itemsize,
        )

    def hessian_case(self) -> Case:
        """Of ``<delta, Y>`` with ``delta`` the gradient of the loss: all but the curvature of the loss itself."""
        moving = {name: weight for name, weight in self.weights.items() if not name.endswith(".o.weight")}
        n = sum(weight.numel() for weight in moving.values())
        parts = [f"attn.{part}" for part in PARTS]

        def plain(weights: Weights) -> Tensor:
            return self.plain.attention({**self.weights, **weights}, NAME, self.x)

        delta = 2 / self.x.numel() * (plain({}) - self.target)
        paired, x = of_flat(lambda weights: (delta * plain(weights)).sum(), moving), flat(moving)

        def structured() -> KroneckerSum:
            return block_hessian(self.curvature(), self.spec, inner, parts)

        return Case(
            f"attention Hessian by W_Q, W_K and W_V, functional part, {n} x {n}",
            self.size,
            tuple(for_hessian(structured, paired, x)),
            TOLERANCE[self.dtype],
            n**2 * self.dtype.itemsize,
        )
