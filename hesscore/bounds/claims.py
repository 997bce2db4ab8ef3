"""What papers claim of growth, and whether it is so: a verdict on each claim, by what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

from hesscore.bounds.growth import Exponent
from hesscore.bounds.report import BoundsReport

NEAR = 0.5
"""How far from the claim a measured exponent may be with its standard error; a larger error is no power law."""


class Claim(NamedTuple):
    """``|H[row, column]|`` of one part grows with ``quantity`` like its power ``exponent``."""

    quantity: str
    row: str
    column: str
    part: str
    exponent: float
    source: str


ORMANIEC = "arXiv 2410.10986"
PETROV = "arXiv 2510.16927"

Q, K, V = "attn.q.weight", "attn.k.weight", "attn.v.weight"

CLAIMS = (
    Claim("input_norm", V, V, "outer", 2, ORMANIEC),
    Claim("input_norm", Q, V, "outer", 4, ORMANIEC),
    Claim("input_norm", Q, Q, "outer", 6, ORMANIEC),
    Claim("input_norm", Q, K, "outer", 6, ORMANIEC),
    Claim("seq_len", Q, Q, "outer", -3, PETROV),
    Claim("seq_len", Q, V, "outer", -1, PETROV),
)
"""Of the input norm for one layer of attention without norms; of the length as printed, whatever ``|X|_2`` does."""


def verdicts(report: BoundsReport) -> Iterator[str]:
    """A line for each claim on what was swept."""
    growth = report.growth
    for claim in CLAIMS:
        if claim.quantity != report.swept or (fits := growth.get(claim[1:4])) is None:
            continue
        pair = f"{_short(claim.row)}{_short(claim.column)} {claim.part}"
        said = f"{pair} ~ {claim.quantity}^{claim.exponent:g} ({claim.source})"
        found = ", ".join(f"{tier} {fit}" for tier, fit in fits.items())
        yield f"{said}: {_verdict(claim.exponent, fits.get('exact'))}; {found}"


def _verdict(claimed: float, measured: Exponent | None) -> str:
    if measured is None:
        return "not measured (--tiers exact does)"
    if not isfinite(measured.stderr):
        return "cannot be told from two values"
    if measured.stderr > NEAR:
        return "no power law here"
    return "holds here" if abs(measured.value - claimed) + measured.stderr <= NEAR else "does not hold here"


def _short(name: str) -> str:
    return name.split(".")[1].upper()
