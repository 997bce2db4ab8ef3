"""``hess plot``: pictures and pages of a stored report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .render import show


def plot(
    report: Annotated[str, typer.Argument(metavar="REPORT", help="What hess analyze --json wrote.")],
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Write every figure into it.")] = None,
    format: Annotated[str, typer.Option(metavar="KIND", help="Of the figures: svg or png.")] = "svg",
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write the page with all of it.")] = None,
    md: Annotated[str | None, typer.Option(metavar="FILE", help="Write the summary in Markdown; - is stdout.")] = None,
) -> None:
    """Draw a stored report.

    Every figure as SVG or PNG, the page with all of it, or a summary in Markdown.
    """
    from hesscore.errors import UsageError
    from hesscore.output import check_writable, deliver
    from hesscore.pages.figures import FIGURES, draw
    from hesscore.pages.markdown import markdown
    from hesscore.pages.page import page
    from hesscore.stored import read_report

    if not (out or html or md):
        raise UsageError("name what to write: --out FOLDER, --html FILE or --md FILE")
    if format not in ("svg", "png"):
        raise UsageError(f"--format {format}: give svg or png")
    if out is not None and not Path(out).is_dir():
        raise UsageError(f"--out {out}: no such folder")
    paths = {name: str(Path(out) / f"{name}.{format}") for name in FIGURES} if out is not None else {}
    check_writable([*paths.values(), html, md], [report])
    content = read_report(report)
    found: dict[str | None, str | bytes] = {
        path: drawn for name, path in paths.items() if (drawn := draw(content, name, path)) is not None
    }
    written = list(filter(None, found))
    if html is not None:
        found[html] = page(content)
    if md is not None:
        found[md] = markdown(content)
    deliver(found, lambda: show(*written))
