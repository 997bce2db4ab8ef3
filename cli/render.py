"""What a person sees: tables on stdout, messages and progress on stderr. The only user of rich.

rich is loaded only where a terminal is there to show it; it honours ``NO_COLOR``.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from hesscore.measured import Measured

SHADES = ("#ffffd9", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84")
"""From small to large; the first half is light enough for black on it."""

FOLDED = 16
"""Columns to which text may be folded where a terminal is narrow."""


def on_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout.isatty()


def show(*lines: str) -> None:
    """Print lines of a report on stdout."""
    for line in lines:
        print(_printable(line))


def message(text: str) -> None:
    """Print one line on stderr."""
    print(_printable(text), file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = ()) -> None:
    """Print ``rows`` under ``columns``: rounded on a terminal, every digit in a pipe, never cut short.

    A terminal that is too narrow for all columns does without those in ``spare``, the first of them first, as few as
    it can, and says so.
    """
    records = [list(row) for row in rows]
    cells = [[_cell(value, rounded=on_terminal()) for value in record] for record in records]
    number = int | float | Measured | None
    numeric = [all(isinstance(record[i], number) for record in records) for i in range(len(columns))]
    if on_terminal():
        _rich_table(columns, cells, numeric, spare)
    else:
        _plain_table(columns, cells, numeric)


def notes(found: Iterable[tuple[str, str]]) -> None:
    """Print each note once, with the names of all that it is of."""
    names: dict[str, list[str]] = {}
    for name, note in found:
        if note:
            names.setdefault(note, []).append(name)
    show(*(f"{note}: {', '.join(of)}" for note, of in names.items()))


def heat(labels: Sequence[str], values: Sequence[Sequence[float | None]]) -> None:
    """Print a square of numbers on a terminal, each on a shade of its own; a dot is none."""
    from rich.console import Console
    from rich.text import Text

    known = [value for line in values for value in line if value is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    width, left = max(6, 1 + max(map(len, labels))), max(map(len, labels))
    console = Console(highlight=False)
    console.width = max(console.width, 2 + left + width * len(labels))  # rich would fold what does not fit
    console.print(Text(" " * (2 + left) + "".join(f"{label:>{width}}" for label in labels)))
    for label, line in zip(labels, values, strict=True):
        text = Text(f"  {label:<{left}}")
        for value in line:
            if value is None:
                text.append(f"{'.':>{width}}")
                continue
            shade = min(int(len(SHADES) * (value - low) / (span or 1)), len(SHADES) - 1)
            ink = "black" if shade < len(SHADES) / 2 else "white"
            text.append(f"{value + 0.0:{width}.2f}", f"{ink} on {SHADES[shade]}")
        console.print(text)


@contextmanager
def progress(task: str, total: float, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Show how far ``task`` is and the time left, on stderr; what it yields adds to what is done."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    # Left to itself, rich would send what is printed to stdout to its own stream: data would end on stderr.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task_id = bar.add_task(task, total=total)
        yield lambda done: bar.advance(task_id, done)


def _printable(text: str) -> str:
    """One line, control characters as escapes: names come from files that nobody vouches for."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _cell(value: object, rounded: bool) -> str:
    if value is None:
        return "-"
    if rounded and isinstance(value, float):
        return f"{value:.4g}"
    return _printable(str(value))


def _plain_table(columns: Sequence[str], cells: list[list[str]], numeric: list[bool]) -> None:
    lines = [list(columns), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(padded).rstrip())


def _rich_table(columns: Sequence[str], cells: list[list[str]], numeric: list[bool], spare: Sequence[str] = ()) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    # Numbers stay whole; a name is broken only if it crowds out the rest.
    whole = [right or (i == 0 and widths[0] <= console.width // 3) for i, right in enumerate(numeric)]
    least = [2 + (width if kept else min(width, FOLDED)) for width, kept in zip(widths, whole, strict=True)]
    shown = list(range(len(columns)))
    for i in map(columns.index, spare):
        if sum(least[j] for j in shown) > console.width:
            shown.remove(i)
    console.width = max(console.width, sum(least[i] for i in shown))  # rich would crop what does not fit
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i in shown:
        grid.add_column(columns[i], justify="right" if numeric[i] else "left", no_wrap=whole[i], overflow="fold")
    for line in cells:
        grid.add_row(*(Text(line[i]) for i in shown))  # Text, because a plain str would be read as rich's markup
    console.print(grid)
    if len(shown) < len(columns):
        left_out = ", ".join(column for i, column in enumerate(columns) if i not in shown)
        print(f"A wider terminal shows {left_out}, too.")
