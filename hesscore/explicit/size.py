"""How large the Hessian of one block is as a token-wise Kronecker sum, before it is built."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from hesscore.explicit.pieces import part_of, token_wise
from hesscore.spec import Spec
from hesscore.wiring.model import model


def kept(spec: Spec, parts: Collection[str], tokens: int, length: int) -> int:
    """Numbers in memory, at most, for ``block_hessian`` by some ``parts`` on sequences of ``length``.

    The maps of each piece and all after it, and beside each the derivatives of its features; the rows of what has no
    token-wise form; and the tangents of one piece at a time.
    """
    groups = _pieces(spec, parts)
    pieces = [piece for group in groups.values() for piece in group]
    maps = sum(m * sum(p + after for p, after in pieces[j:]) for j, (_, m) in enumerate(pieces))
    moved = max((m * _moved(spec, part, length) for part, group in groups.items() for _, m in group), default=0)
    sizes = {name: prod(shape) for name, shape in model(spec).parameters.items() if part_of(name) in parts}
    rows = sum(size for name, size in sizes.items() if not token_wise(part_of(name), spec))
    return tokens * (maps + moved) + rows * sum(sizes.values())


def _moved(spec: Spec, part: str, length: int) -> int:
    """Numbers for each token that one output of a part moves, with their cotangents; counted at the fullest moment."""
    attention = {"attn.q": 10, "attn.k": 10, "attn.v": 1}.get(part, 0)
    hidden = 0 if part == "mlp.down" else 12 if spec.gated else 6
    return attention * spec.heads * length + hidden * spec.d_ff + 16 * spec.d_model


def _pieces(spec: Spec, parts: Collection[str]) -> dict[str, list[tuple[int, int]]]:
    """Features and outputs of each of ``hesscore.explicit.pieces``, in the order of the block."""
    d, hidden, width = spec.d_model, spec.d_ff, spec.head_width

    def seen(part: str) -> int:
        return {"attn.o": spec.heads * width, "mlp.down": hidden}.get(part, d) + spec.biased(part)

    groups = {
        "attn.q": [(seen("attn.q"), spec.heads * width)],
        "attn.k": [(width, seen("attn.k"))] * spec.heads,
        "attn.v": [(seen("attn.v"), width)] * spec.heads,
        "attn.o": [(seen("attn.o"), d)],
        "mlp.gate": [(seen("mlp.gate"), hidden)],
        "mlp.up": [(seen("mlp.up"), hidden)],
        "mlp.down": [(seen("mlp.down"), d)],
    }
    if not token_wise("attn.k", spec):
        del groups["attn.k"]
    if not spec.gated:
        del groups["mlp.gate"]
    return {part: pieces for part, pieces in groups.items() if part in parts}
