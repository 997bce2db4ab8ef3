"""Time: what a run may take, shared out over its steps in proportion to their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic


@dataclass(frozen=True)
class Stop:
    """Whether the time is up."""

    end: float = inf

    def __call__(self) -> bool:
        return monotonic() >= self.end

    def left(self) -> float:
        """Seconds."""
        return self.end - monotonic()


NEVER = Stop()


class Budget:
    """``seconds`` from now on for so much ``work``, in any unit; ``None`` is no limit.

    What a step leaves unused goes to those after it.
    """

    def __init__(self, seconds: float | None, work: float) -> None:
        self.end = None if seconds is None else monotonic() + seconds
        self.work = work

    def step(self, work: float, parts: Sequence[float] = (1.0,)) -> list[Stop]:
        """When each of the ``parts`` of the next step should stop; these are their shares of it."""
        left, self.work = self.work, self.work - work
        if self.end is None:
            return [NEVER] * len(parts)
        start = monotonic()
        length = max(self.end - start, 0.0) * min(work / max(left, work), 1.0)
        return [Stop(start + length * sum(parts[: i + 1])) for i in range(len(parts))]
