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
    pieces = _pieces(spec, parts)
    maps = sum(m * sum(p + after for p, after in pieces[j:]) for j, (_, m) in enumerate(pieces))
    sizes = {
        name: prod(shape)
        for name, shape in model(spec).parameters.items()
        if name.removeprefix("blocks.0.").rpartition(".")[0] in parts
    }
    rotated = spec.positions == "rotary"
    rows = sum(size for name, size in sizes.items() if ".norm" in name or (rotated and ".attn.k." in name))
    of_a_head = max((m for _, m in pieces if m in (spec.head_dim, spec.d_model + spec.bias)), default=1)
    widest = max((m for _, m in pieces), default=1)
    moved = 12 * of_a_head * spec.heads * length + widest * (3 * spec.d_ff + 8 * spec.d_model)
    return tokens * (maps + moved) + rows * sum(sizes.values())


def _pieces(spec: Spec, parts: Collection[str]) -> list[tuple[int, int]]:
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
    return [piece for part, pieces in groups.items() if part in parts for piece in pieces]
