"""The door for library users: gradient, Hessian-vector products, blocks and their causes at one point.

>>> import torch
>>> from hesscore.components.product import Product
>>> from hesscore.components.squared_error import SquaredError
>>> from hesscore.graph import Graph
>>> g = Graph()
>>> y = g.apply("y", Product("bd,de->be"), g.constant("x"), g.parameter("W", (1, 1)))
>>> _ = g.apply("loss", SquaredError(), y, g.constant("target"), g.constant("weights"))
>>> one = torch.ones(1, 1)
>>> c = Curvature(g, {"W": 2 * one, "x": 3 * one, "target": one, "weights": one[0]})
>>> float(c.loss), float(c.gradient["W"]), float(c.dense()[0, 0])       # (3w - 1)^2 at w = 2
(25.0, 30.0, 18.0)
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hesscore import chain, memory
from hesscore.checks import check_constants, check_parameters, check_tensor
from hesscore.errors import UsageError
from hesscore.graph import Graph, Node
from hesscore.interop import linear_operator

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

Names = str | Iterable[str]
"""One parameter or several."""

Terms = Callable[[Node], bool]
"""Which nodes of identity (1) to sum over."""

CACHED_ELEMENTS = 2**18
"""Elements of the largest array of a part of the data: 2 MiB in float64."""

SWEPT_ELEMENTS = 2**20
"""Elements of the largest array that a product of several tangents should pass over: fewer leave overhead."""

MOVED_BYTES = 2**28
"""Bytes that all arrays of a product together should take: a deep model has many."""


def outer(node: Node) -> bool:
    """The Gauss-Newton (outer) term: the curvature of the loss alone."""
    return node.kind == "loss"


def inner(node: Node) -> bool:
    """The functional terms: the curvature of every map but the loss."""
    return node.kind != "loss"


class Batch(NamedTuple):
    """A part of the data: its share of the mean loss, and the constants of the graph that are its own."""

    share: float = 1.0
    constants: Mapping[str, Tensor] = {}


class Curvature:
    """Loss, gradient and Hessian of ``graph`` at ``leaves`` (parameters and constants by name).

    With ``batches``, everything is of the mean ``sum_j share_j loss_j`` over them; parts that fit the processor's cache
    are faster than one large batch.  Tangents and products are mappings from parameter name to a tensor of the
    parameter's shape, or of that shape behind one leading axis ``k`` for several at once.

    Products are computed in the dtype of the parameters, the point and the gradient always in float64: float32 alone
    would lose digits where attention saturates.
    """

    def __init__(self, graph: Graph, leaves: Mapping[str, Tensor], batches: Sequence[Batch] = (Batch(),)) -> None:
        check_parameters(graph, leaves)
        check_constants(graph, leaves, [batch.constants for batch in batches])
        self.graph = graph
        # A copy, because what is kept of the point belongs to these weights: an optimizer may move its own.
        self.leaves = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        self._batches = batches
        self._pool = pool(len(batches))
        parameters = {name: self.leaves[name] for name in graph.parameters}
        exact = _double(self.leaves)

        def prepare(part: Batch) -> tuple[chain.Point, chain.Bundle]:
            """The point of a part, ready for products, and its share of the gradient."""
            point = chain.Point(graph, {**exact, **_double(part.constants)}, part.share)
            return point, point.bend(parameters)

        first = prepare(batches[0])
        self.part = first[0].nbytes
        """Bytes kept of a part of the data; none is larger than the first."""
        count = sum(leaf.numel() for leaf in parameters.values())
        need = memory.working(count, len(batches), self.part, next(iter(parameters.values())).dtype)
        memory.check(need, "1 part of the data" if len(batches) == 1 else f"{len(batches)} parts of the data")
        self.points: list[chain.Point] = []
        total: chain.Bundle = {}
        for point, gradient in itertools.chain([first], self._pool.map(prepare, batches[1:])):
            self.points.append(point)
            _add(total, gradient)
        loss = torch.stack([point.output * point.share for point in self.points]).sum()
        self.loss = loss.to(next(iter(parameters.values())))
        self.gradient = {
            name: total[i][0].to(leaf) if (i := graph.index[name]) in total else torch.zeros_like(leaf)
            for name, leaf in parameters.items()
        }

    @property
    def parameters(self) -> list[str]:
        return list(self.graph.parameters)

    def loss_again(self) -> Tensor:
        """The loss, computed once more in the same way: the same to the last bit where all is deterministic."""
        exact = _double(self.leaves)

        def loss(part: Batch) -> Tensor:
            return chain.Point(self.graph, {**exact, **_double(part.constants)}).output * part.share

        first, *rest = self._batches
        return torch.stack([loss(first), *self._pool.map(loss, rest)]).sum().to(self.loss)

    def hvp(
        self, tangent: Mapping[str, Tensor], rows: Names | None = None, terms: Terms | None = None
    ) -> dict[str, Tensor]:
        """``(H v)[rows]`` for a ``v`` that is zero outside the blocks in ``tangent``; by default every row.

        ``terms`` restricts the sum (1) to the nodes for which it is true.
        """
        rows = self.parameters if rows is None else self._names(rows)
        seeds, single = self._seeds(tangent)
        wanted, curved = self.graph.positions(rows), self.curved(terms)
        bundle = self._total(lambda point: chain.product(point, seeds, wanted, curved))
        k = len(next(iter(seeds.values())))
        products = {}
        for name in rows:
            product = bundle.get(self.graph.index[name])
            if product is None:
                product = self.leaves[name].new_zeros(k, *self.leaves[name].shape)
            products[name] = product[0] if single else product
        return products

    def gauss_newton(self, tangent: Mapping[str, Tensor], rows: Names | None = None) -> dict[str, Tensor]:
        """The outer part of ``hvp``: ``J^T (d^2 loss / d output^2) J v``."""
        return self.hvp(tangent, rows, outer)

    def functional(self, tangent: Mapping[str, Tensor], rows: Names | None = None) -> dict[str, Tensor]:
        """The rest of ``hvp``: what the maps before the loss cause."""
        return self.hvp(tangent, rows, inner)

    def attribution(self, tangent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``v^T H v`` split over the maps that cause it, by node name; the parts add up to the whole."""
        seeds, single = self._seeds(tangent)
        parts = self._total(lambda point: chain.attribution(point, seeds, self.graph.curved))
        return {self.graph.nodes[i].name: part[0] if single else part for i, part in sorted(parts.items())}

    def block(self, rows: Names, columns: Names | None = None, terms: Terms | None = None) -> Block:
        """The block ``H[rows, columns]`` as an operator on flat vectors; ``columns`` defaults to ``rows``."""
        rows = self._names(rows)
        return Block(self, rows, rows if columns is None else self._names(columns), terms)

    def dense(self, names: Names | None = None, terms: Terms | None = None) -> Tensor:
        """The Hessian by the parameters in ``names`` (all by default) as one matrix; see ``Block.dense``."""
        return self.block(self.parameters if names is None else names, terms=terms).dense()

    def _total(self, sweep: Callable[[chain.Point], chain.Bundle]) -> chain.Bundle:
        """The sum of ``sweep`` over the points, always in their order: threads do not change a digit."""
        total: chain.Bundle = {}
        for bundle in self._pool.map(sweep, self.points):
            _add(total, bundle)
        return total

    def _seeds(self, tangent: Mapping[str, Tensor]) -> tuple[chain.Bundle, bool]:
        """The tangents by position, all with their axis ``k``, and whether that axis was added here."""
        self._names(tangent)
        for name, v in tangent.items():
            check_tensor(v, f"the tangent of {name}")
        single = all(v.ndim == self.leaves[name].ndim for name, v in tangent.items())
        seeds = {name: v[None] if single else v for name, v in tangent.items()}
        k = len(next(iter(seeds.values())))
        for name, v in seeds.items():
            shape, dtype = self.leaves[name].shape, self.loss.dtype
            if v.shape != (k, *shape) or v.dtype != dtype:
                wanted = f"{tuple(shape)} or (k, *{tuple(shape)}), with one k for all, in {dtype}"
                raise UsageError(f"the tangent of {name} is {tuple(tangent[name].shape)} in {v.dtype}, not {wanted}")
        return {self.graph.index[name]: v for name, v in seeds.items()}, single

    def _names(self, names: Names) -> tuple[str, ...]:
        """Refuse what names no parameter: a graph has other nodes too, whose derivatives are not asked for here."""
        names = (names,) if isinstance(names, str) else tuple(names)
        known = self.graph.parameters
        unknown = [name for name in names if name not in known]
        if len(set(names)) < len(names):
            raise UsageError("a parameter is named twice")
        if not names:
            raise UsageError("no parameter is named at all")
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), known, 1, 0)
            raise UsageError(f"no parameter is named {unknown[0]}, did you mean {near[0]}?")
        return names

    def curved(self, terms: Terms | None) -> Set[int]:
        """The nodes that identity (1) is summed over."""
        curved = self.graph.curved
        return curved if terms is None else {i for i in curved if terms(self.graph.nodes[i])}


def _double(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in leaves.items()}


def _add(total: chain.Bundle, bundle: chain.Bundle) -> None:
    for i, part in bundle.items():
        total[i] = total[i] + part if i in total else part


def pool(parts: int) -> ThreadPoolExecutor:
    """One thread a part, up to torch's number, each with its fair share of them.

    Most operations are too small to be split over threads; parts of the data are not.
    """
    workers = memory.threads(parts)
    return ThreadPoolExecutor(workers, "hess", torch.set_num_threads, (torch.get_num_threads() // workers,))


@dataclass(frozen=True)
class Block:
    """``H[rows, columns]`` on flat vectors: parameters in the order given, each flattened row by row."""

    owner: Curvature
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    terms: Terms | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self._size(self.rows), self._size(self.columns)

    def _size(self, names: Sequence[str]) -> int:
        return sum(self.owner.leaves[name].numel() for name in names)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Product with ``(n,)`` or, many at once, ``(n, k)``."""
        check_tensor(vectors, "what a block is applied to")
        if vectors.ndim not in (1, 2) or len(vectors) != self.shape[1]:
            raise UsageError(
                f"a block of {self.shape} takes ({self.shape[1]},) or ({self.shape[1]}, k), not {tuple(vectors.shape)}"
            )
        many = vectors if vectors.ndim == 2 else vectors[:, None]
        out = self.owner.hvp(self.unflatten(many), self.rows, self.terms)
        flat = torch.cat([out[name].flatten(1) for name in self.rows], 1).T
        return flat if vectors.ndim == 2 else flat[:, 0]

    def attribution(self, vectors: Tensor) -> dict[str, Tensor]:
        """What causes ``v^T H v`` for each column of ``(n, k)``, of a block on the diagonal: ``(k,)`` by node."""
        parts = [self.owner.attribution(self.unflatten(some)) for some in vectors.split(self.at_once, 1)]
        return {node: torch.cat([part[node] for part in parts]) for node in parts[0]}

    def unflatten(self, vectors: Tensor) -> dict[str, Tensor]:
        """Columns of ``(n, k)`` as tangents by name."""
        shapes = {name: self.owner.leaves[name].shape for name in self.columns}
        parts = vectors.T.split([prod(shape) for shape in shapes.values()], 1)
        return {name: part.reshape(-1, *shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    @property
    def at_once(self) -> int:
        """How many tangents a product should carry: as many as keep its widest array within the cache."""
        widest = max(point.widest for point in self.owner.points)
        return max(1, min(SWEPT_ELEMENTS // widest, MOVED_BYTES // max(1, self.owner.part)))

    def to_scipy(self) -> LinearOperator:
        """The block for SciPy's solvers, such as ``eigsh``; products go to numpy and back."""
        transposed = Block(self.owner, self.columns, self.rows, self.terms)
        return linear_operator(self.shape, self.owner.loss.dtype, self.__matmul__, transposed.__matmul__)

    def dense(self) -> Tensor:
        """The block as a matrix.  Its size is logged before it is formed, and refused beyond the free memory.

        It costs as many tangents as its shorter side is long.
        """
        n, m = self.shape
        memory.check(n * m * self.owner.loss.element_size(), f"a dense block of {n} x {m}")
        return self._swept() if n >= m else Block(self.owner, self.columns, self.rows, self.terms)._swept().T

    def _swept(self) -> Tensor:
        (n, m), like = self.shape, self.owner.loss
        matrix = like.new_empty(n, m)
        for columns in torch.arange(m).split(self.at_once):
            basis = like.new_zeros(m, len(columns))
            basis[columns, torch.arange(len(columns))] = 1
            matrix[:, columns] = self @ basis
        return matrix
