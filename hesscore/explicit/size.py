"""How large the Hessian of one block is as a token-wise Kronecker sum, before it is built."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

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
    sizes = {
        name: prod(shape)
        for name, shape in model(spec).parameters.items()
        if name.removeprefix("blocks.0.").rpartition(".")[0] in parts
    }
    rotated = spec.positions == "rotary"
    rows = sum(size for name, size in sizes.items() if ".norm" in name or (rotated and ".attn.k." in name))
    return tokens * (maps + moved) + rows * sum(sizes.values())


def _moved(spec: Spec, part: str, length: int) -> int:
    """Numbers for each token that one output of a part moves, with their cotangents; counted at the fullest moment."""
    attention = {"attn.q": 10, "attn.k": 10, "attn.v": 1}.get(part, 0)
    hidden = 0 if part == "mlp.down" else 12 if spec.gated else 6
    return attention * spec.heads * length + hidden * spec.d_ff + 16 * spec.d_model


def _pieces(spec: Spec, parts: Collection[str]) -> dict[str, list[tuple[int, int]]]:
    """Features and outputs of each of ``hesscore.explicit.pieces``, in the order of the block."""
    d, hidden, width, one = spec.d_model, spec.d_ff, spec.head_dim, int(spec.bias)
    groups = {
        "attn.q": [(d + one, spec.heads * width)],
        "attn.k": [(width, d + one)] * spec.heads,
        "attn.v": [(d + one, width)] * spec.heads,
        "attn.o": [(d + one, d)],
        "mlp.gate": [(d + one, hidden)],
        "mlp.up": [(d + one, hidden)],
        "mlp.down": [(hidden + one, d)],
    }
    if spec.positions == "rotary":
        del groups["attn.k"]
    if not spec.gated:
        del groups["mlp.gate"]
    return {part: pieces for part, pieces in groups.items() if part in parts}
