"""``hess bench``: the speed tables."""

from __future__ import annotations

import json as text
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hesscore import __version__

from .options import Json, Quiet
from .process import keep_on_interrupt
from .render import Measured, message, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.bench.timing import Timing

COLUMNS = ("contestant", "time (ms)", "/ ours", "/ floor", "error")
MEMORY = ("peak (MB)", "of a run (MB)")


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: for the values alone.")] = False,
    json: Json = None,
    md: Annotated[str | None, typer.Option(metavar="FILE", help="Write the tables as Markdown; - is stdout.")] = None,
    quiet: Quiet = False,
) -> None:
    """Time the closed forms beside autograd and the floor.

    Exit 1 if two contestants disagree about a value; times and peak memory are reported, not judged.
    """
    from hesscore.bench import cases, environment
    from hesscore.bench.page import page
    from hesscore.bench.peak import peaks
    from hesscore.bench.tightness import tightness
    from hesscore.bench.timing import measure
    from hesscore.output import SCHEMA_VERSION, check_writable, deliver

    check_writable([json, md])
    todo = list(cases(quick))
    timings: list[Timing] = []
    done, tight = 0, None
    keep_on_interrupt()
    try:
        with progress("bench", len(todo), quiet) as advance:
            for case in todo:
                found = measure(case)
                taken = {} if quick else peaks(case, quick)
                timings += [replace(timing, **taken.get(timing.contestant, {})) for timing in found]
                done += 1
                advance(1)
        tight = tightness()
    except KeyboardInterrupt:
        message(f"interrupted: {done} of {len(todo)} cases are finished")
    about = {"schema_version": SCHEMA_VERSION, "hess_version": __version__, "quick": quick, **environment()}
    rows = [asdict(timing) | {"error": None if isnan(timing.error or 0) else timing.error} for timing in timings]
    record = about | {"rows": rows, "tightness": tight or []}
    deliver({json: text.dumps(record, indent=1, allow_nan=False) + "\n", md: page(record)}, lambda: _show(rows))
    if tight is None:
        raise typer.Exit(130)
    wrong = [timing for timing in timings if not timing.right]
    for timing in wrong:
        message(f"{timing.case}, {timing.size}: {timing.contestant} is off by {timing.error:.1e}")
    if wrong:
        raise typer.Exit(1)


def _show(rows: Iterable[Mapping[str, Any]]) -> None:
    """A table for each case; ratios are to our first contestant and to the floor."""
    from hesscore.bench.page import by_case, ratios

    for (case, size), several in by_case(rows).items():
        measured = any(row["peak_bytes"] is not None for row in several)
        show(f"{case}: {size}")
        table(COLUMNS + MEMORY * measured, [list(_cells(row, ratios(row, several), measured)) for row in several])
        show("")


def _cells(row: Mapping[str, Any], ratios: Iterable[float | None], measured: bool) -> Iterator[object]:
    yield f"{row['contestant']} ({row['role']})"
    for number in 1e3 * row["seconds"], *ratios:
        yield Measured(number) if on_terminal() else number
    yield row["error"] and float(f"{row['error']:.1e}")
    if measured:
        for size in row["peak_bytes"], row["run_bytes"]:
            yield size and size / 1e6
