"""The tiers of bounds, from the least that is known to the most, for one block: a row for each pair of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any, NamedTuple

from hesscore.bounds.apriori import WHOLE, Bound, apriori
from hesscore.bounds.jets import Pair
from hesscore.bounds.published import published
from hesscore.bounds.scalars import weights
from hesscore.errors import UsageError
from hesscore.spec import Spec

if TYPE_CHECKING:
    from hesscore.curvature import Curvature


class Tier(NamedTuple):
    """What a tier rests on."""

    hypotheses: str
    constants: str


TIERS = {
    "published": Tier(
        "as printed for one head without W_O where attention is uniform: can be beaten, for comparison", "printed"
    ),
    "apriori": Tier("the scalars: it holds for every block and data that keep to them", "proved"),
    "swept": Tier("this block on these data", "proved"),
    "enclosure": Tier("this block on these data: from below and above", "proved"),
    "exact": Tier("this block on these data: a singular value with its error", "computed"),
}

WITHOUT_DATA = ("published", "apriori")

PARTS = ("full", "outer", "functional")


@dataclass(frozen=True)
class BoundRow:
    """Bounds on ``|H[row, column]|_2`` in one part of the Hessian; ``None`` where a tier has none or was not asked."""

    layer: int
    seq_len: int
    input_norm: float
    width: int
    heads: int
    row: str
    column: str
    part: str
    published: float | None = None
    apriori: float | None = None
    swept: float | None = None
    enclosure_lower: float | None = None
    enclosure_upper: float | None = None
    exact: float | None = None
    exact_error: float | None = None
    converged: bool = True
    note: str = ""

    @property
    def beaten(self) -> float | None:
        """What the norm is at least, where that is beyond the published bound."""
        known = self.enclosure_lower
        if self.exact is not None and self.exact_error is not None:
            known = self.exact - self.exact_error
        if known is None or self.published is None or known <= self.published * (1 + 1e-9):
            return None
        return known


COLUMNS = tuple(field.name for field in fields(BoundRow))


def chosen(tiers: str | None, data: bool) -> list[str]:
    """Those that are listed, or ``all``, in the order of ``TIERS``; by default all of them if there are ``data``."""
    if tiers == "all" or (tiers is None and data):
        return list(TIERS)
    if tiers is None:
        return list(WITHOUT_DATA)
    names = [name.strip() for name in tiers.split(",")]
    for name in names:
        if name not in TIERS:
            near = get_close_matches(name, TIERS, 1)
            known = f"did you mean {near[0]}?" if near else f"the tiers are {', '.join(TIERS)}"
            raise UsageError(f"--tiers {tiers}: no tier {name or repr(name)}; {known}")
    return [name for name in TIERS if name in names]


def count(spec: Spec) -> int:
    """How many rows ``rows`` gives."""
    n = len(blocks_of(spec))
    return len(PARTS) * (n * (n + 1) // 2 + 1)


def blocks_of(spec: Spec) -> list[str]:
    """The parameters that get rows, in the order of a block: all matrices, and all gains."""
    attention = [part for part in weights(spec) if part.startswith("attn.")]
    hidden = [part for part in weights(spec) if part.startswith("mlp.")]
    if spec.layer_scale:
        attention, hidden = [*attention, "scale1"], [*hidden, "scale2"] if hidden else []
    first, second = ["norm1"], ["norm2"] if spec.d_ff else []
    if spec.norm == "none":
        first, second = [], []
    ordered = (
        [*attention, *first, *hidden, *second] if spec.placement == "post" else [*first, *attention, *second, *hidden]
    )
    return [f"{part}.weight" for part in ordered]


def rows(
    spec: Spec,
    scalars: Mapping[str, float],
    length: int,
    target: str,
    tiers: Sequence[str],
    layer: int = 0,
    curvature: Curvature | None = None,
    seed: int = 0,
) -> Iterator[BoundRow]:
    """A row for each pair of the weights of a block and for the whole block, in each part, in the named ``tiers``.

    Tiers other than ``WITHOUT_DATA`` are of ``curvature``, which is the block's on its own.
    """
    found: dict[str, Mapping[Pair, Bound]] = {}
    if "published" in tiers:
        found["published"] = published(spec, scalars, length)
    if "apriori" in tiers:
        found["apriori"] = apriori(spec, scalars, length, target)
    if "swept" in tiers:
        from hesscore.bounds.swept import swept

        assert curvature is not None
        found["swept"] = swept(curvature, spec)
    on_data = None
    if measured := [tier for tier in ("enclosure", "exact") if tier in tiers]:
        from hesscore.bounds.data import OnData

        assert curvature is not None
        on_data = OnData(curvature, spec, measured, seed)
    start = BoundRow(layer, length, scalars["input.norm"], spec.d_model, spec.heads, "", "", "")
    for part in PARTS:
        for a, b in [*combinations_with_replacement(blocks_of(spec), 2), (WHOLE, WHOLE)]:
            bounds = {tier: _of_part(pairs.get((min(a, b), max(a, b))), part) for tier, pairs in found.items()}
            row = replace(start, row=a, column=b, part=part, **bounds)
            if on_data:
                row = on_data.measure(row)
            yield _in_order(row)


def _in_order(row: BoundRow) -> BoundRow:
    """With the better of two upper ends, and a note where the published bound does not hold."""
    if row.swept is not None and row.enclosure_upper is not None:
        row = replace(row, enclosure_upper=min(row.enclosure_upper, row.swept))
    if row.beaten is not None:
        beaten = f"the published bound is beaten, {row.beaten:.3g} against {row.published:.3g}"
        row = replace(row, note="; ".join(filter(None, (row.note, beaten))))
    return row


def _of_part(bound: Bound | None, part: str) -> Any:
    if bound is None:
        return None
    return sum(bound) if part == "full" else getattr(bound, part)
