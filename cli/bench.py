"""``hess bench``: the speed tables."""

from __future__ import annotations

import json as text
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isnan
from typing import TYPE_CHECKING, Annotated

import typer

from hesscore import __version__

from .options import Json, Quiet
from .process import keep_on_interrupt
from .render import message, progress, show, table

if TYPE_CHECKING:
    from hesscore.bench.timing import Timing

COLUMNS = ("contestant", "time (ms)", "ratio", "memory (MB)", "error")


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: for the values, not for the times.")] = False,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Time the closed forms beside autograd and the floor.

    Exit 1 if two contestants disagree about a value; times are reported, not judged.
    """
    from hesscore.bench import cases, environment
    from hesscore.bench.peak import peak_bytes
    from hesscore.bench.timing import measure
    from hesscore.report import check_writable, deliver

    check_writable([json])
    todo = list(cases(quick))
    timings: list[Timing] = []
    done = 0
    keep_on_interrupt()
    try:
        with progress("bench", len(todo), quiet) as advance:
            for case in todo:
                found = measure(case)
                if case.memory:
                    found = [replace(timing, peak_bytes=peak_bytes(case, timing, quick)) for timing in found]
                timings += found
                done += 1
                advance(1)
    except KeyboardInterrupt:
        message(f"interrupted: {done} of {len(todo)} cases are finished")
    about = {"schema_version": 1, "hess_version": __version__, "quick": quick, **environment()}
    rows = [asdict(timing) | {"error": None if isnan(timing.error or 0) else timing.error} for timing in timings]
    record = text.dumps(about | {"rows": rows}, indent=1, allow_nan=False) + "\n"
    deliver({json: record}, lambda: _show(timings))
    if done < len(todo):
        raise typer.Exit(130)
    wrong = [timing for timing in timings if not timing.right]
    for timing in wrong:
        message(f"{timing.case}, {timing.size}: {timing.contestant} is off by {timing.error:.1e}")
    if wrong:
        raise typer.Exit(1)


def _show(timings: Sequence[Timing]) -> None:
    """A table for each case; the ratio is to the time of our first contestant."""
    for case, size in dict.fromkeys((timing.case, timing.size) for timing in timings):
        rows = [timing for timing in timings if (timing.case, timing.size) == (case, size)]
        ours = rows[0].seconds
        show(f"{case}: {size}")
        table(
            COLUMNS,
            [
                [
                    f"{row.contestant} ({row.role})",
                    1e3 * row.seconds,
                    row.seconds / ours,
                    None if row.peak_bytes is None else row.peak_bytes / 1e6,
                    row.error,
                ]
                for row in rows
            ],
        )
        show("")
