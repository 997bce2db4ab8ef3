"""The closed forms against three channels that know nothing of them.

Each channel differentiates plain values, in float64 whatever the closed form is computed in:

- ``autograd``: reverse over reverse, ``torch.autograd.grad`` of ``torch.autograd.grad``;
- ``jacfwd``: forward over reverse, those columns of ``jacfwd(grad(f))`` that are asked for;
- ``differences``: 5-point central differences of autograd's gradient.

``torch.func.hessian`` and ``jacrev`` of ``jacrev`` are not among them: both are silently wrong on an affine
``F.layer_norm``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, product
from math import inf, nan, prod
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

import hesscore.components  # noqa: F401  (registers every map)
from hesscore.chain import Point
from hesscore.component import Component, Example, randn
from hesscore.components.activation import ACTIVATIONS
from hesscore.curvature import Batch, Curvature
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.model import inputs, model, parameters

Function = Callable[[Tensor], Tensor]
"""A scalar function of one flat vector."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""The default, by the dtype of the closed form."""

# The grid's axes: options by name, with the fields of a spec that they set.  The last is not one of the spec.
AXES: tuple[dict[str, dict[str, Any]], ...] = (
    {name: {"placement": name} for name in BLOCKS},
    {name: {"norm": name} for name in ("layernorm", "rmsnorm")},
    {name: {"activation": name} for name in ACTIVATIONS},
    {"": {}, "gated": {"gated": True}},
    {"": {}, "bidirectional": {"causal": False}},
    {"": {}, "no biases": {"bias": False}},
    {"": {}, "learned": {"positions": "learned"}, "rotary": {"positions": "rotary"}},
    {"": {}, "2 heads": {"heads": 2}, "2/1 heads": {"heads": 2, "kv_heads": 1}},
    {"": {}, "2 layers": {"layers": 2}, "4 layers": {"layers": 4}},
    {"": {}, "tied": {"tied": True}, "squared error": {"vocab": None}},
    {"": {}, "padded": {}},
)


@dataclass(frozen=True)
class Check:
    """One object against one channel.

    ``error`` is ``|closed - channel| / |channel|``.  ``tolerance`` is the one asked for or, where that is more, twice
    what the channel says of its own error, up to 1e-3: one that can tell no better confirms nothing.
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


def autograd(terms: Sequence[Function], x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """``H v`` of the sum of ``terms`` for ``directions (k, n)``, as ``(k, n)``, and its own error: none known."""
    x = x.clone().requires_grad_()
    products = torch.zeros_like(directions)
    for f in terms:
        (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
        products += torch.stack([torch.autograd.grad(gradient, x, v, retain_graph=True)[0] for v in directions])
    return products, torch.zeros_like(products)


def jacfwd(terms: Sequence[Function], x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """As ``autograd``, forward over reverse."""
    products = torch.zeros_like(directions)
    for f in terms:
        products += torch.stack([torch.func.jvp(torch.func.grad(f), (x,), (v,))[1] for v in directions])
    return products, torch.zeros_like(products)


def differences(terms: Sequence[Function], x: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """As ``autograd``, by ``(8 (g(h) - g(-h)) - (g(2h) - g(-2h))) / 12h`` of the gradient ``g``.

    Large steps truncate (or cross kinks) and small ones round.  So the step is halved, at most 28 times, until
    results that agreed to 1e-8 agree no better.  The two that agreed best give the result and, by their difference
    and the rounding of ``g``, its error.
    """
    size = directions.norm(dim=1, keepdim=True)

    def gradient(at: Tensor) -> Tensor:
        at.requires_grad_()
        return torch.stack([torch.autograd.grad(f(at), at)[0] for f in terms]).sum(0)

    def slope(h: float) -> Tensor:
        steps = h * directions / size
        return torch.stack([(gradient(x + s) - gradient(x - s)) / (2 * h) for s in steps]) * size

    rounding = torch.finfo(x.dtype).eps * gradient(x.clone()).abs() * size

    def stencils(h: float) -> Iterator[tuple[Tensor, Tensor]]:
        wide = slope(2 * h)
        while True:
            narrow = slope(h)
            yield (4 * narrow - wide) / 3, rounding / h
            wide, h = narrow, h / 2

    best = doubt = torch.full_like(directions, nan)
    closest = inf
    for (coarse, _), (fine, rounded) in pairwise(islice(stencils(float(x.norm()) / 64), 28)):
        unsure = (fine - coarse).abs() + rounded
        gap = float(unsure.norm())
        if gap < closest:
            best, doubt, closest = fine, unsure, gap
        elif closest <= 1e-8 * float(fine.norm()):
            break
    return best, doubt


CHANNELS = (autograd, jacfwd, differences)


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
    closed = c.new_zeros(len(point), len(point))
    closed[:n, n:] = _flat([f.jvp(kept, tangents)])
    closed[n:, :n] = _flat(f.vjp(kept, cotangents, needs))
    if f.kind:
        closed[:n, :n] = _flat(f.curvature(kept, f.bend(kept, c), tangents, needs))

    def paired(z: Tensor) -> Tensor:
        *x, c = _unflat(z, shapes)
        return (f.value(*x, *arguments[m:])[0] * c).sum()

    directions = randn(rng, 2, len(point))
    whole = Object(name, [slice(None)], _asymmetry(closed))
    yield from _compare([paired], point, directions, directions @ closed, [whole], tolerance)


def verify_grid(seed: int = 0, tolerance: float = TOLERANCE[torch.float64]) -> Iterator[Check]:
    """The small models of ``grid``, with random weights and data."""
    rng = Generator().manual_seed(seed)
    for name, spec in grid().items():
        graph, leaves = model(spec), _draw(spec, name.endswith("padded"), rng)
        closed = Curvature(graph, leaves).dense()
        losses, x = _losses(graph, leaves, [Batch()])
        directions = randn(rng, 2, len(x))
        whole = Object(name, [slice(None)], _asymmetry(closed))
        yield from _compare(losses, x, directions, directions @ closed.T, [whole], tolerance)


def grid() -> dict[str, Spec]:
    """Small models by name, in which every two options of different axes that fit together meet."""
    rng = random.Random(0)
    options = [[(i, option) for option in axis] for i, axis in enumerate(AXES)]
    pairs = {pair for a, b in combinations(options, 2) for pair in product(a, b)}
    unmet = {pair for pair in pairs if _spec(dict(pair))}
    specs = {}
    while unmet:
        seed = dict(min(unmet))
        drawn = [dict(map(rng.choice, options)) | seed for _ in range(50)]
        fitting = {tuple(sorted(choice.items())): spec for choice in drawn if (spec := _spec(choice))}
        best = max(fitting, key=lambda choice: len(unmet.intersection(combinations(choice, 2))))
        unmet.difference_update(combinations(best, 2))
        specs[" ".join(option for _, option in best if option)] = fitting[best]
    return specs


def _spec(choice: Mapping[int, str]) -> Spec | None:
    """The spec with these options by axis, and with the first of every other; ``None`` if they do not fit."""
    fields: dict[str, Any] = {"d_model": 4, "d_ff": 3, "seq_len": 3, "batch": 2, "vocab": 5}
    for axis, option in choice.items():
        fields |= AXES[axis][option]
    try:
        return Spec(**fields)
    except ValueError:
        return None


def _draw(spec: Spec, padded: bool, rng: Generator) -> dict[str, Tensor]:
    """Leaves off their initial values: every gain and every bias is its own."""
    shape = spec.batch, spec.seq_len
    if spec.vocab:
        data, target = (torch.randint(spec.vocab, shape, generator=rng) for _ in range(2))
    else:
        data, target = (randn(rng, *shape, spec.d_model) for _ in range(2))
    keep = torch.ones(shape, dtype=torch.bool)
    keep[0, -1] = not padded
    weights = {name: value + 0.3 * randn(rng, *value.shape) for name, value in parameters(spec).items()}
    return inputs(spec, data, target, keep) | weights


def verify_model(
    graph: Graph,
    leaves: Mapping[str, Tensor],
    batches: Sequence[Batch] = (Batch(),),
    seed: int = 0,
    tolerance: float | None = None,
) -> Iterator[Check]:
    """``H u`` for a random direction ``u`` of all parameters: all its rows, then those of each part.

    ``graph``, ``leaves`` and ``batches`` are as for ``Curvature``; the tolerance is that of their dtype by default.
    The asymmetry is ``|u^T H w - w^T H u| / (|u| |H w| + |w| |H u|)`` for a second direction ``w``.
    """
    rng = Generator().manual_seed(seed)
    curvature = Curvature(graph, leaves, batches)
    losses, x = _losses(graph, leaves, batches)
    u, w = directions = torch.randn(2, len(x), generator=rng).to(x)
    tangents = _unflat(directions.to(curvature.loss), graph.parameters.values())
    # Every third parameter at a time: where a tangent is missing, maps take other paths.
    hu, hw = closed = torch.zeros_like(directions)
    for i in range(min(3, len(tangents))):
        third = dict(list(zip(graph.parameters, tangents, strict=True))[i::3])
        closed += _flat(curvature.hvp(third).values())
    asymmetry = abs(u @ hw - w @ hu) / (u.norm() * hw.norm() + w.norm() * hu.norm())
    tolerance = TOLERANCE[curvature.loss.dtype] if tolerance is None else tolerance
    objects = [Object("model", [slice(None)], float(asymmetry))]
    objects += [Object(part, places) for part, places in parts(graph).items()]
    yield from _compare(losses, x, u[None], hu[None], objects, tolerance)


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
    closed: Tensor,
    objects: Sequence[Object],
    tolerance: float,
) -> Iterator[Check]:
    """``closed (k, n)`` against ``H v`` from each channel, object by object."""
    for channel in CHANNELS:
        other, doubt = channel(terms, x, directions)
        for name, places, asymmetry in objects:
            ours, theirs, unsure = (torch.cat([t[:, s] for s in places], 1) for t in (closed, other, doubt))
            error, known = _relative(ours - theirs, theirs), 2 * _relative(unsure, theirs)
            yield Check(name, channel.__name__, error, max(tolerance, min(known, 1e-3)), asymmetry)


def _relative(difference: Tensor, reference: Tensor) -> float:
    error, size = float(difference.norm()), float(reference.norm())
    return error / size if size else inf if error else 0.0


def _asymmetry(matrix: Tensor) -> float:
    return _relative(matrix - matrix.T, matrix)


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


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """Tensors ``(k, *shape)`` side by side as ``(k, n)``."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors if tensor is not None], 1)


def _unflat(vectors: Tensor, shapes: Collection[tuple[int, ...]]) -> list[Tensor]:
    """Vectors ``(..., n)`` as tensors ``(..., *shape)``."""
    pieces = vectors.split([prod(shape) for shape in shapes], -1)
    return [piece.reshape((*vectors.shape[:-1], *shape)) for piece, shape in zip(pieces, shapes, strict=True)]
