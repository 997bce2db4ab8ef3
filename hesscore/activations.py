"""Where the loss curves within the model: at activations, in norms and in the units of the feed-forward parts.

Everything is of the mean loss, which a single token moves by a share of its own: numbers are as small as there are
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from zlib import crc32

import torch
from scipy.special import stdtrit
from torch import Generator, Tensor

from hesscore import chain
from hesscore.budget import Budget, Stop
from hesscore.chain import Point
from hesscore.components.activation import Activation
from hesscore.components.rmsnorm import RMSNorm
from hesscore.curvature import Curvature
from hesscore.extrema import EXTREMA
from hesscore.spectrum.ends import UNSEEN
from hesscore.spectrum.lanczos import lockstep, ruled_out, tridiagonal
from hesscore.spectrum.sampling import NORMAL, QUANTILE
from hesscore.wiring.names import place

TOKENS = 8
"""Of those that are there, drawn for each site."""

STEPS = 16
"""Of Lanczos, for a token."""

TOLERANCE = 1e-2
"""Error of an eigenvalue to reach, over the largest absolute one."""

COLLAPSED = 10
"""A token whose variance is below so many eps is nearly constant: eps is most of what the norm divides by."""

SMALL = 0.1
"""Below so much of its largest value a slope, or a bend, is small."""


@dataclass(frozen=True)
class Site:
    """The top eigenvalue of the Hessian of the loss by one token's activation at this place, over tokens.

    ``peak`` is that of the tokens that were drawn; ``gap = (peak - mean)/mean``.
    """

    layer: int | None
    site: str
    tokens: int
    of_tokens: int
    mean: float | None = None
    mean_stderr: float | None = None
    peak: float | None = None
    peak_error: float | None = None
    gap: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Norm:
    """What a norm divides tokens by, and its own curvature, exactly, beside the heuristic ``|g|^2/s^2``."""

    layer: int | None
    norm: str
    tokens: int
    scale_min: float
    scale_median: float
    scale_max: float
    collapsed: float
    curvature_mean: float
    curvature_peak: float
    heuristic_mean: float
    heuristic_correlation: float | None
    note: str = ""


@dataclass(frozen=True)
class Units:
    """Shares of the values of an activation that are saturated or dead."""

    layer: int | None
    component: str
    activation: str
    values: int
    saturated: float
    dead: float


@dataclass(frozen=True)
class Activations:
    sites: list[Site]
    norms: list[Norm]
    units: list[Units]

    @property
    def records(self) -> dict[str, list[dict[str, object]]]:
        return {
            "sites": [asdict(site) for site in self.sites],
            "norms": [asdict(norm) for norm in self.norms],
            "units": [asdict(units) for units in self.units],
        }


def measure(curvature: Curvature, seed: int = 0, budget: Budget | None = None, work: float = 1.0) -> Activations:
    """All of it; ``budget`` has so much ``work`` for it, and cuts the sites short."""
    return Activations(list(sites(curvature, seed, budget, work)), norms(curvature), units(curvature))


PLACES = {
    **{f"{norm}{after}": norm for norm in ("norm1", "norm2", "final_norm") for after in ("", ".gain", ".shift")},
    **{name: "attn" for name in ("attn.o", "attn.o.shift", "scale1")},
    **{name: "mlp" for name in ("mlp.down", "mlp.down.shift", "scale2")},
}
"""The site that a node of a block, or after the blocks, belongs to: it is at the last of them."""


def sites(curvature: Curvature, seed: int = 0, budget: Budget | None = None, work: float = 1.0) -> Iterator[Site]:
    """Activation curvature after each norm, attention and feed-forward part."""
    graph = curvature.graph
    nodes: dict[tuple[int | None, str], int] = {}
    for i, node in enumerate(graph.nodes):
        layer, what = _within(node.name)
        if node.component is not None and what in PLACES:
            nodes[layer, PLACES[what]] = i
    budget = budget or Budget(None, work)
    there = [_tokens(point, curvature.loss.new_full((1,), point.share), nodes.values()) for point in curvature.points]
    for (layer, site), i in nodes.items():
        (stop,) = budget.step(work / len(nodes))
        rng = torch.Generator().manual_seed(seed ^ crc32(f"{layer} {site}".encode()))
        yield _site(curvature, Site(layer, site, 0, sum(len(tokens[i]) for tokens in there)), i, there, rng, stop)


def _within(name: str) -> tuple[int | None, str]:
    """The layer of a node, and its name there."""
    layer, part, _ = place(f"{name}.")
    return layer, part


def _tokens(point: Point, seed: Tensor, nodes: Iterable[int]) -> dict[int, Tensor]:
    """The tokens at each node, ``(count, 2)``: sequence and position, without padding."""
    shapes: dict[int, torch.Size] = {}
    chain.cotangents(point, point.graph.parameter_positions, seed, passed=lambda i, d: shapes.update({i: d.shape}))
    seen = _seen(point)
    found = {}
    for i in nodes:
        batch, length = shapes[i][:2]
        there = seen.expand(batch, -1) if length == seen.shape[1] else seen.new_ones(batch, length)  # pooled
        found[i] = there.nonzero()
    return found


def _seen(point: Point) -> Tensor:
    """Which tokens are attended to by others, or at least by themselves, ``(B or 1, L)``."""
    mask = point.leaves["mask"][:, 0, 0]
    return mask.diagonal(dim1=1, dim2=2) if mask.shape[1] > 1 else mask[:, 0]


def _site(
    curvature: Curvature, site: Site, node: int, there: list[dict[int, Tensor]], rng: Generator, stop: Stop
) -> Site:
    order = torch.randperm(site.of_tokens, generator=rng)[:TOKENS]
    values, errors = [], []
    first = 0
    for point, tokens in zip(curvature.points, there, strict=True):
        count = len(tokens[node])
        own = tokens[node][order[(order >= first) & (order < first + count)] - first]
        first += count
        if len(own):
            value, error = _top(curvature, point, node, own, rng, stop)
            values.append(value)
            errors.append(error)
    found, error = torch.cat(values), torch.cat(errors)
    count, largest = len(found), int(found.argmax())
    mean, stderr = float(found.mean()), float(error.mean())
    if count < site.of_tokens:
        spread = float(found.std()) if count > 1 else inf
        quantile = float(stdtrit(max(count - 1, 1), QUANTILE)) / NORMAL
        stderr += quantile * spread * ((1 - count / site.of_tokens) / count) ** 0.5
    peak, peak_error = float(found[largest]), float(error[largest])
    positive = mean > NORMAL * stderr
    site = replace(site, tokens=count, mean=mean, mean_stderr=stderr, peak=peak, peak_error=peak_error)
    return replace(site, gap=(peak - mean) / mean) if positive else replace(site, note="the mean may be zero: no gap")


def _top(
    curvature: Curvature, point: Point, node: int, tokens: Tensor, rng: Generator, stop: Stop
) -> tuple[Tensor, Tensor]:
    """The top eigenvalue for each of ``tokens (k, 2)``, and its error, in lockstep."""
    graph, like, k = curvature.graph, curvature.loss, torch.arange(len(tokens))
    shape = chain.cotangents(point, {node}, like.new_full((1,), point.share))[node].shape[1:]
    curved = graph.curved & graph.downstream({node})

    def product(vectors: Tensor) -> Tensor:
        seeds = like.new_zeros(len(k), *shape)
        seeds[k, tokens[:, 0], tokens[:, 1]] = vectors.T
        moved = chain.product(point, {node: seeds}, {node}, curved).get(node, seeds)
        return moved[k, tokens[:, 0], tokens[:, 1]].T

    d = shape[-1]
    starts = torch.randn(d, len(k), generator=rng, dtype=torch.float64).to(like)
    for alpha, beta in lockstep(product, starts, min(d, STEPS), 0.0):
        ritz, inside = torch.linalg.eigh(tridiagonal(alpha, beta[:, :-1]))
        size = ritz.abs().amax(1)
        residual = beta[:, -1] * inside[:, -1, -1].abs()
        beyond = torch.stack([ruled_out(*each, d)[1] for each in zip(ritz, beta, strict=True)])
        error = residual.maximum(beyond) if alpha.shape[1] < d else torch.zeros_like(residual)
        if (error <= TOLERANCE * size).all() or stop():
            break
    return ritz[:, -1], error + UNSEEN[like.dtype] * size


def norms(curvature: Curvature) -> list[Norm]:
    """Every norm, over all tokens that are not padding."""
    return [_norm(curvature, i) for i, node in enumerate(curvature.graph.nodes) if isinstance(node.component, RMSNorm)]


def _norm(curvature: Curvature, i: int) -> Norm:
    from scipy.stats import spearmanr  # which takes a second to load

    node = curvature.graph.nodes[i]
    norm = node.component
    assert isinstance(norm, RMSNorm)
    scales, sizes, heuristics = [], [], []
    for point in curvature.points:
        (y, inverse), (h, _) = point.kept[i], point.bent[i]
        there, seen = torch.ones(y.shape[:2], dtype=torch.bool), _seen(point)
        if y.shape[1] == seen.shape[1]:
            there &= seen
        scale = 1 / inverse.double()
        gradient = h.double().norm(dim=-1, keepdim=True) * y.shape[-1] * scale.square()
        scales.append(scale[there])
        sizes.append(norm.curvature_norm(point.kept[i], point.bent[i]).double()[there])
        heuristics.append((gradient / scale).square()[there])
    scale, size, heuristic = (torch.cat(parts).flatten() for parts in (scales, sizes, heuristics))
    collapsed = float((scale.square() - norm.eps < COLLAPSED * norm.eps).double().mean())
    alike = len(scale) < 3 or size.min() == size.max() or heuristic.min() == heuristic.max()
    layer, name = _within(node.name)
    return Norm(
        layer=layer,
        norm=name,
        tokens=len(scale),
        scale_min=float(scale.min()),
        scale_median=float(scale.median()),
        scale_max=float(scale.max()),
        collapsed=collapsed,
        curvature_mean=float(size.mean()),
        curvature_peak=float(size.max()),
        heuristic_mean=float(heuristic.mean()),
        heuristic_correlation=None if alike else float(spearmanr(size, heuristic).statistic),
        note=f"{100 * collapsed:.2g} % of the tokens are nearly constant: eps divides them" * (collapsed > 0),
    )


def units(curvature: Curvature) -> list[Units]:
    """Every activation: small slopes that bend are saturated, small ones that do not are dead."""
    found = []
    for i, node in enumerate(curvature.graph.nodes):
        if not isinstance(node.component, Activation):
            continue
        limits = EXTREMA[node.component.name]
        steepest = limits.slope if isfinite(limits.slope) else 1.0
        counts = torch.zeros(3, dtype=torch.float64)
        for point in curvature.points:
            slope, bend = (part.abs() for part in point.kept[i])
            flat, bent = slope <= SMALL * steepest, bend >= SMALL * limits.bend
            bent &= limits.bend > 0
            counts += torch.stack([(flat & bent).sum(), (flat & ~bent).sum(), torch.tensor(slope.numel())]).double()
        layer, name = _within(node.name)
        saturated, dead, values = counts.tolist()
        found.append(Units(layer, name, node.component.name, int(values), saturated / values, dead / values))
    return found
