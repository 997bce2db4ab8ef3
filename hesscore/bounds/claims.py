"""What papers claim of growth, and whether it is so: a verdict on each claim, by what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hesscore.bounds.report import BoundsReport

NEAR = 0.25
"""How far a measured exponent may be from the claim, beside twice its standard error."""


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
        if (measured := fits.get("exact")) is None:
            word = "not measured (--tiers exact does)"
        else:
            holds = abs(measured.value - claim.exponent) <= NEAR + 2 * measured.stderr
            word = "holds here" if holds else "does not hold here"
        yield f"{said}: {word}; {found}"


def _short(name: str) -> str:
    return name.split(".")[1].upper()
