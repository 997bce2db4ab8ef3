"""The report: rows, where they came from, and how they are written.  The same columns everywhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import hesscore
from hesscore.analysis import COLUMNS, Row
from hesscore.errors import UsageError
from hesscore.problem import Problem

SCHEMA_VERSION = 1


@dataclass
class Report:
    """Rows as they are finished, and what it takes to make them again."""

    problem: Problem
    loss: float
    settings: Mapping[str, Any]
    """Seed, tolerance and selection."""
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Parameters without a row, and why."""
    duration: float = 0.0

    @property
    def frame(self) -> pd.DataFrame:
        """One row a parameter block, columns as in ``analysis.Row``."""
        frame = pd.DataFrame([asdict(row) for row in self.rows], columns=list(COLUMNS))
        return frame.astype({"layer": "Int64"}).assign(shape=["x".join(map(str, row.shape)) for row in self.rows])

    def to_csv(self) -> str:
        return self.frame.to_csv(index=False)

    def to_json(self) -> str:
        """Rows with their provenance; a number that could not be had is ``null``."""
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
            "rows": [{name: _plain(value) for name, value in asdict(row).items()} for row in self.rows],
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def check_writable(paths: Sequence[str | None], inputs: Sequence[str | None] = ()) -> None:
    """Refuse, before any work, a path that could not be written at the end, or that would overwrite an input."""
    read = {Path(path).resolve() for path in inputs if path is not None}
    for path in paths:
        if path is None or path == "-":
            continue
        target = Path(path).resolve()
        if target in read:
            raise UsageError(f"{path}: is an input, and would be overwritten")
        if target.is_dir():
            raise UsageError(f"{path}: cannot be written: a folder")
        if not _may_write(path, target):
            raise UsageError(f"{path}: cannot be written: no such folder, or no right to write there")


def _may_write(path: str, target: Path) -> bool:
    if _is_stream(path):
        return os.access(path, os.W_OK)
    there = [target.parent, target] if target.exists() else [target.parent]
    return target.parent.is_dir() and all(os.access(place, os.W_OK) for place in there)


def write(path: str, text: str) -> None:
    """Write all of ``text`` or nothing; ``-`` is stdout."""
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path).resolve()  # a link stays one
    partial = f"{target}.{os.getpid()}.partial"
    try:
        if _is_stream(path):
            Path(path).write_text(text, encoding="utf-8")
            return
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def _is_stream(path: str) -> bool:
    """Whether there is a pipe or a device, which is written to and not replaced: ``/dev/null`` must stay what it is."""
    return os.path.exists(path) and not os.path.isfile(path)
