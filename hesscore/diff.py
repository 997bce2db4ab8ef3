"""Two reports side by side: what has changed, and whether by more than the errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

Content = Mapping[str, Any]

ALIKE = ("data_sha256", "loss_normalisation", "scored_tokens", "dtype", "max_tokens")
"""What two reports should have in common to be compared."""


@dataclass(frozen=True)
class Change:
    """A block in both reports, A and B; ``ratio`` is B over A.

    ``apart``: the intervals of ``lambda_max`` do not overlap.  ``None`` is a number that one of them has not.
    """

    layer: int | None
    component: str
    parameter: str
    lambda_max_a: float | None
    lambda_max_a_error: float | None
    lambda_max_b: float | None
    lambda_max_b_error: float | None
    ratio: float | None
    apart: bool | None
    lambda_min_a: float | None
    lambda_min_b: float | None
    trace_a: float | None
    trace_a_stderr: float | None
    trace_b: float | None
    trace_b_stderr: float | None
    grad_norm_a: float | None
    grad_norm_b: float | None
    note: str = ""


COLUMNS = tuple(column.name for column in fields(Change))


@dataclass(frozen=True)
class Difference:
    source_a: str
    source_b: str
    loss_a: float
    loss_b: float
    changes: list[Change]
    """The model as a whole, if both have it, and then every block of either, in the order of the model."""
    notes: list[str]
    """Why the numbers may not be comparable."""

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.changes, columns=list(COLUMNS)).astype({"layer": "Int64"})


def difference(a: Content, b: Content) -> Difference:
    """Of two contents of reports."""
    return Difference(a["source"], b["source"], a["loss"], b["loss"], list(_changes(a, b)), list(_unlike(a, b)))


def _unlike(a: Content, b: Content) -> Iterator[str]:
    for name in ALIKE:
        if a.get(name) != b.get(name):
            yield f"{name} is {a.get(name)} in one and {b.get(name)} in the other: not the same loss"


def _changes(a: Content, b: Content) -> Iterator[Change]:
    if a["model"] and b["model"]:
        yield _change(a["model"], b["model"])
    before, after = _rows(a), _rows(b)
    for place in dict.fromkeys((*before, *after)):
        yield _change(before.get(place), after.get(place))


def _rows(content: Content) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {(row["layer"], row["component"], row["parameter"]): row for row in content["rows"]}


def _change(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> Change:
    there = a or b
    assert there is not None
    nothing: Mapping[str, Any] = dict.fromkeys(there)
    old, new = a or nothing, b or nothing
    top, other = old["lambda_max"], new["lambda_max"]
    ratio = apart = None
    if top is not None and other is not None:
        ratio = other / top if abs(top) > old["lambda_max_error"] else None
        apart = bool(abs(other - top) > old["lambda_max_error"] + new["lambda_max_error"])
    return Change(
        layer=there["layer"],
        component=there["component"],
        parameter=there["parameter"],
        lambda_max_a=top,
        lambda_max_a_error=old["lambda_max_error"],
        lambda_max_b=other,
        lambda_max_b_error=new["lambda_max_error"],
        ratio=ratio,
        apart=apart,
        lambda_min_a=old["lambda_min"],
        lambda_min_b=new["lambda_min"],
        trace_a=old["trace"],
        trace_a_stderr=old["trace_stderr"],
        trace_b=new["trace"],
        trace_b_stderr=new["trace_stderr"],
        grad_norm_a=old["grad_norm"],
        grad_norm_b=new["grad_norm"],
        note="" if a and b else f"only in {'A' if a else 'B'}",
    )
