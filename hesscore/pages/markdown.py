"""A report in short, as for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hesscore.pages import Content
from hesscore.pages.summary import summary

SHARPEST = 10


def markdown(content: Content) -> str:
    """GitHub's Markdown: facts, verdicts, and a table of the sharpest blocks."""
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Content) -> Iterator[str]:
    found = summary(content, SHARPEST)
    yield f"## Curvature of {escaped(found.title)}"
    yield ""
    for fact in found.facts:
        yield f"- {escaped(fact)}"
    yield ""
    for verdict in found.verdicts:
        yield f"> {escaped(verdict)}"
        yield ">"
    if found.sharpest:
        yield ""
        yield "| block | lambda_max | what causes most of it |"
        yield "|---|---:|---|"
        for block in found.sharpest:
            yield f"| {escaped(block.name)} | {block.lambda_max} | {escaped(block.causes)} |"
        yield ""
        yield "(n) is the error of the last digits; parts of both signs may cancel."
    for note in found.notes:
        yield ""
        yield f"*{escaped(note)}*"


def escaped(text: str) -> str:
    """So that nothing in it is read as Markdown or HTML: it may come from a file that nobody vouches for."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&@!])", r"\\\1", " ".join(text.split()))
