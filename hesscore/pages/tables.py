"""The tables of a report as pages show them: columns, and cells with what to sort them by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hesscore.measured import Measured
from hesscore.pages import Content
from hesscore.pages.style import name_of

TOP = 200
"""Causes that are listed."""


class Cell(NamedTuple):
    text: str
    key: float | None = None
    """Of a number, in full: what it is sorted by."""


class Table(NamedTuple):
    title: str
    about: str
    columns: list[str]
    rows: list[list[Cell]]


ERRORS = {
    "lambda_max": "lambda_max_error",
    "lambda_min": "lambda_min_error",
    "trace": "trace_stderr",
    "spectral_entropy": "spectral_entropy_error",
    "negative_mass": "negative_mass_error",
    "preconditioned_sharpness": "preconditioned_sharpness_error",
    "mean": "mean_stderr",
    "peak": "peak_error",
}
"""Which column has the error of another: both are shown as one."""

BLOCKS = (
    "shape",
    "grad_norm",
    "lambda_max",
    "lambda_min",
    "trace",
    "gauss_newton_share",
    "condition",
    "spectral_entropy",
    "negative_mass",
    "preconditioned_sharpness",
    "lr_scale",
    "bound_upper",
    "note",
)


def tables(content: Content) -> list[Table]:
    """Those that have rows."""
    rows = ([content["model"]] if content["model"] else []) + content["rows"]
    found = [
        Table("Blocks", "Every parameter, and the model as a whole.", ["block", *BLOCKS], list(_blocks(rows))),
        Table("Causes", "The maps that cause most of each top eigenvalue.", *_causes(content)),
    ]
    about = {
        "sites": ("Activations", "The loss's curvature by one token's activation."),
        "norms": ("Norms", "What norms divide by, and their own curvature beside a heuristic."),
        "units": ("Units", "Saturated and dead units of the feed-forward parts."),
    }
    for section, records in (content["activations"] or {}).items():
        columns = [name for name in records[0] if name not in ERRORS.values()] if records else []
        lines = [[cell(record, name) for name in columns] for record in records]
        found.append(Table(*about[section], columns, lines))
    return [table for table in found if table.rows]


def _blocks(rows: Sequence[dict[str, Any]]) -> Iterator[list[Cell]]:
    for row in rows:
        yield [Cell(name_of(row)), *(cell(row, name) for name in BLOCKS)]


def _causes(content: Content) -> tuple[list[str], list[list[Cell]]]:
    """The largest shares, of either sign, of maps other than the loss."""
    found = []
    for block, causes in content["causes"].items():
        total = sum(causes["lambda_max"].values())
        for node, part in causes["lambda_max"].items():
            if node != "loss" and total > 0:
                found.append((100 * part / total, block, node))
    found.sort(key=lambda entry: -abs(entry[0]))
    columns = ["block", "source", "kind", "share"]
    return columns, [
        [Cell(short(block)), Cell(short(node)), Cell(content["kinds"][node]), Cell(f"{share:.1f}", share)]
        for share, block, node in found[:TOP]
    ]


def short(name: str) -> str:
    """Without what all names of blocks begin with."""
    return name.removeprefix("blocks.")


def cell(record: dict[str, Any], name: str) -> Cell:
    """One number with its error, or a text."""
    value = record[name]
    if value is None:
        return Cell("-")
    if isinstance(value, bool | str):
        return Cell(str(value))
    if isinstance(value, int):
        return Cell(f"{value:,}", value)
    error = record[ERRORS[name]] if name in ERRORS else 0.0
    text = str(Measured(value, error))
    if name == "condition" and not record["condition_is_exact"]:
        text = f"> {value:.3g}"
    return Cell(text, value)
