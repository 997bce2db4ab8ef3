"""The scalars of ``hesscore.bounds.scalars``, measured: those of weights, and those of data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hesscore.bounds.scalars import names
from hesscore.chain import Point
from hesscore.curvature import Curvature
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
            heads = weight.unflatten(1, (-1, spec.head_dim)).transpose(0, 1)
            each = torch.linalg.matrix_norm(heads, 2)
            found[name] = float(each.max() if quantity == "head" else each.norm())
    return found


def of_data(curvature: Curvature, spec: Spec) -> dict[str, float]:
    """From the points of one block on its own: the tokens it sees, and how it sees them."""
    every = [_of_point(point, spec) for point in curvature.points]
    return {name: (min if name.endswith(".scale") else max)(one[name] for one in every) for name in every[0]}


def _of_point(point: Point, spec: Spec) -> dict[str, float]:
    graph, block = point.graph, "blocks.0"
    output = graph.nodes[graph.nodes[-1].sources[0]].name
    norms = [name for name in ("norm1", "norm2") if f"{block}.{name}" in graph.index]
    watch = {output, "input", "target"}
    point = Point(graph, point.leaves, watch=watch)
    x, target, y = (point.watched[name] for name in ("input", "target", output))
    weights = point.leaves["weights"]
    share = (weights / weights.sum()).sqrt().unsqueeze(-1)
    spread = torch.linalg.matrix_norm(x, 2).max() / x.shape[1] ** 0.5
    found = {
        "input.norm": x.norm(dim=-1).max(),
        "input.spread": torch.maximum(spread, torch.linalg.matrix_norm((share * x).flatten(0, 1), 2)),
        "target.norm": target.norm(dim=-1).max(),
        "residual.norm": ((y - target).norm(dim=-1) * (weights > 0)).max(),
    }
    if not spec.causal:
        found["attn.peak"] = point.kept[graph.index[f"{block}.attn.softmax"]][0].max()
    for name in norms:
        found[f"{name}.scale"] = 1 / point.kept[graph.index[f"{block}.{name}"]][1].max()
    return {name: float(value) for name, value in found.items()}
