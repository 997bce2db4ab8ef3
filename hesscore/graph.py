"""A model as a graph of maps: the structure alone, without values and without derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from hesscore.component import Component


@dataclass(frozen=True)
class Node:
    """A leaf (no component) or a map applied to earlier nodes, given by their positions."""

    name: str
    component: Component | None = None
    sources: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    """The declared shape of a parameter; ``None`` for constants and maps."""

    @property
    def kind(self) -> str | None:
        """What the node's curvature is booked under: one of ``component.KINDS``, or ``None`` if it has none."""
        return self.component.kind if self.component else None


class Graph:
    """Nodes in topological order.  The last one is the output; a leaf used twice is a shared weight.

    ``owner`` gives the name of the leaf that stands for a parameter: parts of a model that share their weights are
    built alike.
    """

    def __init__(self, owner: Callable[[str], str] = lambda name: name) -> None:
        self.owner = owner
        self.nodes: list[Node] = []
        self.index: dict[str, int] = {}
        self.parameters: dict[str, tuple[int, ...]] = {}
        """Name and shape of every parameter, in the order of the graph."""

        self.curved: set[int] = set()
        """The nodes with curvature of their own: the terms of identity (1)."""

    def parameter(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the position of a leaf that has derivatives, adding it unless it is there under its owner's name."""
        owner = self.owner(name)
        if owner != name and self.parameters.get(owner) == shape:
            return self.index[owner]
        return self._append(Node(owner, shape=shape))

    def constant(self, name: str) -> int:
        """Return the position of a leaf that never moves (ids, masks, targets), adding it at its first use."""
        return self.index[name] if name in self.index else self._append(Node(name))

    def apply(self, name: str, component: Component, *sources: int) -> int:
        """Add ``component`` applied to the nodes at ``sources`` and return its position."""
        return self._append(Node(name, component, sources))

    def _append(self, node: Node) -> int:
        if node.name in self.index:
            raise ValueError(f"two nodes are named {node.name}")
        position = self.index[node.name] = len(self.nodes)
        self.nodes.append(node)
        if node.shape is not None:
            self.parameters[node.name] = node.shape
        if node.kind:
            self.curved.add(position)
        return position

    @property
    def parameter_positions(self) -> frozenset[int]:
        return frozenset(self.positions(self.parameters))

    @property
    def constants(self) -> list[str]:
        return [node.name for node in self.nodes if node.component is None and node.shape is None]

    def downstream(self, roots: Set[int]) -> set[int]:
        """The nodes that depend on one of ``roots``, these included."""
        reached = set(roots)
        for i, node in enumerate(self.nodes):
            if not reached.isdisjoint(node.sources):
                reached.add(i)
        return reached

    def upstream(self, targets: Set[int]) -> set[int]:
        """The nodes that one of ``targets`` depends on, these included."""
        reached = set(targets)
        for i in range(len(self.nodes) - 1, -1, -1):
            if i in reached:
                reached.update(self.nodes[i].sources)
        return reached

    def sources(self, nodes: Iterable[int]) -> set[int]:
        """The arguments of ``nodes``."""
        return {source for i in nodes for source in self.nodes[i].sources}

    def positions(self, names: Iterable[str]) -> set[int]:
        return {self.index[name] for name in names}
