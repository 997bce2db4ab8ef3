"""What a block is made of, to its derivatives: the pieces in which a weight acts on each token alone.

After the attention output every token goes its own way.  So what a weight does to the loss passes, token by token,
through one node, its *entry*, and its gradient is ``sum_n phi_n (x) delta_n``:

| weight | entry | feature ``phi`` | output index, with gradient ``delta`` |
|---|---|---|---|
| Q, O, FFN | the weight's own output | its input ``x_n``, and 1 for the bias | that of the entry |
| V, per head | the mixed values | ``E_n[x]`` under the attention row of the token | that of the entry |
| K, per head | the scores | the query ``q_n``, at W_K's output index | W_K's input index, through ``x_j / sqrt(d_k)`` |

Gains and shifts, and keys that are rotated, have no such form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from hesscore.chain import Point
from hesscore.errors import UsageError
from hesscore.explicit.kronecker import Place
from hesscore.graph import Graph
from hesscore.spec import Spec

TokenMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """A weight with its bias, or the part of it that belongs to one head."""

    names: Collection[str]
    place: Place
    entry: int
    features: Tensor
    """``phi (N, p)``"""
    seeds: Tensor
    """How each output moves the entry: tangents ``(m, *shape of the entry)``."""
    read: TokenMap
    """``delta (N, m, k)`` from cotangents ``(k, *shape of the entry)``."""
    source: int
    """The node that the features move with."""
    turn: TokenMap
    """``d phi (N, p, k)`` from tangents ``(k, *shape of the source)``."""

    @property
    def crossed(self) -> Place:
        """The same entries, with ``delta`` as the feature."""
        return Place(self.place.start, self.place.outputs, self.place.features)


class Pieces:
    """Those of ``blocks.0`` in a graph, or of the ``parts`` that are named, and where each stands in one vector."""

    def __init__(self, graph: Graph, spec: Spec, parts: Collection[str] | None = None) -> None:
        self.graph, self.spec = graph, spec
        self.start: dict[str, int] = {}
        self.size = 0
        own = {name: part_of(name) for name in graph.parameters if name.startswith("blocks.0.")}
        if unknown := set(parts or ()) - set(own.values()):
            raise UsageError(f"no part of the block with parameters is named {min(unknown)}")
        for name, part in own.items():
            if parts is None or part in parts:
                self.start[name] = self.size
                self.size += prod(graph.parameters[name])

    @property
    def others(self) -> list[str]:
        """The parameters that have no token-wise form."""
        return [name for name in self.start if not token_wise(part_of(name), self.spec)]

    def whole(self, name: str) -> Place:
        """A parameter as one feature, whose outputs are all of its entries."""
        return Place(self.start[name], (1, self.size), (prod(self.graph.parameters[name]), 1))

    def at(self, point: Point) -> Iterator[Piece]:
        """In the order of the graph."""
        spec = self.spec
        by_head = {"attn.k": self._key, "attn.v": self._value}
        if not token_wise("attn.k", spec):
            del by_head["attn.k"]
        if self._has("attn.q"):
            yield self._linear(point, "attn.q")
        for part, piece in by_head.items():
            if self._has(part):
                for g, q in product(range(spec.groups), range(spec.heads // spec.groups)):
                    yield piece(point, g, q)
        for part in ("attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            if self._has(part):
                yield self._linear(point, part)

    def _linear(self, point: Point, part: str) -> Piece:
        entry = self._node(part)
        x, m = self._input(point, part), self.graph.parameters[f"blocks.0.{part}.weight"][1]

        def turn(moved: Tensor) -> Tensor:
            return pad(tokens(moved), (0, 0, 0, x.shape[-1] - moved.shape[-1]))  # nothing moves the 1 of the bias

        return Piece(
            names=self._names(part),
            place=Place(self.start[f"blocks.0.{part}.weight"], (x.shape[-1], m), (m, 1)),
            entry=entry,
            features=x.flatten(0, 1),
            seeds=torch.eye(m).to(x)[:, None, None].expand(-1, *x.shape[:2], -1),
            read=tokens,
            source=self.graph.nodes[entry].sources[0],
            turn=turn,
        )

    def _key(self, point: Point, g: int, q: int) -> Piece:
        entry, x, width = self._node("attn.scores"), self._input(point, "attn.k"), self.spec.head_width
        queries, scale = point.kept[entry][0], width**-0.5
        batch, length, groups, heads, _ = queries.shape
        seeds = x.new_zeros(x.shape[-1], batch, groups, heads, length, length)
        seeds[:, :, g, q] = scale * x.permute(2, 0, 1)[:, :, None]
        return Piece(
            names=self._names("attn.k"),
            place=Place(self.start["blocks.0.attn.k.weight"] + g * width, (width, 1), (x.shape[-1], groups * width)),
            entry=entry,
            features=queries[:, :, g, q].flatten(0, 1),
            seeds=seeds,
            read=lambda pulled: tokens(scale * pulled[:, :, g, q] @ x),
            source=self.graph.nodes[entry].sources[0],
            turn=lambda moved: tokens(moved[:, :, :, g, q]),
        )

    def _value(self, point: Point, g: int, q: int) -> Piece:
        entry, x, width = self._node("attn.mix"), self._input(point, "attn.v"), self.spec.head_width
        weights = point.kept[entry][0]
        batch, groups, heads, length, _ = weights.shape
        seeds = x.new_zeros(width, batch, length, groups, heads, width)
        seeds[:, :, :, g, q] = torch.eye(width).to(x)[:, None, None]
        return Piece(
            names=self._names("attn.v"),
            place=Place(self.start["blocks.0.attn.v.weight"] + g * width, (x.shape[-1], groups * width), (width, 1)),
            entry=entry,
            features=(weights[:, g, q] @ x).flatten(0, 1),
            seeds=seeds,
            read=lambda pulled: tokens(pulled[:, :, :, g, q]),
            source=self.graph.nodes[entry].sources[0],
            turn=lambda moved: tokens(moved[:, :, g, q] @ x),
        )

    def _names(self, part: str) -> list[str]:
        return [name for name in self.start if part_of(name) == part]

    def _has(self, part: str) -> bool:
        return f"blocks.0.{part}.weight" in self.start

    def _node(self, part: str) -> int:
        return self.graph.index[f"blocks.0.{part}"]

    def _input(self, point: Point, part: str) -> Tensor:
        """What a weight multiplies, ``(B, L, p)``: with a 1 for the bias, which stands below the weight."""
        x: Tensor = point.kept[self._node(part)][0]
        return pad(x, (0, 1), value=1.0) if self.spec.biased(part) else x


def token_wise(part: str, spec: Spec) -> bool:
    """Whether the parameters of a part of the block, such as ``attn.q``, act on each token alone."""
    return part.startswith(("attn.", "mlp.")) and not (part == "attn.k" and spec.rotated)


def part_of(name: str) -> str:
    """``attn.q`` of ``blocks.0.attn.q.weight``."""
    return name.removeprefix("blocks.0.").rpartition(".")[0]


def tokens(moved: Tensor) -> Tensor:
    """``(k, B, L, width)`` as ``(N, width, k)``."""
    return moved.flatten(1, 2).permute(1, 2, 0).contiguous()
