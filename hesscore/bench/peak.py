"""Peak memory of contestants, in a process for each case: ``python -m hesscore.bench.peak CASE QUICK``.

The kernel keeps the high-water mark of a process, and Linux can set it back: elsewhere there is nothing to tell.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hesscore.bench import cases
from hesscore.bench.timing import Case, Run, give_back

FORGET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")

Peaks = dict[str, Any]
"""``peak_bytes`` and ``run_bytes``, as in ``timing.Timing``."""


def peaks(case: Case, quick: bool) -> dict[str, Peaks]:
    """Those of its contestants, by name; of none where the system does not tell."""
    words = [sys.executable, "-m", "hesscore.bench.peak", case.title, str(int(quick))]
    found: dict[str, Peaks] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found


def main(title: str, quick: str) -> None:
    case = next(case for case in cases(bool(int(quick))) if case.title == title)
    print(json.dumps({c.name: peak_of(c.prepare) for c in case.contestants} if FORGET.exists() else {}))


def peak_of(prepare: Callable[[], Run]) -> Peaks:
    """Of a contestant, after a first run: code is loaded at its first use."""
    prepare()()
    start = _fresh_mark()
    run = prepare()
    highest = _mark()
    prepared = _fresh_mark()
    run()
    last = _mark()
    least = min(start, prepared)  # Python itself gives a page back now and then
    return {"peak_bytes": max(highest, last) - least, "run_bytes": last - prepared}


def _fresh_mark() -> int:
    """Set the high-water mark back to what is resident, which is returned, without what is free already."""
    give_back()
    FORGET.write_text("5")
    return _mark()


def _mark() -> int:
    return 1024 * int(STATUS.read_text().partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
