"""Time and memory of contestants that do the same thing."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

Run = Callable[[], Any]
Role = Literal["ours", "rival", "floor"]

SECONDS = 0.2
"""How long a contestant runs in all; ``LEAST`` times if it is slow, ``MOST`` times if it is fast."""
LEAST, MOST = 3, 1000

KEPT_AT_HAND = 2**25
"""Bytes of the largest array whose memory glibc may keep for the next one: what is larger is fresh in every call."""

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Of a matrix, by its dtype."""

GLIBC = platform.libc_ver()[0] == "glibc"


@dataclass(frozen=True)
class Contestant:
    """``prepare`` does what is not measured, and returns what is; ``value`` makes a tensor of its result."""

    name: str
    role: Role
    prepare: Callable[[], Run]
    value: Callable[[Any], Tensor] | None = None


def writing(*shape: int, dtype: torch.dtype) -> Contestant:
    """The floor of whatever returns a matrix: to allocate one and to fill it."""
    return Contestant("writing it once", "floor", lambda: lambda: torch.empty(shape, dtype=dtype).fill_(1.0))


@dataclass(frozen=True)
class Case:
    """One thing to compute.  ``tolerance`` is the largest relative distance between the values of two contestants."""

    name: str
    size: str
    contestants: tuple[Contestant, ...]
    tolerance: float
    result_bytes: int = 0
    """Of the matrix that is written, if one is."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.size}"

    @property
    def fresh(self) -> bool:
        """Whether every run starts from an allocator that holds nothing, and so pays for the memory that it takes."""
        return self.result_bytes > KEPT_AT_HAND


@dataclass(frozen=True)
class Timing:
    """Seconds, the median over the repeats, and how far the value is from that of the first contestant that has one."""

    case: str
    size: str
    contestant: str
    role: Role
    seconds: float
    repeats: int
    error: float | None
    tolerance: float
    peak_bytes: int | None = None
    """Of all that the value takes, beyond Python, torch and the data."""
    run_bytes: int | None = None
    """Of what is timed, beyond what the preparation left behind."""

    @property
    def right(self) -> bool:
        """Whether the value, if there is one to compare, is that of the first contestant; NaN never is."""
        return self.error is None or self.error <= self.tolerance


def measure(case: Case) -> list[Timing]:
    """Every contestant in turn, round after round, so that what slows the machine down slows all of them."""
    runs = {c.name: c.prepare() for c in case.contestants}
    errors = _errors(case, runs)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # caches, threads and allocators warm up
    give_back()
    gc.freeze()  # then it takes microseconds to collect what a run leaves behind
    while active := [name for name, times in spent.items() if _goes_on(times)]:
        for name in active:
            if case.fresh:
                give_back()
            started = perf_counter()
            result = runs[name]()
            spent[name].append(perf_counter() - started)
            del result  # takes time as well, and the next one would have to do without its memory
    gc.unfreeze()
    return [
        Timing(
            case=case.name,
            size=case.size,
            contestant=c.name,
            role=c.role,
            seconds=median(spent[c.name]),
            repeats=len(spent[c.name]),
            error=errors.get(c.name),
            tolerance=case.tolerance,
        )
        for c in case.contestants
    ]


def give_back() -> None:
    """Give free memory back to the system, that of garbage too: else who comes next has it for nothing.

    Only glibc can be asked to.
    """
    gc.collect()
    if GLIBC:
        ctypes.CDLL(None).malloc_trim(0)


def _errors(case: Case, runs: Mapping[str, Run]) -> dict[str, float]:
    """Of all that have a value, by name."""
    values = {c.name: c.value(runs[c.name]()) for c in case.contestants if c.value}
    right = next(iter(values.values()), None)
    return {name: float((value - right).norm() / right.norm()) for name, value in values.items() if right is not None}


def _goes_on(times: list[float]) -> bool:
    return len(times) < LEAST or (len(times) < MOST and sum(times) < SECONDS)
