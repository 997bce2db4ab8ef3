"""The scalars of ``hesscore.bounds.scalars``, measured: those of weights, and those of data."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from hesscore.bounds.scalars import names
from hesscore.chain import Point
from hesscore.curvature import Curvature
from hesscore.errors import UsageError
from hesscore.spec import Spec


def of_weights(spec: Spec, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """From the parameters ``blocks.0.*`` of one block."""
    found = {}
    for name in names(spec):
        part, _, quantity = name.rpartition(".")
        weight = weights.get(f"blocks.0.{part}.weight")
        if quantity == "bias":
            found[name] = float(weights[f"blocks.0.{part}.bias"].norm())
        elif quantity == "gain" and weight is not None:
            found[name] = float(weight.abs().max())
        elif quantity == "weight" and weight is not None:
            found[name] = float(torch.linalg.matrix_norm(weight, 2))
        elif quantity in ("head", "heads") and weight is not None:
            heads = weight.unflatten(1, (-1, spec.head_width)).transpose(0, 1)
            each = torch.linalg.matrix_norm(heads, 2)
            found[name] = float(each.max() if quantity == "head" else each.norm())
    return found


def embedded(spec: Spec, weights: Mapping[str, Tensor]) -> float:
    """How long a token can be that comes to the first block."""
    if spec.vocab is None:
        raise UsageError("without data nothing bounds what the first block sees, as that is no token of a vocabulary")
    tables = [weights[name] for name in weights if name.startswith(("embed.token", "embed.position", "embed.segment"))]
    norm = sum(float(table.double().norm(dim=1).max()) for table in tables)
    if "embed.norm.weight" in weights:
        gain = weights["embed.norm.weight"].double()
        norm = float(gain.abs().max()) * sqrt(len(gain)) + _length(weights.get("embed.norm.bias"))
    if "embed.project.weight" in weights:
        steep = float(torch.linalg.matrix_norm(weights["embed.project.weight"].double(), 2))
        norm = steep * norm + _length(weights.get("embed.project.bias"))
    return norm


def _length(bias: Tensor | None) -> float:
    return 0.0 if bias is None else float(bias.double().norm())


def of_data(curvature: Curvature, spec: Spec) -> dict[str, float]:
    """From the points of one block on its own: the tokens it sees, and how it sees them."""
    every = [_of_point(point, spec) for point in curvature.points]
    return {name: (min if name.endswith(".scale") else max)(one[name] for one in every) for name in every[0]}


ROUNDING = 64 * torch.finfo(torch.float64).eps
"""Of a covariance, over the largest square of what varies."""

SEEN = {"attn": "attn.v", "attn.o": "attn.o", "mlp": "mlp.up", "mlp.down": "mlp.down"}
"""A weight that multiplies each of the inputs whose sizes are scalars."""


def _of_point(point: Point, spec: Spec) -> dict[str, float]:
    graph, block = point.graph, "blocks.0"
    sources = {node.name: [graph.nodes[i].name for i in node.sources] for node in graph.nodes}
    seen = {name: sources[f"{block}.{part}"][0] for name, part in SEEN.items() if f"{block}.{part}" in graph.index}
    (output, target, _) = sources["loss"]
    values = Point(graph, point.leaves, watch={output, target, "input", *seen.values()}).watched
    weights = point.leaves["weights"]
    share = (weights / weights.sum()).sqrt().unsqueeze(-1)

    def sizes(x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest norm, and the larger of the spreads over a sequence and over the tokens in the loss."""
        spread = torch.linalg.matrix_norm(x, 2).max() / x.shape[1] ** 0.5
        return x.norm(dim=-1).max(), torch.maximum(spread, torch.linalg.matrix_norm((share * x).flatten(0, 1), 2))

    found = dict(zip(("input.norm", "input.spread"), sizes(values["input"]), strict=True))
    for name, node in seen.items():
        found |= dict(zip((f"{name}.input.norm", f"{name}.input.spread"), sizes(values[node]), strict=True))
    found["target.norm"] = values[target].norm(dim=-1).max()
    found["residual.norm"] = ((values[output] - values[target]).norm(dim=-1) * (weights > 0)).max()
    attention = point.kept[graph.index[f"{block}.attn.softmax"]][0]
    for part, reader in ("k", "scores"), ("v", "mix"):
        found[f"attn.{part}.deviation"] = _deviation(attention, point.kept[graph.index[f"{block}.attn.{reader}"]][1])
    if not spec.causal:
        found["attn.peak"] = attention.max()
    for name in ("norm1", "norm2"):
        if f"{block}.{name}" in graph.index:
            y, inverse = point.kept[graph.index[f"{block}.{name}"]]
            found |= {f"{name}.scale": 1 / inverse.max(), f"{name}.entry": y.abs().max()}
    return {name: float(value) for name, value in found.items()}


def _deviation(attention: Tensor, y: Tensor) -> Tensor:
    """The root of the largest eigenvalue of any ``Cov_i(y)``: ``y (b, j, g, k)`` under the rows ``(b, g, q, i, j)``."""
    seen = attention.sum((2, 3)).mT.unsqueeze(-1) > 0  # no row sees what is padded
    y = torch.where(seen, y, 0.0).transpose(1, 2)
    y = y - y.mean(2, keepdim=True)  # so that little cancels
    mean = torch.einsum("bgqij,bgjk->bgqik", attention, y)
    square = torch.einsum("bgqij,bgjkl->bgqikl", attention, y.unsqueeze(-1) * y.unsqueeze(-2))
    covariance = square - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    rounding = ROUNDING * y.square().sum(-1).max()
    return (torch.linalg.eigvalsh(covariance)[..., -1].max().clamp(min=0) + rounding).sqrt()
