"""The trace of a symmetric operator, with a standard error."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator

from hesscore.spectrum.lanczos import Krylov, Product


class Trace(NamedTuple):
    """An estimate and its standard error (0 where it is exact)."""

    value: float
    stderr: float


def deflated_hutchinson(product: Product, krylov: Krylov, probes: int, at_once: int, rng: Generator) -> Trace:
    """``tr A = tr(Q^T A Q) + E[z^T P A P z]`` over random signs ``z``, with ``P = I - Q Q^T`` and ``Q`` from Lanczos.

    The first term is known exactly; only the rest, from which the outlying eigenvalues are gone, is sampled.  ``Q``
    does not depend on the probes, so the estimate is unbiased.
    """
    q, inside = krylov.basis, float(krylov.diagonal.sum())
    if len(q) == q.shape[1]:
        return Trace(inside, 0.0)
    signs = torch.randint(2, (q.shape[1], probes), generator=rng).to(q) * 2 - 1
    outside = signs - q.T @ (q @ signs)
    samples = torch.cat([(part * product(part)).sum(0, dtype=torch.float64) for part in outside.split(at_once, 1)])
    return Trace(inside + float(samples.mean()), float(samples.std() / probes**0.5))
