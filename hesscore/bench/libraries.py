"""Hessian-vector products by other libraries, where these are installed: none of them is a dependency.

Each is left out in a version whose interface we do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hesscore.bench.drawn import Drawn
from hesscore.bench.plain import Norm, Plain, flat, norm_written_out
from hesscore.bench.timing import Contestant, Run


def contestants(drawn: Drawn) -> Iterator[Contestant]:
    """Those of a model with a vocabulary."""
    v, targets = flat(drawn.tangent), drawn.target.flatten()

    def curvlinops() -> Run:
        model = _Model(drawn, norm_written_out)  # jvp of jacrev, as they have it, is wrong on F.layer_norm
        of = import_module("curvlinops").HessianLinearOperator
        hessian = of(
            model, nn.CrossEntropyLoss(), list(model.parameters()), [(drawn.data, targets)], check_deterministic=False
        )
        return lambda: hessian @ v

    def eigenthings() -> Run:
        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1])

        of = import_module("hessian_eigenthings.operators").HessianOperator
        hessian = of(_Model(drawn, F.layer_norm), [(drawn.data, targets)], loss)
        return lambda: hessian.matvec(v)

    for distribution, known, prepare in (
        ("curvlinops-for-pytorch", "3.0.", curvlinops),
        ("hessian-eigenthings", "1.0.", eigenthings),
    ):
        found = installed(distribution)
        if found is not None and found.startswith(known):
            yield Contestant(f"{distribution} {found}", "rival", prepare, Tensor.double)


def installed(distribution: str) -> str | None:
    """The version."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


class _Model(nn.Module):
    """The plain model as a module: token ids to the logits of all tokens, ``(N, V)``."""

    def __init__(self, drawn: Drawn, norm: Norm) -> None:
        super().__init__()
        self.plain, self.names = Plain(drawn.spec, norm), list(drawn.weights)
        self.weights = nn.ParameterList(weight.clone() for weight in drawn.weights.values())

    def forward(self, data: Tensor) -> Tensor:
        return self.plain.output(dict(zip(self.names, self.weights, strict=True)), data).flatten(0, 1)
