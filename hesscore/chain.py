"""The chain rule, written once.

For a graph of maps ``y_i = f_i(args)`` that ends in the loss, with ``P_i = d args_i / d theta`` and
``delta_i = d loss / d y_i``,

    H = sum_i  P_i^T  < delta_i , D^2 f_i >  P_i                                        (1)

``tangents`` computes every ``P_i v`` in one sweep forwards; ``cotangents`` applies every ``P_i^T`` in one sweep
backwards.  A Hessian-vector product is one of each, whatever the depth; leaving terms of the sum out gives the
Gauss-Newton part, the functional part, or the part that one map causes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hesscore.component import Cotangents
from hesscore.graph import Graph

Bundle = dict[int, Tensor]
"""Tangents or cotangents by node, each ``(k, *shape of the node)``; a missing node is zero."""


class Point:
    """A graph at given leaves: the value, and all that the sweeps reuse (``kept`` and, after ``bend``, ``bent``).

    ``watch`` names nodes whose values stay at hand in ``watched``; all others are let go after their last use.
    ``share`` is the weight of this output in a mean over several points: every derivative below carries it.
    """

    def __init__(
        self, graph: Graph, leaves: Mapping[str, Tensor], share: float = 1.0, watch: Set[str] = frozenset()
    ) -> None:
        self.graph = graph
        self.share = share
        self.widest = 0
        self.leaves = leaves
        self.kept: list[Any] = []
        self.bent: dict[int, Any] = {}
        self.watched: dict[str, Tensor] = {}
        last_use = {source: i for i, node in enumerate(graph.nodes) for source in node.sources}
        values: Bundle = {}
        for i, node in enumerate(graph.nodes):
            if node.component is None:
                values[i], kept = leaves[node.name], None
            else:
                values[i], kept = node.component.value(*(values[source] for source in node.sources))
            self.kept.append(kept)
            self.widest = max(self.widest, values[i].numel())
            if node.name in watch:
                self.watched[node.name] = values[i]
            for source in set(node.sources):
                if last_use[source] == i:
                    del values[source]
        self.output = values[len(graph.nodes) - 1]

    @property
    def nbytes(self) -> int:
        """Bytes that stay occupied for the products, leaves aside."""
        sizes: dict[int, int] = {}

        def count(kept: Any) -> None:
            if isinstance(kept, Tensor):
                storage = kept.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            elif isinstance(kept, tuple):
                for part in kept:
                    count(part)

        count((*self.kept, *self.bent.values()))
        leaves = {leaf.untyped_storage().data_ptr() for leaf in self.leaves.values()}
        return sum(size for address, size in sizes.items() if address not in leaves)

    def gradient(self, wanted: Set[int]) -> Bundle:
        """``share * d output / d leaf`` for the leaves in ``wanted``, each with a leading axis of one."""
        return cotangents(self, wanted, seed=self.output.new_full((1,), self.share))

    def bend(self, leaves: Mapping[str, Tensor]) -> Bundle:
        """The gradient by every parameter; afterwards the point is ready for products, in the dtype of ``leaves``.

        They stand in for its own leaves.  What is kept is rounded as soon as the sweep has passed it: both whole would
        take too much memory.  Products then take the time and memory of that dtype, but have no more of its rounding
        than their own.
        """
        rounded = WeakIdKeyDictionary({self.leaves[name]: leaf for name, leaf in leaves.items()})
        dtype = next(iter(leaves.values())).dtype

        def cast(kept: Any) -> Any:
            if isinstance(kept, tuple):
                return tuple(map(cast, kept))
            if not isinstance(kept, Tensor) or not kept.is_floating_point():
                return kept
            if kept not in rounded:  # several nodes may keep one array
                rounded[kept] = kept.to(dtype)
            return rounded[kept]

        def settle(i: int, delta: Tensor) -> None:
            component = self.graph.nodes[i].component
            if component and component.kind:
                self.bent[i] = cast(component.bend(self.kept[i], delta))
            self.kept[i] = cast(self.kept[i])

        seed = self.output.new_full((1,), self.share)
        gradient = cotangents(self, self.graph.parameter_positions, seed=seed, passed=settle)
        self.kept = [cast(kept) for kept in self.kept]
        self.leaves = {name: cast(leaf) for name, leaf in self.leaves.items()}
        return gradient


def product(point: Point, seeds: Bundle, wanted: Set[int], curved: Set[int]) -> Bundle:
    """The sum (1) over the nodes in ``curved``, applied to the tangents ``seeds`` and read at ``wanted``.

    Both may be leaves, or nodes between: then it is the Hessian by their values, as if nothing came before them.
    """
    moved = tangents(point, seeds, point.graph.sources(curved & point.graph.downstream(wanted)))
    return cotangents(point, wanted, moved=moved, curved=curved)


def attribution(point: Point, seeds: Bundle, curved: Set[int]) -> Bundle:
    """``v^T < delta_i, D^2 f_i > v`` for each node in ``curved``, ``(k,)`` each: they add up to ``v^T H v``.

    The forward sweep alone is enough.
    """
    moved = tangents(point, seeds, point.graph.sources(curved))
    caused: Bundle = {}
    for i in sorted(curved):
        node = point.graph.nodes[i]
        motion = [moved.get(source) for source in node.sources]
        needs = [tangent is not None for tangent in motion]
        if node.component and any(needs):
            bent = node.component.curvature(point.kept[i], point.bent[i], motion, needs)
            for tangent, part in zip(motion, bent, strict=False):
                if tangent is not None and part is not None:
                    parts = (tangent * part).flatten(1).sum(1)
                    caused[i] = caused[i] + parts if i in caused else parts
    return caused


def tangents(point: Point, seeds: Bundle, targets: Set[int]) -> Bundle:
    """Push the tangents ``seeds`` of some nodes forwards to the nodes in ``targets``: every ``P_i v``.

    Only nodes between the two are visited.
    """
    graph = point.graph
    moved = dict(seeds)
    for i in sorted(graph.downstream(seeds.keys()) & graph.upstream(targets) - seeds.keys()):
        component = graph.nodes[i].component
        assert component is not None
        moved[i] = component.jvp(point.kept[i], [moved.get(source) for source in graph.nodes[i].sources])
    return moved


def cotangents(
    point: Point,
    wanted: Set[int],
    seed: Tensor | None = None,
    moved: Bundle | None = None,
    curved: Set[int] = frozenset(),
    passed: Callable[[int, Tensor], None] | None = None,
) -> Bundle:
    """Pull cotangents back to the nodes in ``wanted``, visiting only nodes that depend on one of these.

    They start from ``seed`` at the output, and from ``< delta_i, D^2 f_i > P_i v`` at each node of ``curved``, where
    ``moved`` holds the tangents ``P_i v``.  ``passed`` is called with each node that is done and the first cotangent
    that arrived there.
    """
    graph = point.graph
    live = graph.downstream(wanted)
    arrived: Bundle = {} if seed is None else {len(graph.nodes) - 1: seed}

    for i in sorted(live, reverse=True):
        node, kept = graph.nodes[i], point.kept[i]
        needs = [source in live for source in node.sources]
        if node.component is None or not any(needs):
            continue
        motion = [moved.get(source) for source in node.sources] if moved and i in curved else []
        cotangent = arrived.get(i) if i in wanted else arrived.pop(i, None)
        parts: Cotangents = ()
        if any(tangent is not None for tangent in motion):
            if cotangent is None:
                parts = node.component.curvature(kept, point.bent[i], motion, needs)
            else:
                parts = node.component.pull(kept, cotangent, point.bent[i], motion, needs)
        elif cotangent is not None:
            parts = node.component.vjp(kept, cotangent, needs)
            if passed:
                passed(i, cotangent[0])
        for source, part in zip(node.sources, parts, strict=False):
            if part is not None:
                arrived[source] = arrived[source] + part if source in arrived else part
    return arrived
