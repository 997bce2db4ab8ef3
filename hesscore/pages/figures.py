"""Every picture of a report, by name; one file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hesscore.pages import Content
from hesscore.pages.bounds import bounds
from hesscore.pages.causes import causes
from hesscore.pages.gap import gap
from hesscore.pages.heat import heat
from hesscore.pages.heterogeneity import heterogeneity
from hesscore.pages.spectra import spectra
from hesscore.pages.style import INK, drawing
from hesscore.picture import written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: dict[str, Callable[[Content], Figure | None]] = {
    "heat": heat,
    "causes": causes,
    "spectra": spectra,
    "heterogeneity": heterogeneity,
    "gap": gap,
    "bounds": bounds,
}
"""Each gives nothing where its data are absent."""


def figure(content: Content, name: str) -> Figure | None:
    """One of ``FIGURES``, as matplotlib has it."""
    with drawing():
        return FIGURES[name](content)


def draw(content: Content, name: str, path: str) -> bytes | None:
    """A figure in the format of ``path``, .svg or .png."""
    with drawing():
        drawn = FIGURES[name](content)
        return None if drawn is None else written(drawn, path, bbox_inches="tight", facecolor="white")


def inline(content: Content, name: str) -> str | None:
    """A figure as an SVG element, in the colour of the text around it."""
    with drawing():
        drawn = FIGURES[name](content)
        if drawn is None:
            return None
        svg = written(drawn, "inline.svg", bbox_inches="tight", transparent=True).decode()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")
