"""The closed forms against three channels that know nothing of them.

A channel differentiates plain values, in float64 whatever the closed form is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from re import sub
from typing import NamedTuple

import torch
from torch import Generator, Tensor

import hesscore.components  # noqa: F401  (registers every map)
from hesscore import memory
from hesscore.chain import Point
from hesscore.component import Component, Example, randn
from hesscore.curvature import Batch, Curvature
from hesscore.graph import Graph
from hesscore.verify.channels import CHANNELS, Function, Products, exact
from hesscore.verify.models import draw, grid
from hesscore.wiring.model import model

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""The default, by the dtype of the closed form."""

LOOSEST = 1e-3
"""What is told no better than this is not confirmed: no tolerance may be larger."""


VECTORS, GRAPHS = 40, 12
"""What takes memory: vectors of all parameters in float64, and what autograd keeps of a part of the data, over what the
closed form keeps of it."""


@dataclass(frozen=True)
class Check:
    """One object against one channel.

    ``error`` is ``|closed - channel| / size``, and ``tolerance`` what it was judged by.  As a rule ``size`` is
    ``|channel|`` and ``tolerance`` the one asked for, but nothing can be told more exactly than it is known:

    - Where the rounding of the two is beyond the tolerance, ``size`` is ``rounding / tolerance``: zeros, and what is
      left of larger terms that cancel, may differ by rounding.  If less than the default was asked for, this holds with
      the default, where rounding is beyond ``LOOSEST``: a closed form that is right, but not that exactly, fails.
    - Where the channel's doubt of itself is beyond it, ``tolerance`` is ``doubt / size``, up to ``LOOSEST``.  For that
      ``size`` is no less than ``doubt / LOOSEST``, if the channel sees the whole better than that: it can only tell
      that such a part is nothing beside the whole.  A channel that does not see the whole confirms nothing.
    """

    object: str
    channel: str
    error: float
    tolerance: float
    asymmetry: float | None = None

    @property
    def passed(self) -> bool:
        """Whether error and asymmetry are within the tolerance; NaN never is."""
        return self.error <= self.tolerance and (self.asymmetry is None or self.asymmetry <= self.tolerance)


class Object(NamedTuple):
    """What a row is about: its name, where it stands in the flat vector, and its asymmetry if it has one."""

    name: str
    places: list[slice]
    asymmetry: float | None = None


def verify_maps(seed: int = 0, tolerance: float = TOLERANCE[torch.float64]) -> Iterator[Check]:
    """Every registered map at its examples; of examples that differ in their arguments alone, the worst.

    First derivatives and curvature of ``y = f(x)`` are compared at once, by the Hessian of ``<c, f(x)>`` in
    ``x`` and ``c`` together: ``[[<c, D^2 f>, J^T], [J, 0]]``.  Its asymmetry is that of the curvature, and of
    ``J`` to ``J^T``.
    """
    rng = Generator().manual_seed(seed)
    for name, examples in maps(rng).items():
        runs = [list(_verify_map(name, *example, rng, tolerance)) for example in examples]
        for checks in zip(*runs, strict=True):
            yield max(checks, key=lambda check: (not check.passed, check.error / check.tolerance))


def maps(rng: Generator) -> dict[str, list[Example]]:
    """Every registered map by name, with the examples of it."""
    found: dict[str, list[Example]] = {}
    for cls in Component.registry.values():
        for f, arguments in cls.examples(rng):
            found.setdefault(repr(f), []).append((f, arguments))
    return found


def _verify_map(
    name: str, f: Component, arguments: Sequence[Tensor], rng: Generator, tolerance: float
) -> Iterator[Check]:
    y, kept = f.value(*arguments)
    needs = [True for _ in f.norms(kept).jacobian]
    m, c = len(needs), torch.randn(y.shape, generator=rng, dtype=y.dtype)
    shapes = [part.shape for part in (*arguments[:m], c)]

    point = _flat([part[None] for part in (*arguments[:m], c)])[0]
    n = len(point) - c.numel()
    tangents = _unflat(torch.eye(n).to(c), shapes[:m])
    cotangents = torch.eye(c.numel()).to(c).view(-1, *c.shape)

    def closed(moving: Collection[int]) -> Tensor:
        """The Hessian's share of the arguments in ``moving``: the others have no tangent, and are asked for none."""
        motion = [tangents[i] if i in moving else None for i in range(len(arguments))]
        matrix = c.new_zeros(len(point), len(point))
        matrix[:n, n:] = _flat([f.jvp(kept, motion)])
        matrix[n:, :n] = _flat(_filled(f.vjp(kept, cotangents, [i in moving for i in range(m)]), shapes, c))
        if f.kind:
            matrix[:n, :n] = _flat(_filled(f.curvature(kept, f.bend(kept, c), motion, needs), shapes[:m], c))
        return matrix

    alone, together = torch.stack([closed([i]) for i in range(m)]).sum(0), closed(range(m))

    def paired(z: Tensor) -> Tensor:
        *x, c = _unflat(z, shapes)
        return (f.value(*x, *arguments[m:])[0] * c).sum()

    directions = randn(rng, 2, len(point))
    whole = Object(name, [slice(None)], _asymmetry(alone))
    yield from _compare([paired], point, directions, exact(_both(alone, together), directions), [whole], tolerance)


def verify_grid(seed: int = 0, tolerance: float = TOLERANCE[torch.float64]) -> Iterator[Check]:
    """The small models of ``grid``, with random weights and data."""
    rng = Generator().manual_seed(seed)
    for name, spec in grid().items():
        graph, leaves = model(spec), draw(spec, name.endswith("padded"), rng)
        closed = Curvature(graph, leaves)
        blocks = [closed.block(closed.parameters, parameter) for parameter in closed.parameters]
        alone, together = torch.cat([block.dense() for block in blocks], 1), closed.dense()
        losses, x = _losses(graph, leaves, [Batch()])
        directions = randn(rng, 2, len(x))
        whole = Object(name, [slice(None)], _asymmetry(alone))
        known = exact(_both(alone.T, together.T), directions)
        yield from _compare(losses, x, directions, known, [whole], tolerance)


def _both(alone: Tensor, together: Tensor) -> Callable[[Tensor], Tensor]:
    """Products of directions by turns with two matrices that should be one.

    Where the tangent of an argument is missing, maps take other paths than where all move.
    """
    return lambda directions: torch.stack([v @ (alone, together)[i % 2] for i, v in enumerate(directions)])


def verify_model(
    graph: Graph,
    leaves: Mapping[str, Tensor],
    batches: Sequence[Batch] = (Batch(),),
    seed: int = 0,
    tolerance: float | None = None,
) -> Iterator[Check]:
    """``H u`` for a random direction ``u`` of all parameters: all its rows, then those of each part.

    ``graph``, ``leaves`` and ``batches`` are as for ``Curvature``; the tolerance is that of their dtype by default.
    The asymmetry is ``|u^T H w - w^T H u| / (|u| |H w| + |w| |H u|)`` for a second direction ``w``, or
    with the rounding of ``H`` in its place where that is more, as in ``Check``.
    """
    rng = Generator().manual_seed(seed)
    curvature = Curvature(graph, leaves, batches)
    size = sum(prod(shape) for shape in graph.parameters.values())
    point = curvature.part * (8 // curvature.loss.element_size())
    memory.check(8 * VECTORS * size + GRAPHS * point, f"verifying {size:,} parameters")
    losses, x = _losses(graph, leaves, batches)
    u, w = torch.randn(2, len(x), generator=rng).to(x)

    def product(directions: Tensor) -> Tensor:
        tangents = zip(graph.parameters, _unflat(directions.to(curvature.loss), graph.parameters.values()), strict=True)
        # The same parameter of all layers at a time: where a tangent is missing, maps take other paths.
        shares: dict[str, dict[str, Tensor]] = {}
        for name, tangent in tangents:
            shares.setdefault(sub(r"\d+", "", name), {})[name] = tangent
        total = torch.zeros_like(directions)
        for share in shares.values():
            total += _flat(curvature.hvp(share).values())
        return total

    closed = exact(product, torch.stack([u, w]))
    (hu, hw), (rounding_u, rounding_w), _ = closed
    default = TOLERANCE[curvature.loss.dtype]
    tolerance = default if tolerance is None else tolerance
    size = u.norm() * hw.norm() + w.norm() * hu.norm()
    rounding = u.norm() * rounding_w.norm() + w.norm() * rounding_u.norm()
    asymmetry = _ratio(abs(u @ hw - w @ hu), max(size, rounding / max(tolerance, default)))
    objects = [Object("model", [slice(None)], asymmetry)]
    objects += [Object(part, places) for part, places in parts(graph).items()]
    # Less of the rounding goes unseen in two directions than in one.
    seen = Products(closed.values[:1], closed.rounding.norm(dim=0, keepdim=True), closed.doubt[:1])
    yield from _compare(losses, x, u[None], seen, objects, tolerance, default)


def parts(graph: Graph) -> dict[str, list[slice]]:
    """Where the parameters of each embedding, norm, attention and FFN stand in the flat vector of all."""
    places: dict[str, list[slice]] = {}
    start = 0
    for name, shape in graph.parameters.items():
        stop = start + prod(shape)
        part = name.split(".")[:-1][:3]  # blocks.0.attn of blocks.0.attn.q.weight
        places.setdefault(".".join(part), []).append(slice(start, stop))
        start = stop
    return places


def count(graph: Graph | None = None) -> int:
    """How many checks there are: of a model or, without one, of the maps and the grid."""
    objects = 1 + len(parts(graph)) if graph else len(maps(Generator())) + len(grid())
    return len(CHANNELS) * objects


def _compare(
    terms: Sequence[Function],
    x: Tensor,
    directions: Tensor,
    closed: Products,
    objects: Sequence[Object],
    tolerance: float,
    default: float = TOLERANCE[torch.float64],
) -> Iterator[Check]:
    """``closed`` against ``H v`` from each channel, object by object; ``default`` is the tolerance of its dtype."""
    drowned, at_best = (tolerance, tolerance) if tolerance >= default else (LOOSEST, default)
    for channel in CHANNELS:
        other = channel(terms, x, directions)
        sees = bool(other.doubt.norm() <= LOOSEST * other.values.norm())
        for name, places, asymmetry in objects:

            def norm(t: Tensor, places: list[slice] = places) -> float:
                return float(torch.cat([t[:, place] for place in places], 1).norm())

            size, doubt, rounding = norm(other.values), norm(other.doubt), norm(closed.rounding + other.rounding)
            told = tolerance
            if rounding > drowned * size:
                size, told = rounding / at_best, at_best
            size = max(size, doubt / LOOSEST if sees else 0.0)
            told = max(told, min(_ratio(doubt, size), LOOSEST))
            yield Check(name, channel.__name__, _ratio(norm(closed.values - other.values), size), told, asymmetry)


def _ratio(error: float | Tensor, size: float | Tensor) -> float:
    """``error / size``, where nothing is no error of nothing."""
    return float(error / size) if size else inf if error else 0.0


def _asymmetry(matrix: Tensor) -> float:
    return _ratio((matrix - matrix.T).norm(), matrix.norm())


def _losses(graph: Graph, leaves: Mapping[str, Tensor], batches: Sequence[Batch]) -> tuple[list[Function], Tensor]:
    """Each batch's part of the loss as a function of all parameters in one vector, and that vector, in float64."""

    def loss(batch: Batch) -> Function:
        known = {**leaves, **batch.constants}
        exact = {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in known.items()}

        def of(x: Tensor) -> Tensor:
            weights = dict(zip(graph.parameters, _unflat(x, graph.parameters.values()), strict=True))
            return Point(graph, exact | weights).output * batch.share

        return of

    return [loss(batch) for batch in batches], torch.cat([leaves[name].double().flatten() for name in graph.parameters])


def _filled(tensors: Iterable[Tensor | None], shapes: Collection[tuple[int, ...]], like: Tensor) -> list[Tensor]:
    """Zeros in the place of what is missing, with the leading axis of the others."""
    found = list(tensors)
    k = max(len(tensor) for tensor in found if tensor is not None)
    pairs = zip(found, shapes, strict=False)
    return [like.new_zeros(k, *shape) if tensor is None else tensor for tensor, shape in pairs]


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """Tensors ``(k, *shape)`` side by side as ``(k, n)``."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors if tensor is not None], 1)


def _unflat(vectors: Tensor, shapes: Collection[tuple[int, ...]]) -> list[Tensor]:
    """Vectors ``(..., n)`` as tensors ``(..., *shape)``."""
    pieces = vectors.split([prod(shape) for shape in shapes], -1)
    return [piece.reshape((*vectors.shape[:-1], *shape)) for piece, shape in zip(pieces, shapes, strict=True)]
