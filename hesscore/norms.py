"""A bound on the spectral norm of a block of the Hessian from the norms of the maps alone: the sweeps on numbers.

By identity (1) of ``hesscore.chain``, ``|H_b| <= sum_i |delta_i| sum_kl c_i,kl r_ik r_il``, where ``c_i`` bounds the
curvature of a map, ``r_ik`` how far a unit step of the block moves its argument ``k``: at most the products of the
norms of the Jacobians on the way, summed over all ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor

from hesscore import chain
from hesscore.component import Norms
from hesscore.curvature import Curvature

ROUNDING = 1e4
"""Units of rounding, of the dtype, that are added to a bound, relative to it."""


def norm_bounds(curvature: Curvature, blocks: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """An upper bound of ``|H_b|`` at this point for each of ``blocks``, the parameters in which are given by name.

    It holds, and grows with every map that is passed.
    """
    bounds = dict.fromkeys(blocks, 0.0)
    for point in curvature.points:
        norms = {i: node.component.norms(point.kept[i]) for i, node in enumerate(point.graph.nodes) if node.component}
        gradients = _gradients(point, curvature.loss.new_full((1,), point.share))
        for block, names in blocks.items():
            bounds[block] += _bound(point, point.graph.positions(names), norms, gradients)
    slack = 1 + ROUNDING * torch.finfo(curvature.loss.dtype).eps
    return {block: slack * bound for block, bound in bounds.items()}


def _gradients(point: chain.Point, seed: Tensor) -> dict[int, float]:
    """``|delta_i|`` of every node on the way from a parameter to the loss, where the gradient is ``seed``."""
    sizes: dict[int, float] = {}

    def note(i: int, delta: Tensor) -> None:
        sizes[i] = float(torch.linalg.vector_norm(delta, dtype=torch.float64))

    chain.cotangents(point, point.graph.parameter_positions, seed=seed, passed=note)
    return sizes


def _bound(point: chain.Point, leaves: Set[int], norms: Mapping[int, Norms], gradients: Mapping[int, float]) -> float:
    reach, bound = dict.fromkeys(leaves, 1.0), 0.0
    for i in sorted(point.graph.downstream(leaves) - leaves):
        moved = [reach.get(source, 0.0) for source in point.graph.nodes[i].sources]
        reach[i] = sum(size * step for size, step in zip(norms[i].jacobian, moved, strict=False))
        for (j, k), size in norms[i].curvature.items():
            bound += gradients.get(i, 0.0) * size * moved[j] * moved[k] * (1 if j == k else 2)
    return bound
