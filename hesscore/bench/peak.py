"""Peak memory of a contestant, in a process of its own: ``python -m hesscore.bench.peak CASE CONTESTANT QUICK``.

The kernel keeps the high-water mark of a process, and Linux can set it back: elsewhere there is nothing to tell.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hesscore.bench import cases
from hesscore.bench.timing import Case, Run, Timing

FORGET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


class Peaks(NamedTuple):
    """As in ``timing.Timing``."""

    peak_bytes: int
    run_bytes: int


def peaks(case: Case, timing: Timing, quick: bool) -> Peaks | None:
    """Those of a contestant, or ``None`` where the system does not tell."""
    words = [sys.executable, "-m", "hesscore.bench.peak", case.title, timing.contestant, str(int(quick))]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found and Peaks(*found)


def main(title: str, contestant: str, quick: str) -> None:
    case = next(case for case in cases(bool(int(quick))) if case.title == title)
    prepare = next(c for c in case.contestants if c.name == contestant).prepare
    prepare()()  # code is loaded at its first use
    print(json.dumps(_measure(prepare) if FORGET.exists() else None))


def _measure(prepare: Callable[[], Run]) -> Peaks:
    start = _fresh_mark()
    run = prepare()
    highest = _mark()
    prepared = _fresh_mark()
    run()
    return Peaks(max(highest, _mark()) - start, _mark() - prepared)


def _fresh_mark() -> int:
    """Set the high-water mark back to what is resident, which is returned, without what is free already."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    FORGET.write_text("5")
    return _mark()


def _mark() -> int:
    return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
