"""Memory: what is free, what a run will take, and the refusal of what would not fit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import psutil
from pydantic import ByteSize, TypeAdapter, ValidationError

from hesscore.errors import InputError, UsageError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


SHARE = 0.9
"""Of what can be taken without swapping, where no limit is given: other programs go on."""

_limit: int | None = None


def limit(size: str | None) -> None:
    """Let this process take no more than ``size``, as ``8GiB``, in all; ``None`` is no limit."""
    global _limit
    try:
        _limit = None if size is None else TypeAdapter(ByteSize).validate_python(size)
    except ValidationError:
        raise UsageError(f"--memory-limit {size}: give it as 8GiB or 500MB") from None


def free() -> int:
    """Bytes that may still be taken."""
    unused = int(SHARE * psutil.virtual_memory().available)
    return unused if _limit is None else max(0, min(unused, _limit - psutil.Process().memory_info().rss))


def excess(need: int) -> str | None:
    """What to say of a ``need`` in bytes that is not free; ``None`` if it is."""
    available = free()
    if need <= available:
        return None
    return f"would take {need / 2**30:.3g} GiB of memory; {available / 2**30:.3g} are free"


def check(need: int, what: str) -> None:
    """Say what is about to be taken, and refuse what is not free."""
    log.info("%s: %.3g GiB", what, need / 2**30)
    if said := excess(need):
        raise InputError(f"{what} {said}")


def threads(parts: int) -> int:
    """How many parts of the data are worked on at a time; one where there are none."""
    import torch  # not before: bounds from scalars do without

    return max(1, min(parts, torch.get_num_threads()))


def working(parameters: int, parts: int, part: int, dtype: torch.dtype) -> int:
    """Bytes of a point and its products, where ``parts`` of the data keep ``part`` bytes each, beside the weights.

    Each thread has a part in float64 before it is rounded, and works in up to two more, counting what the allocator
    does not hand back.  Sums have a gradient a thread: in float64, as have the weights.
    """
    at_once = threads(parts)
    return part * parts + at_once * part * (2 + 8 // dtype.itemsize) + 8 * parameters * (2 + at_once)
