"""One block whole: its Hessian as a token-wise Kronecker sum, and the Jacobian of any of its nodes.

The gradient by a weight is ``sum_n phi_n (x) delta_n`` (see ``hesscore.explicit.pieces``).  The Hessian is its
derivative, once for each factor:

    H_ab = sum_n  phi_a (x) (d delta_a / d b) (x) phi_b   +   delta_a (x) (d phi_a / d b) (x) phi_b

Both derivatives are small maps for each token, and the sweeps of ``hesscore.chain`` give them, with unit vectors at the
entry of ``b``.  The rows of parameters that have no such form are products.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set

import torch
from torch import Tensor

from hesscore import chain
from hesscore.chain import Point
from hesscore.curvature import Curvature, Terms
from hesscore.errors import UsageError
from hesscore.explicit.kronecker import KroneckerSum, Term
from hesscore.explicit.pieces import Pieces, tokens
from hesscore.explicit.tokens import Factor, TokenJacobian
from hesscore.spec import Spec


def block_hessian(
    curvature: Curvature, spec: Spec, terms: Terms | None = None, parts: Collection[str] | None = None
) -> KroneckerSum:
    """The Hessian by all parameters of ``blocks.0``, in the order of the graph, which has no block after it.

    ``terms`` restricts the sum (1) as in ``Curvature.hvp``: ``outer`` gives the Gauss-Newton part, ``inner`` the
    functional one.  ``parts``, such as ``attn.q`` or ``norm1``, restricts the parameters to theirs.
    """
    if any(name.startswith("blocks.1.") for name in curvature.graph.parameters):
        raise UsageError("a graph of several blocks: tokens go their own ways after the attention of the last one only")
    pieces = Pieces(curvature.graph, spec, parts)
    curved = curvature.curved(terms)
    found = [term for point in curvature.points for term in _kronecker(pieces, point, curved)]
    found += _products(pieces, curvature, terms)
    return KroneckerSum((pieces.size, pieces.size), curvature.loss.dtype, found)


def block_jacobian(point: Point, spec: Spec, node: str, parts: Collection[str] | None = None) -> TokenJacobian:
    """The Jacobian of a ``node`` of the graph, such as ``blocks.0.attn.o``, by all parameters of the block.

    The node has shape ``(B, L, z)``; the graph may end there.  ``parts`` is as for ``block_hessian``: the node depends
    on one of them at least.  It is cheapest after the attention, where each weight has one feature for all of ``z``.
    """
    pieces, target = Pieces(point.graph, spec, parts), point.graph.index.get(node)
    if target is None:
        raise UsageError(f"no node of the graph is named {node}")
    before = point.graph.upstream({target})
    factors, whole = [], set(pieces.others)

    def maps(start: int, seeds: Tensor) -> Tensor:
        moved = chain.tangents(point, {start: seeds}, {target})[target]
        if moved.ndim != 4:
            raise UsageError(f"{node} is not of shape (batch, length, features)")
        return tokens(moved)

    for piece in pieces.at(point):
        if piece.entry not in before or (
            piece.entry == target and len(piece.names) > 1
        ):  # a bias is added after the entry
            whole.update(piece.names)
        else:
            factors.append(Factor(piece.place, piece.features, maps(piece.entry, piece.seeds)))
    for name in pieces.start:
        if name in whole and point.graph.index[name] in before:
            weight = point.leaves[name]
            unit = torch.eye(weight.numel()).to(weight).view(-1, *weight.shape)
            moved = maps(point.graph.index[name], unit)
            factors.append(Factor(pieces.whole(name), moved.new_ones(len(moved), 1), moved))
    if not factors:
        raise UsageError(f"{node} does not depend on {', '.join(parts) if parts else 'the block'}")
    n, z = factors[0].maps.shape[:2]
    return TokenJacobian((n * z, pieces.size), factors)


def _kronecker(pieces: Pieces, point: Point, curved: Set[int]) -> Iterator[Term]:
    """The terms between weights, from the one that comes first to all that come after it."""
    found = list(pieces.at(point))
    for j, b in enumerate(found):
        after = found[j:]
        targets = point.graph.sources(curved) | {a.source for a in after}
        moved = chain.tangents(point, {b.entry: b.seeds}, targets)
        pulled = chain.cotangents(point, {a.entry for a in after}, moved=moved, curved=curved)
        for a in after:
            terms = []
            if a.entry in pulled:
                terms.append(Term(a.place, b.place, a.features, b.features, a.read(pulled[a.entry])))
            if a.source in moved and a.entry in curved:
                delta = a.read(point.bent[a.entry][None])[..., 0]
                terms.append(Term(a.crossed, b.place, delta, b.features, a.turn(moved[a.source])))
            for term in terms:
                yield from [term] if a is b else term.symmetric()


def _products(pieces: Pieces, curvature: Curvature, terms: Terms | None) -> Iterator[Term]:
    """The rows and columns of the others."""
    one = curvature.loss.new_ones(1, 1)
    for name in pieces.others:
        rows = curvature.block(list(pieces.start), name, terms).dense().T
        sizes = [curvature.leaves[other].numel() for other in pieces.start]
        for other, part in zip(pieces.start, rows.split(sizes, 1), strict=True):
            mirrored = other not in pieces.others
            yield Term(pieces.whole(name), pieces.whole(other), one, one, part[None], mirrored=mirrored)
