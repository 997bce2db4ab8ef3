"""The report: rows, where they came from, and how they are written.  The same columns everywhere."""

from __future__ import annotations

import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, TypeVar

import pandas as pd
import torch

import hesscore
from hesscore import blocks
from hesscore.analysis import COLUMNS, Row
from hesscore.errors import UsageError
from hesscore.problem import Problem

SCHEMA_VERSION = 1


AnyRow = TypeVar("AnyRow", Row, blocks.BlockRow)


@dataclass
class _Report(ABC, Generic[AnyRow]):
    """Rows as they are finished, and what it takes to make them again."""

    columns: ClassVar[tuple[str, ...]]

    problem: Problem
    loss: float | dict[int, float]
    settings: Mapping[str, Any]
    """Seed, tolerance, scope and selection."""
    selected: Sequence[str]
    """The parameters that were asked for."""
    rows: list[AnyRow] = field(default_factory=list)
    duration: float = 0.0

    @property
    @abstractmethod
    def finished(self) -> set[str]:
        """The parameters that have all their rows."""

    @property
    def skipped(self) -> dict[str, str]:
        """All other parameters, and why."""
        finished = self.finished
        return {
            name: "interrupted" if name in self.selected else "not selected"
            for name in self.problem.graph.parameters
            if name not in finished
        }

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as they are written: a shape as ``64x256``, and None for a number that could not be had."""
        return [{name: _plain(value) for name, value in asdict(row).items()} for row in self.rows]

    @property
    def frame(self) -> pd.DataFrame:
        """The rows under their columns."""
        return pd.DataFrame(self.records, columns=list(self.columns)).astype({"layer": "Int64"})

    def to_csv(self) -> str:
        return self.frame.to_csv(index=False)

    def to_json(self) -> str:
        """Rows with their provenance."""
        problem = self.problem
        content = {
            "schema_version": SCHEMA_VERSION,
            "hess_version": hesscore.__version__,
            "torch_version": torch.__version__,
            "source": problem.source,
            **problem.provenance,
            "spec": problem.spec.model_dump(),
            "dtype": str(problem.dtype).removeprefix("torch."),
            "device": "cpu",
            **self.settings,
            "loss": self.loss,
            "loss_normalisation": "mean over scored tokens",
            "scored_tokens": problem.scored,
            "duration_seconds": round(self.duration, 3),
            "notes": problem.notes,
            "skipped": self.skipped,
            "rows": self.records,
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


@dataclass
class Report(_Report[Row]):
    """The report of a model: a row for each parameter."""

    columns = COLUMNS
    loss: float

    @property
    def finished(self) -> set[str]:
        return {row.name for row in self.rows}


@dataclass
class BlockReport(_Report[blocks.BlockRow]):
    """The report of blocks on their own: a row for each pair of parameters, in each part of the Hessian."""

    columns = blocks.COLUMNS
    loss: dict[int, float]
    """By layer."""

    @property
    def finished(self) -> set[str]:
        found = Counter(f"blocks.{row.layer}.{name}" for row in self.rows for name in {row.row, row.column})
        return {
            name
            for names in blocks.by_layer(self.selected).values()
            for name in names
            if found[name] == len(blocks.PARTS) * len(names)
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return None if isinstance(value, float) and not isfinite(value) else value


def check_writable(outputs: Sequence[str | None], inputs: Sequence[str | None] = ()) -> None:
    """Refuse, before any work, what could not be written at the end, or would overwrite an input or another output."""
    read = {os.path.realpath(path) for path in inputs if path is not None}
    written = set()
    for path in outputs:
        if path is None:
            continue
        target = path if path == "-" else os.path.realpath(path)
        if target in written:
            raise UsageError(f"two outputs cannot both go to {'stdout' if path == '-' else path}")
        written.add(target)
        if target in read:
            raise UsageError(f"{path}: is an input, and would be overwritten")
        if path != "-" and (why := _refusal(path, Path(target))):
            raise UsageError(f"{path or repr(path)}: cannot be written: {why}")


def _refusal(path: str, target: Path) -> str | None:
    """Why ``path``, which leads to ``target``, cannot be written."""
    if not os.path.basename(path):
        return "not the name of a file"
    try:
        Path(path).stat()
    except FileNotFoundError:
        places = [target.parent]
    except OSError as error:
        return error.strerror
    else:
        places = [Path(path)] if _is_stream(path) else [target.parent, target]
    if target.is_dir():
        return "a folder"
    if not all(os.access(place, os.W_OK) for place in places):
        return "no such folder, or no right to write there"
    return None


def deliver(outputs: Mapping[str | None, str | bytes], show: Callable[[], None]) -> None:
    """Write each content to its path, if it has one; where none goes to stdout, ``show`` prints there.

    An output that fails does not cost the others: ``UsageError`` comes at the end. stdout is last, as its reader may
    leave early, and that ends hess.
    """
    contents = {path: content for path, content in outputs.items() if path is not None}
    steps: list[Callable[[], None]] = [
        partial(write, path, contents[path]) for path in sorted(contents, key="-".__eq__)
    ]
    if "-" not in contents:
        steps.append(show)
    failures = []
    for step in steps:
        try:
            step()
            sys.stdout.flush()  # here, so that it fails with the others
        except UsageError as error:
            failures.append(str(error))
    if failures:
        raise UsageError("; ".join(failures))


def write(path: str, content: str | bytes) -> None:
    """Write all of ``content`` or nothing; ``-`` is stdout.  Of the main thread, as all that has to do with Ctrl-C."""
    if path == "-":
        sys.stdout.write(content if isinstance(content, str) else content.decode())
        return
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_stream(path):
            Path(path).write_bytes(data)
            return
        target = Path(os.path.realpath(path))  # a link stays one
        # Not a temporary file, which nobody else could read: a folder, and in it a file as any other.
        with _uninterrupted(), TemporaryDirectory(prefix=".hess-", dir=target.parent) as folder:
            whole = Path(folder, "whole")
            whole.write_bytes(data)
            whole.replace(target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C for the moment that a file takes: no way of cleaning up would survive being interrupted itself."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: asked.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)


def _is_stream(path: str) -> bool:
    """Whether there is a pipe or a device, which is written to and not replaced: ``/dev/null`` must stay what it is."""
    return os.path.exists(path) and not os.path.isfile(path)
