"""The whole Hessian of one block as a token-wise Kronecker sum.

After the attention output every token goes its own way.  So what a weight does to the loss passes, token by token,
through one node, its *entry*, and its gradient is ``sum_n phi_n (x) delta_n``:

| weight | entry | feature ``phi`` | output index, with gradient ``delta`` |
|---|---|---|---|
| Q, O, FFN | the weight's own output | its input ``x_n``, and 1 for the bias | that of the entry |
| V, per head | the mixed values | ``E_n[x]`` under the attention row of the token | that of the entry |
| K, per head | the scores | the query ``q_n``, at W_K's output index | W_K's input index, through ``x_j / sqrt(d_k)`` |

The Hessian is the derivative of that, once for each factor:

    H_ab = sum_n  phi_a (x) (d delta_a / d b) (x) phi_b   +   delta_a (x) (d phi_a / d b) (x) phi_b

Both derivatives are small maps for each token, and the sweeps of ``hesscore.chain`` give them, with unit vectors at the
entry of ``b``.  Gains and shifts of norms, and keys that are rotated, have no such form: their rows are products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from hesscore import chain
from hesscore.chain import Point
from hesscore.curvature import Curvature, Terms
from hesscore.errors import UsageError
from hesscore.explicit.kronecker import KroneckerSum, Place, Term
from hesscore.explicit.tokens import Factor, TokenJacobian
from hesscore.spec import Spec

TokenMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """A weight with its bias, or the part of it that belongs to one head."""

    place: Place
    entry: int
    features: Tensor
    """``phi (N, p)``"""
    gradient: Tensor
    """``delta (N, m)``"""
    seeds: Tensor
    """How each output moves the entry: tangents ``(m, *shape of the entry)``."""
    read: TokenMap
    """``d delta (N, m, k)`` from cotangents ``(k, *shape of the entry)``."""
    source: int
    """The node that the features move with."""
    turn: TokenMap
    """``d phi (N, p, k)`` from tangents ``(k, *shape of the source)``."""

    @property
    def crossed(self) -> Place:
        """The same entries, with ``delta`` as the feature."""
        return Place(self.place.start, self.place.outputs, self.place.features)


def block_hessian(
    curvature: Curvature, spec: Spec, terms: Terms | None = None, parts: Collection[str] | None = None
) -> KroneckerSum:
    """The Hessian by all parameters of the block, in the order of the graph, which is that of a ``spec`` of one layer.

    ``terms`` restricts the sum (1) as in ``Curvature.hvp``: ``outer`` gives the Gauss-Newton part, ``inner`` the
    functional one.  ``parts``, such as ``attn.q`` or ``norm1``, restricts the parameters to theirs.
    """
    if spec.layers != 1:
        raise UsageError(f"{spec.layers} layers: tokens go their own ways after the attention of the last layer only")
    return _Block(curvature, spec, terms, parts).sum()


def block_jacobian(curvature: Curvature, spec: Spec, node: str, parts: Collection[str] | None = None) -> TokenJacobian:
    """The Jacobian of a ``node`` of the graph, such as ``blocks.0.attn.o``, by all parameters of the block.

    The node has shape ``(B, L, z)`` and lies in the attention or after it; the data are in one part.  ``parts`` is as
    for ``block_hessian``: the node depends on one of them at least.
    """
    return _Block(curvature, spec, None, parts).jacobian(node)


class _Block:
    def __init__(self, curvature: Curvature, spec: Spec, terms: Terms | None, parts: Collection[str] | None) -> None:
        self.curvature, self.spec, self.graph, self.which = curvature, spec, curvature.graph, terms
        self.curved = curvature.curved(terms)
        self.start: dict[str, int] = {}
        self.size = 0
        own = {name: _part(name) for name in self.graph.parameters if name.startswith("blocks.0.")}
        if unknown := set(parts or ()) - set(own.values()):
            raise UsageError(f"no part of the block with parameters is named {min(unknown)}")
        for name, part in own.items():
            if parts is None or part in parts:
                self.start[name] = self.size
                self.size += prod(self.graph.parameters[name])

    def sum(self) -> KroneckerSum:
        found = [term for point in self.curvature.points for term in self._kronecker(point)]
        return KroneckerSum((self.size, self.size), self.curvature.loss.dtype, [*found, *self._products()])

    def jacobian(self, node: str) -> TokenJacobian:
        target = self.graph.index[node]
        (point,) = self.curvature.points
        factors = []
        for piece in self._pieces(point):
            moved = chain.tangents(point, {piece.entry: piece.seeds}, {target})
            if target in moved:
                factors.append(Factor(piece.place, piece.features, _tokens(moved[target])))
        for name in self._others:
            weight = self.curvature.leaves[name]
            unit = torch.eye(weight.numel()).to(weight).view(-1, *weight.shape)
            moved = chain.tangents(point, {self.graph.index[name]: unit}, {target})
            if target in moved:
                maps = _tokens(moved[target])
                factors.append(Factor(self._whole(name), maps.new_ones(len(maps), 1), maps))
        n, z = factors[0].maps.shape[:2]
        return TokenJacobian((n * z, self.size), factors)

    def _kronecker(self, point: Point) -> Iterator[Term]:
        """The terms between weights, from the one that comes first to all that come after it."""
        pieces = list(self._pieces(point))
        for j, b in enumerate(pieces):
            after = pieces[j:]
            targets = self.graph.sources(self.curved) | {a.source for a in after}
            moved = chain.tangents(point, {b.entry: b.seeds}, targets)
            pulled = chain.cotangents(point, {a.entry for a in after}, moved=moved, curved=self.curved)
            for a in after:
                terms = []
                if a.entry in pulled:
                    terms.append(Term(a.place, b.place, a.features, b.features, a.read(pulled[a.entry])))
                if a.source in moved and a.entry in self.curved:
                    terms.append(Term(a.crossed, b.place, a.gradient, b.features, a.turn(moved[a.source])))
                for term in terms:
                    yield from [term] if a is b else term.symmetric()

    def _pieces(self, point: Point) -> Iterator[Piece]:
        spec = self.spec
        by_head = {"attn.k": self._key, "attn.v": self._value}
        if self._rotated:
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
            return pad(_tokens(moved), (0, 0, 0, x.shape[-1] - moved.shape[-1]))  # nothing moves the 1 of the bias

        return Piece(
            place=Place(self.start[f"blocks.0.{part}.weight"], (x.shape[-1], m), (m, 1)),
            entry=entry,
            features=x.flatten(0, 1),
            gradient=point.bent[entry].flatten(0, 1),
            seeds=torch.eye(m).to(x)[:, None, None].expand(-1, *x.shape[:2], -1),
            read=_tokens,
            source=self.graph.nodes[entry].sources[0],
            turn=turn,
        )

    def _key(self, point: Point, g: int, q: int) -> Piece:
        entry, x, width = self._node("attn.scores"), self._input(point, "attn.k"), self.spec.head_dim
        queries, scale = point.kept[entry][0], width**-0.5
        gradient = point.bent[entry]
        seeds = x.new_zeros(x.shape[-1], *gradient.shape)
        seeds[:, :, g, q] = scale * x.permute(2, 0, 1)[:, :, None]
        return Piece(
            place=Place(
                self.start["blocks.0.attn.k.weight"] + g * width,
                (width, 1),
                (x.shape[-1], self.spec.groups * width),
            ),
            entry=entry,
            features=queries[:, :, g, q].flatten(0, 1),
            gradient=scale * (gradient[:, g, q] @ x).flatten(0, 1),
            seeds=seeds,
            read=lambda pulled: _tokens(scale * pulled[:, :, g, q] @ x),
            source=self.graph.nodes[entry].sources[0],
            turn=lambda moved: _tokens(moved[:, :, :, g, q]),
        )

    def _value(self, point: Point, g: int, q: int) -> Piece:
        entry, x, width = self._node("attn.mix"), self._input(point, "attn.v"), self.spec.head_dim
        weights, gradient = point.kept[entry][0], point.bent[entry]
        seeds = x.new_zeros(width, *gradient.shape)
        seeds[:, :, :, g, q] = torch.eye(width).to(x)[:, None, None]
        return Piece(
            place=Place(
                self.start["blocks.0.attn.v.weight"] + g * width,
                (x.shape[-1], self.spec.groups * width),
                (width, 1),
            ),
            entry=entry,
            features=(weights[:, g, q] @ x).flatten(0, 1),
            gradient=gradient[:, :, g, q].flatten(0, 1),
            seeds=seeds,
            read=lambda pulled: _tokens(pulled[:, :, :, g, q]),
            source=self.graph.nodes[entry].sources[0],
            turn=lambda moved: _tokens(moved[:, :, g, q] @ x),
        )

    def _products(self) -> Iterator[Term]:
        """The rows and columns of the others."""
        names = self._others
        one = self.curvature.loss.new_ones(1, 1)
        for name in names:
            rows = self.curvature.block(list(self.start), name, self.which).dense().T
            sizes = [self.curvature.leaves[other].numel() for other in self.start]
            for other, part in zip(self.start, rows.split(sizes, 1), strict=True):
                yield Term(self._whole(name), self._whole(other), one, one, part[None], mirrored=other not in names)

    def _whole(self, name: str) -> Place:
        """A parameter as one feature, whose outputs are all of its entries."""
        return Place(self.start[name], (1, self.size), (self.curvature.leaves[name].numel(), 1))

    @property
    def _others(self) -> list[str]:
        """The parameters that have no token-wise form."""
        return [name for name in self.start if ".norm" in name or (self._rotated and ".attn.k." in name)]

    @property
    def _rotated(self) -> bool:
        return self.spec.positions == "rotary"

    def _has(self, part: str) -> bool:
        return f"blocks.0.{part}.weight" in self.start

    def _node(self, part: str) -> int:
        return self.graph.index[f"blocks.0.{part}"]

    def _input(self, point: Point, part: str) -> Tensor:
        """What a weight multiplies, ``(B, L, p)``: with a 1 for the bias, which stands below the weight."""
        x: Tensor = point.kept[self._node(part)][0]
        return pad(x, (0, 1), value=1.0) if self.spec.bias else x


def _part(name: str) -> str:
    """``attn.q`` of ``blocks.0.attn.q.weight``."""
    return name.removeprefix("blocks.0.").rpartition(".")[0]


def _tokens(moved: Tensor) -> Tensor:
    """``(k, B, L, width)`` as ``(N, width, k)``."""
    return moved.flatten(1, 2).permute(1, 2, 0).contiguous()
