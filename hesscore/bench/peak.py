"""Peak memory of a contestant, in a process of its own: ``python -m hesscore.bench.peak CASE CONTESTANT QUICK``."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil

from hesscore.bench import cases
from hesscore.bench.timing import Case, Timing


def peak_bytes(case: Case, timing: Timing, quick: bool) -> int:
    """Resident bytes at the highest, beyond those of Python, torch and the data."""
    name = f"{case.name}, {case.size}"
    words = [sys.executable, "-m", "hesscore.bench.peak", name, timing.contestant, str(int(quick))]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def main(wanted: str, contestant: str, quick: str) -> None:
    case = next(case for case in cases(bool(int(quick))) if f"{case.name}, {case.size}" == wanted)
    before = psutil.Process().memory_info().rss
    run = next(c for c in case.contestants if c.name == contestant).prepare()
    run()
    print(max(0, _highest() - before))


def _highest() -> int:
    """The kernel's own high-water mark of this program: that of ``getrusage`` begins at the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
