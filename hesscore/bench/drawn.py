"""A spec with seeded weights and data: the same for us and for the rivals."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from hesscore.bench.plain import Plain, Weights
from hesscore.chain import Point
from hesscore.curvature import Curvature
from hesscore.inputs.data import Data
from hesscore.problem import split
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters


class Drawn:
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
        self.plain = Plain(spec)
        self.count = sum(weight.numel() for weight in self.weights.values())
        layers = "1 layer" if spec.layers == 1 else f"{spec.layers} layers"
        tokens = spec.batch * spec.seq_len
        self.size = f"{layers}, d {spec.d_model}, d_ff {spec.d_ff}, {spec.heads} heads, {tokens} tokens, {named(dtype)}"

    def output(self, weights: Weights) -> Tensor:
        return self.plain.output(weights, self.data)

    def loss(self, weights: Weights) -> Tensor:
        found = self.output(weights)
        if self.spec.vocab is None:
            return (found - self.target).square().mean()  # forward over reverse fails on F.mse_loss
        return F.cross_entropy(found.flatten(0, 1), self.target.flatten())

    def point(self) -> Point:
        return Point(model(self.spec), self.weights | inputs(self.spec, self.data, self.target))

    def curvature(self) -> Curvature:
        return Curvature(model(self.spec), self.weights, split(self.spec, Data(self.data, self.target)))


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
