"""How far each tier of bounds is from the exact norm, on the papers' block."""

from __future__ import annotations

from statistics import median
from typing import Any

from hesscore.bounds.apriori import WHOLE
from hesscore.bounds.settings import Sweep, of_drawn
from hesscore.bounds.tiers import TIERS, rows
from hesscore.spec import Spec

BLOCK = Spec(
    d_model=16, d_ff=32, placement="post", norm_eps=0.0, causal=False, activation="relu", bias=False, seq_len=8
)

FIELDS = {"published": "published", "apriori": "apriori", "swept": "swept", "enclosure": "enclosure_upper"}


def tightness() -> list[dict[str, Any]]:
    """For each part and tier, bound over exact: the median and the largest over all pairs of weights, and the whole.

    A tier of some pairs alone has its number of ``pairs``; what is exactly zero has no ratio.
    """
    (block,) = of_drawn("the papers' block", BLOCK, Sweep(), {}, "input", 0)
    every = rows(block.spec, block.scalars, block.length, "input", list(TIERS), curvature=block.curvature)
    found = [row for row in every if row.exact is not None and row.exact > (row.exact_error or 0.0)]
    records = []
    for part in "outer", "functional":
        for tier, name in FIELDS.items():
            ratios = {
                (row.row, row.column): bound / row.exact
                for row in found
                if row.part == part and row.exact and (bound := getattr(row, name)) is not None
            }
            whole = ratios.pop((WHOLE, WHOLE), None)
            middle, most = median(ratios.values()), max(ratios.values())
            pairs = len(ratios)
            records.append(
                {"part": part, "tier": tier, "pairs": pairs, "median": middle, "largest": most, "whole": whole}
            )
    return records
