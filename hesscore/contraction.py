"""An einsum of two operands as one batched matrix product, which may be added to an earlier result in place."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

K = "K"
"""The letter of the leading axis that carries several tangents at once; all others are lower-case."""


def contract(left: str, x: Tensor, right: str, y: Tensor, out: str, onto: Tensor | None = None) -> Tensor:
    """``einsum(f"{left},{right}->{out}", x, y)``, plus ``onto``, which is overwritten.

    ``onto`` is an earlier result for the same ``out``.  Adding inside the matrix product saves a pass over the result,
    which for a weight is a tenth of the work.  An operand without ``K`` is the same for all ``k``.
    """
    plan = _plan(left, right, out)
    size = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
    batch, rows, inner, columns = ([size[letter] for letter in letters] for letters in plan.letters)
    b, m, n = prod(batch), prod(rows), prod(columns)
    x = x.permute(plan.left).expand(*batch, *rows, *inner).reshape(b, m, prod(inner))
    y = y.permute(plan.right).expand(*batch, *inner, *columns).reshape(b, prod(inner), n)
    if onto is not None:
        onto.permute(plan.back).view(b, m, n).baddbmm_(x, y)
        return onto
    return torch.bmm(x, y).view(*batch, *rows, *columns).permute(plan.out)


class _Plan(NamedTuple):
    """Letters of the batch, the rows, what is summed and the columns, and the permutations to and from that order."""

    letters: tuple[str, str, str, str]
    left: list[int]
    right: list[int]
    out: list[int]
    back: list[int]


@lru_cache(maxsize=1024)
def _plan(left: str, right: str, out: str) -> _Plan:
    batch = "".join(c for c in out if c == K or (c in left and c in right))
    rows = "".join(c for c in out if c in left and c not in batch)
    columns = "".join(c for c in out if c in right and c not in batch)
    inner = "".join(c for c in left if c not in out)
    order = batch + rows + columns
    return _Plan(
        (batch, rows, inner, columns),
        [left.index(c) for c in batch + rows + inner if c in left],
        [right.index(c) for c in batch + inner + columns if c in right],
        [order.index(c) for c in out],
        [out.index(c) for c in order],
    )
