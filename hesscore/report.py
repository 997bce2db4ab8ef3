"""The report: rows, where they came from, and how they are written.  The same columns everywhere."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import pandas as pd
import torch

import hesscore
from hesscore import blocks
from hesscore.analysis import COLUMNS, Row
from hesscore.output import SCHEMA_VERSION, plain
from hesscore.problem import Problem

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
        return [{name: plain(value) for name, value in asdict(row).items()} for row in self.rows]

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
            "loss_normalisation": f"mean over scored {'sequences' if problem.spec.pools else 'tokens'}",
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
