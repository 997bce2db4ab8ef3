"""A report as one page that needs nothing else: it opens without a network, in light and in dark."""

from __future__ import annotations

from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from hesscore.pages import Content
from hesscore.pages.definitions import DEFINITIONS
from hesscore.pages.figures import FIGURES, inline
from hesscore.pages.summary import summary
from hesscore.pages.tables import Table, tables

CAPTIONS = {
    "heat": ("How steep", "The spectral norm of every parameter's block. 0: no curvature beyond rounding."),
    "causes": (
        "What causes it",
        "The top eigenvalue of the sharpest blocks, split over the kinds of map that cause it.",
    ),
    "spectra": (
        "Spectra",
        "Density of eigenvalues of every matrix, on an axis that is linear near zero and logarithmic beyond. It is "
        "sampled: peaks near zero stand for many eigenvalues, single bumps far out for single ones.",
    ),
    "heterogeneity": ("Heterogeneity", "Gradient against curvature: a block off the diagonal wants a step of its own."),
    "gap": (
        "Curvature gap",
        "How the loss curves by the activation of one token, of the tokens that were drawn: a peak far above the mean "
        "is a token that dominates. Bars hold the mean in 95 of 100 cases.",
    ),
    "bounds": ("Bounds", "What the norms of the maps allow at most, beside what is: the bound grows with every layer."),
}
"""Title and reading aid of each figure."""


class Shown(NamedTuple):
    name: str
    title: str
    about: str
    svg: str


class Listed(NamedTuple):
    """A table, and which of its columns are numbers."""

    title: str
    about: str
    columns: list[str]
    rows: list[list[object]]
    numeric: list[bool]


def page(content: Content) -> str:
    """The page as HTML.  Whatever a file calls its tensors is shown, and never run."""
    environment = Environment(loader=PackageLoader("hesscore.pages", ""), autoescape=True, undefined=StrictUndefined)
    drawn = ((name, inline(content, name)) for name in FIGURES)
    shown = [Shown(name, *CAPTIONS[name], svg) for name, svg in drawn if svg is not None]
    listed = [_listed(table) for table in tables(content)]
    return environment.get_template("report.html.j2").render(
        summary=summary(content),
        figures=shown,
        tables=listed,
        definitions=DEFINITIONS,
        glossary=sorted({column for table in listed for column in table.columns}),
        version=content["hess_version"],
    )


def _listed(table: Table) -> Listed:
    numeric = [any(row[i].key is not None for row in table.rows) for i in range(len(table.columns))]
    return Listed(table.title, table.about, table.columns, [list(row) for row in table.rows], numeric)
