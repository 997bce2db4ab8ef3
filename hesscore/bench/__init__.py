"""The speed tables: ours, the rivals and the floor, side by side in one run.

A benchmark reports and asserts nothing about time.  It does check values: what is fast and wrong is no contestant.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hesscore.bench import attention, block, matrices, products
from hesscore.bench.timing import Case


def cases(quick: bool) -> Iterator[Case]:
    """All cases; ``quick`` ones are small, for their values rather than their times."""
    return chain.from_iterable(part.cases(quick) for part in (matrices, attention, block, products))


def environment() -> dict[str, Any]:
    """What a time depends on."""
    info = Path("/proc/cpuinfo")
    models = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
