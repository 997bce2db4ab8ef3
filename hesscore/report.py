"""The report: rows, where they came from, and how they are written.  The same columns everywhere."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import pandas as pd
import torch
from torch import Tensor

import hesscore
from hesscore import blocks
from hesscore.activations import Activations
from hesscore.analysis import COLUMNS, Finding, Row
from hesscore.errors import UsageError
from hesscore.heterogeneity import Heterogeneity, heterogeneity
from hesscore.output import finite, plain
from hesscore.problem import Problem
from hesscore.spectrum.sampling import Density
from hesscore.stability import Stability, stability

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyRow = TypeVar("AnyRow", Row, blocks.BlockRow)


@dataclass
class _Report(ABC, Generic[AnyRow]):
    """Rows as they are finished, and what it takes to make them again."""

    columns: ClassVar[tuple[str, ...]]
    schema_version: ClassVar[int]

    problem: Problem
    loss: float | dict[int, float]
    settings: Mapping[str, Any]
    """Seed, tolerance, scope and selection."""
    selected: Sequence[str]
    """The parameters that were asked for."""
    duration: float = field(default=0.0, kw_only=True)

    @property
    @abstractmethod
    def rows(self) -> Sequence[AnyRow]: ...

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
        return [_record(row) for row in self.rows]

    @property
    def frame(self) -> pd.DataFrame:
        """The rows under their columns."""
        return pd.DataFrame(self.records, columns=list(self.columns)).astype({"layer": "Int64"})

    @property
    def content(self) -> dict[str, Any]:
        """Rows with their provenance, as the JSON holds them."""
        problem = self.problem
        return {
            "schema_version": self.schema_version,
            "hess_version": hesscore.__version__,
            "torch_version": torch.__version__,
            "source": problem.source,
            **problem.provenance,
            "spec": problem.spec.model_dump(mode="json"),
            "n_params": sum(weight.numel() for weight in problem.parameters.values()),
            "dtype": str(problem.dtype).removeprefix("torch."),
            "device": "cpu",
            **self.settings,
            "loss": self.loss,
            "loss_normalisation": f"mean over scored {'sequences' if problem.spec.pools else 'tokens'}",
            "scored_tokens": problem.scored,
            "duration_seconds": round(self.duration, 3),
            "notes": list(problem.notes),
            "skipped": self.skipped,
            "rows": self.records,
        }

    def to_csv(self) -> str:
        return self.frame.to_csv(index=False)

    def to_json(self) -> str:
        return json.dumps(self.content, indent=1, allow_nan=False) + "\n"


@dataclass
class Report(_Report[Row]):
    """The report of a model: a row for each parameter, and what follows from all of them together."""

    columns = COLUMNS
    schema_version = 2

    loss: float
    findings: list[Finding] = field(default_factory=list)
    """Of the blocks, in the order of the model."""
    gradient: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    whole: Finding | None = None
    """Of all parameters together, where all were asked for."""
    activations: Activations | None = None

    @property
    def rows(self) -> list[Row]:
        return [finding.row for finding in self.findings]

    @property
    def finished(self) -> set[str]:
        return {row.name for row in self.rows}

    def figure(self, name: str = "causes") -> Figure:
        """One of the pictures of ``hesscore.pages.figures``; ``UsageError`` if there is nothing to be seen in it."""
        from hesscore.pages.figures import FIGURES, figure

        if name not in FIGURES:
            raise UsageError(f"no figure is named {name}: there are {', '.join(FIGURES)}")
        drawn = figure(self.content, name)
        if drawn is None:
            raise UsageError(f"there is nothing to be seen in {name}: the report has no numbers for it")
        return drawn

    def _repr_html_(self) -> str:
        """The rows, where a notebook shows the report."""
        return self.frame.to_html()

    @cached_property
    def heterogeneity(self) -> Heterogeneity | None:
        """Of the blocks, where there are several."""
        return heterogeneity(self.findings, self.gradient)

    @cached_property
    def stability(self) -> Stability | None:
        """Of the whole model, where all of it was asked for."""
        return stability(self.rows, self.whole.row, self.problem.optimizer) if self.whole and self.rows else None

    @property
    def content(self) -> dict[str, Any]:
        everything = [*self.findings, *([self.whole] if self.whole else [])]
        nodes = {node for finding in everything for node in (*finding.causes, *finding.trace_causes)}
        kinds = {node.name: node.kind for node in self.problem.graph.nodes if node.name in nodes}
        found = {
            "model": _record(self.whole.row) if self.whole else None,
            "heterogeneity": asdict(self.heterogeneity) if self.heterogeneity else None,
            "stability": asdict(self.stability) if self.stability else None,
            "activations": self.activations.records if self.activations else None,
            "kinds": kinds,
            "causes": {finding.row.name: _causes(finding) for finding in everything if finding.causes},
            "spectra": {f.row.name: _spectrum(f.density) for f in everything if f.density is not None},
        }
        return super().content | finite(found)


def _record(row: Row | blocks.BlockRow) -> dict[str, Any]:
    return {name: plain(value) for name, value in asdict(row).items()}


def _causes(finding: Finding) -> dict[str, Any]:
    """What causes ``lambda_max`` and the trace, by node."""
    return {
        "lambda_max": {node: _digits(part, 9) for node, part in finding.causes.items() if part},
        "trace": {node: [_digits(x, 9) for x in part] for node, part in finding.trace_causes.items() if part.value},
    }


def _spectrum(density: Density) -> dict[str, list[float]]:
    return {
        "eigenvalues": [_digits(x, 6) for x in density.eigenvalues.tolist()],
        "weights": [_digits(x, 6) for x in density.weights.tolist()],
    }


def _digits(number: float, digits: int) -> float:
    return float(f"{number:.{digits}g}")


@dataclass
class BlockReport(_Report[blocks.BlockRow]):
    """The report of blocks on their own: a row for each pair of parameters, in each part of the Hessian."""

    columns = blocks.COLUMNS
    schema_version = 1

    loss: dict[int, float]
    """By layer."""
    found: list[blocks.BlockRow] = field(default_factory=list)

    @property
    def rows(self) -> list[blocks.BlockRow]:
        return self.found

    @property
    def finished(self) -> set[str]:
        found = Counter(f"blocks.{row.layer}.{name}" for row in self.rows for name in {row.row, row.column})
        return {
            name
            for names in blocks.by_layer(self.selected).values()
            for name in names
            if found[name] == len(blocks.PARTS) * len(names)
        }
