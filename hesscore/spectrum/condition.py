"""The condition number: the largest over the smallest absolute eigenvalue that is not zero."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hesscore.spectrum.ends import Ends


class Condition(NamedTuple):
    """The condition number, or a lower bound of it."""

    value: float
    exact: bool


def condition(found: Ends) -> Condition | None:
    """Exact for a block that was formed whole, where what is within rounding of zero is zero.

    Else a lower bound.  Every ``v = A u`` is orthogonal to what ``A`` maps to zero, so ``|A v|/|v|`` is no less than
    the smallest absolute eigenvalue that is not zero; and for ``u`` in the Krylov space without its last two vectors,
    both ``A u`` and ``A v`` are within it.  ``None`` if the space is too small, or there is nothing but rounding.
    """
    krylov = found.krylov
    steps, n = krylov.basis.shape
    if found.flat:
        return None
    if steps == n:
        values = krylov.diagonal.abs() if not len(krylov.off_diagonal) else torch.linalg.eigvalsh(krylov.matrix).abs()
        least = float(values.where(values > found.rounding, values.max()).min())
        return Condition(values.max().item() / least, True)
    if steps < 3:
        return None
    directions = torch.linalg.qr(krylov.matrix[:, : steps - 2]).Q
    least = float(torch.linalg.svdvals(krylov.matrix @ directions)[-1])
    return Condition(max(1.0, found.norm / (least + found.rounding)), False)
