"""Bounds from exact sweeps: every Jacobian and every gradient as it is; of the curvature of a map, its size alone.

By identity (1) of ``hesscore.chain``, ``H_ab = sum_i P_ia^T < delta_i, D^2 f_i > P_ib``.  With entrywise weights ``C``
and ``D`` of the arguments of a map for which

    |< delta, D^2 f >[u, w]| <= |C u| |C w|                                 of one argument
    |< delta, D^2 f >[(u, u'), (w, w')]| <= |C u| |D w'| + |C w| |D u'|     of two, and linear in each

the map adds no more than the same with ``P_a`` and ``P_b`` in the places of ``u`` and ``w`` to ``|H_ab|``.

A parameter ``v`` moves token ``n`` of an argument by ``sum_h M_nh v_h^T phi_nh``: for each head ``h`` a map, a feature,
and the part of the parameter that belongs to it, which other heads may share.  With the maps ``M_n`` of all heads side
by side, ``|C P v|^2 <= sum_n |C M_n|^2 sum_h |v_h^T phi_nh|^2``, and so, with the heads of one part in the inner sum,

    |C P|^2  <=  max over the parts of  lambda_max( sum_n |C M_n|^2 sum_h phi_nh phi_nh^T )                         (4)

Biases, gains and shifts have all of their entries in the maps: then ``|C P|`` itself is a small eigenproblem.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import singledispatch
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hesscore import chain, memory
from hesscore.bounds.apriori import WHOLE, Bound, whole
from hesscore.bounds.jets import Pair, pairs
from hesscore.chain import Point
from hesscore.component import Component, unbroadcast
from hesscore.components.activation import Activation
from hesscore.components.hadamard import Hadamard
from hesscore.components.product import Product
from hesscore.components.rmsnorm import RMSNorm
from hesscore.components.softmax import Softmax
from hesscore.components.squared_error import SquaredError
from hesscore.curvature import Curvature, outer
from hesscore.errors import InputError
from hesscore.explicit.pieces import tokens
from hesscore.spec import Spec

ROUNDING = 1e-9
"""Added to a bound, relative to it.  It covers all rounding but that of what cancels within a Jacobian."""


def swept(curvature: Curvature, spec: Spec) -> dict[Pair, Bound]:
    """A bound for each pair of the parameters of a block on its own, in float64, and for ``(WHOLE, WHOLE)``.

    It holds for these weights on these data, and is infinite where squares leave the range of floats.  ``InputError``
    if they would not fit in memory.
    """
    batch, length = curvature.points[0].leaves["weights"].shape
    if said := memory.excess(8 * kept(spec, batch * length, length)):
        advice = "fewer tokens take less, or leave swept out of --tiers"
        raise InputError(f"swept bounds of a block on {batch * length} tokens {said}: {advice}")
    names = {name.removeprefix("blocks.0."): i for i, name in enumerate(curvature.graph.parameters)}
    sums = torch.zeros(2, len(names), len(names), dtype=torch.float64)
    for point in curvature.points:
        try:
            reaches = _reaches(point, spec)
        except torch.linalg.LinAlgError:  # squares beyond the range of floats
            sums.fill_(inf)
            break
        for i, reach in reaches.items():
            bound = reach[0].outer(reach[-1])
            sums[0 if outer(point.graph.nodes[i]) else 1] += bound if len(reach) == 1 else bound + bound.T
    sums *= 1 + ROUNDING
    found = {(a, b): Bound(*sums[:, names[a], names[b]].tolist()) for a, b in pairs(names)}
    return found | {(WHOLE, WHOLE): whole(found)}


def kept(spec: Spec, tokens: int, length: int) -> int:
    """Numbers in memory, about: how the parameter with most outputs moves whatever comes after it."""
    outputs = max(spec.d_ff, spec.heads * max(spec.d_model, spec.head_width))
    if spec.rotated:
        outputs = max(outputs, spec.d_model * spec.groups * spec.head_width)
    hidden = (6 if spec.gated else 4) * spec.d_ff
    return outputs * tokens * (5 * spec.heads * length + hidden + 14 * spec.d_model)


def _reaches(point: Point, spec: Spec) -> dict[int, Tensor]:
    """Bounds of ``|C P_a|`` for every map with curvature, ``(arguments, parameters)``.

    The gradient at the scores, and the motion of the attention weights, sum to zero along a row: what all keys, or all
    values, of a sequence have in common is not seen there.
    """
    graph = point.graph
    scores, softmax, mix = (graph.index[f"blocks.0.attn.{name}"] for name in ("scores", "softmax", "mix"))
    centred = {graph.nodes[i].sources[1] for i in (scores, mix)}
    weights = {i: sizes(graph.nodes[i].component, point.kept[i], bent) for i, bent in point.bent.items()}
    sources = {i: graph.nodes[i].sources for i in weights} | {softmax: (softmax,)}
    sides = [(i, k, sources[i][k], weight) for i, both in weights.items() for k, weight in enumerate(both)]
    found = {i: torch.zeros(len(both), len(graph.parameters), dtype=torch.float64) for i, both in weights.items()}
    for a, name in enumerate(graph.parameters):
        for i, k, source, weight in sides:
            if source == graph.index[name]:
                found[i][k, a] = weight.max()
        for motion in _motions(point, name, spec):
            moved = chain.tangents(point, {motion.entry: motion.seeds}, motion.targets)
            for i, k, source, weight in sides:
                if source in motion.targets and source in moved:
                    maps = weight * moved[source]
                    if source in centred and motion.features is None:
                        maps = maps - maps.mean(2, keepdim=True)
                    maps = tokens((maps.movedim(-2, 2) if source == softmax else maps).flatten(3))
                    found[i][k, a] = _norm(maps, motion.features)
    return found


def _norm(maps: Tensor, features: Tensor | None) -> Tensor:
    """The bound (4) from ``C M_n (N, z, m)``; without features, the norm itself, of all maps below each other."""
    unit = maps.abs().max().clamp(min=torch.finfo(maps.dtype).tiny)  # or squares would be lost
    maps = maps / unit
    if features is None:
        return unit * _square(maps.flatten(0, 1)).sqrt()
    return unit * _top(torch.einsum("n,nghp,nghq->gpq", _square(maps), features, features)).max().sqrt()


def _square(maps: Tensor) -> Tensor:
    """``|M|^2`` of matrices ``(..., z, m)``."""
    return _top(maps @ maps.mT if maps.shape[-2] < maps.shape[-1] else maps.mT @ maps)


def _top(grams: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(grams)[..., -1].clamp(min=0)


class Motion(NamedTuple):
    """How a parameter moves the ``targets``, by way of ``entry``."""

    targets: Set[int]
    entry: int
    seeds: Tensor
    """What each output of each head does to the entry, ``(h m, *its shape)``."""
    features: Tensor | None = None
    """``phi (N, parts, heads of a part, p)``; none where every entry of the parameter is an output."""


def _motions(point: Point, name: str, spec: Spec) -> Iterator[Motion]:
    """A weight acts on its tokens, one by one; of keys and values, what sees all of them is moved head by head.

    Keys are ``(d s_ij)_h = x_j^T v_h q_ih / sqrt(d_k)``, values ``(d o_i)_h = v_h^T E_i[x]`` under the attention row.
    """
    graph, weight = point.graph, point.leaves[name]
    targets = graph.sources(graph.curved) - graph.parameter_positions | {graph.index["blocks.0.attn.softmax"]}

    def unit(*shape: int) -> Tensor:
        return torch.eye(prod(shape)).to(weight).view(-1, *shape)

    if weight.ndim == 1:
        yield Motion(targets, graph.index[name], unit(*weight.shape))
        return
    (output,) = (i for i, node in enumerate(graph.nodes) if graph.index[name] in node.sources)
    x = point.kept[output][0]
    batch, length, _ = x.shape

    def token_wise(seeds: Tensor) -> Tensor:
        return seeds[:, None, None].expand(-1, batch, length, *seeds.shape[1:])

    scores, mix = (graph.index[f"blocks.0.attn.{name}"] for name in ("scores", "mix"))
    mixed = {"blocks.0.attn.k.weight": scores, "blocks.0.attn.v.weight": mix}.get(name)
    rotated = mixed == scores and spec.rotated > 0
    after: Set[int] = set() if mixed is None else graph.downstream({mixed})
    seen = x if mixed is None or rotated else x - x.mean(1, keepdim=True)  # by centred keys and values
    yield Motion(targets - after, output, token_wise(unit(weight.shape[1])), seen.flatten(0, 1)[:, None, None])
    if rotated:  # each key in its own way
        yield Motion(targets & after, graph.index[name], unit(*weight.shape), x.new_ones(batch * length, 1, 1, 1))
    elif mixed == scores:
        queries = point.kept[scores][0]
        heads = unit(*queries.shape[2:4])
        seeds = torch.einsum("hgq,bjd->hdbgqj", heads, spec.head_width**-0.5 * x).flatten(0, 1).unsqueeze(-2)
        yield Motion(targets & after, scores, seeds.expand(*seeds.shape[:-2], length, length), queries.flatten(0, 1))
    elif mixed == mix:
        means = torch.einsum("bgqij,bjd->bigqd", point.kept[mix][0], x).flatten(0, 1)
        yield Motion(targets & after, mix, token_wise(unit(*means.shape[1:3], spec.head_width)), means)


@singledispatch
def sizes(component: Component | None, kept: Any, bent: Any) -> tuple[Tensor, ...]:
    """The weights ``C`` and ``D``, which broadcast to the arguments; of a softmax, to its value."""
    raise TypeError(f"nothing is known of the curvature of {component}")


@sizes.register
def _(component: SquaredError, kept: Any, bent: Tensor) -> tuple[Tensor, ...]:
    """``2 w/(d sum w)`` times the identity."""
    return ((bent * kept[1]).sqrt(),)


@sizes.register
def _(component: Activation, kept: Any, bent: Tensor) -> tuple[Tensor, ...]:
    """``diag(delta f'')``."""
    return (bent.abs().sqrt(),)


@sizes.register
def _(component: RMSNorm, kept: Any, bent: Any) -> tuple[Tensor, ...]:
    return (component.curvature_norm(kept, bent).sqrt(),)


@sizes.register
def _(component: Softmax, kept: Any, bent: Tensor) -> tuple[Tensor, ...]:
    """``sum_j a_j (delta_j - E delta) (u_j - E u) (w_j - E w)`` in each row, for its own motion ``a_j (u_j - E u)``."""
    a = kept[0]
    return (torch.where(a > 0, bent.abs().sqrt() / a.sqrt(), 0.0),)


@sizes.register
def _(component: Hadamard, kept: Any, bent: Tensor) -> tuple[Tensor, ...]:
    """``sum delta u w <= |delta| |u| |w|``, over what one entry of the second argument meets."""
    size = unbroadcast(bent.square()[None], kept[1].shape)[0].sqrt().sqrt()
    return size, size


@sizes.register
def _(component: Product, kept: Any, bent: Tensor) -> tuple[Tensor, ...]:
    """``<delta, U W> <= |delta|_2 |U|_F |W|_F``, matrix by matrix of a batch."""
    left, right, out = component.terms
    extent = dict(zip(out, bent.shape, strict=True))
    batch = [c for c in left if c in right and c in out]
    rows = [c for c in left if c in out and c not in right]
    columns = [c for c in right if c in out and c not in left]
    matrices = torch.einsum(f"{out}->{''.join(batch + rows + columns)}", component.scale * bent)
    matrices = matrices.reshape(*(extent[c] for c in batch), prod(extent[c] for c in rows), -1)
    size = torch.linalg.matrix_norm(matrices, 2).sqrt()
    return tuple(size.reshape([extent[c] if c in batch else 1 for c in term]) for term in (left, right))
