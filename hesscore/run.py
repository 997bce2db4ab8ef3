"""A whole report, step by step, within the time that is given; and the door to it for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from hesscore.activations import Activations, measure
from hesscore.analysis import Analyst, Finding, cost, select
from hesscore.budget import Budget
from hesscore.errors import UsageError
from hesscore.problem import Problem, open_problem
from hesscore.report import Report
from hesscore.spec import Loss

USED = 0.7
"""Of a budget: steps run over a little, Python starts before, and the report is drawn at the end."""

SITES = 0.5
"""Work for the activations of a layer, over that for one of its rows."""


@dataclass
class Run:
    """What has been measured of ``names``, in this order: the whole model, each block, the activations."""

    analyst: Analyst
    names: list[str]
    settings: dict[str, Any]
    started: float = field(default_factory=monotonic)
    findings: list[Finding] = field(default_factory=list)
    whole: Finding | None = None
    activations: Activations | None = None

    @property
    def problem(self) -> Problem:
        return self.analyst.problem

    @property
    def complete(self) -> bool:
        """Whether all parameters are asked for: else nothing is said of the model as a whole."""
        return len(self.names) == len(self.problem.graph.parameters)

    @property
    def work(self) -> float:
        """In the units of ``analysis.cost``."""
        return sum(cost(self.problem, name) for name in self.names) + sum(self._rest())

    def _rest(self) -> tuple[float, float]:
        """Work for the whole model, and for the activations."""
        whole = cost(self.problem)
        return (whole, SITES * whole) if self.complete else (0.0, 0.0)

    def steps(self) -> Iterator[float]:
        """Do everything, and yield the work of each step once it is done."""
        seconds = self.settings["budget"]
        left = None if seconds is None else max(USED * seconds - (monotonic() - self.started), 0.0)
        budget = Budget(left, self.work)
        whole, sites = self._rest()
        if self.complete:
            self.whole = self.analyst.whole(budget)
            yield whole
        for name in self.names:
            self.findings.append(self.analyst.block(name, budget))
            yield cost(self.problem, name)
        if self.complete:
            self.activations = measure(self.analyst.curvature, self.analyst.seed, budget, sites)
            yield sites

    @property
    def report(self) -> Report:
        """Of what is done so far."""
        curvature = self.analyst.curvature
        return Report(
            self.problem,
            float(curvature.loss),
            self.settings,
            self.names,
            self.findings,
            curvature.gradient,
            self.whole,
            self.activations,
            duration=monotonic() - self.started,
        )


def begin(
    source: str | Path,
    data: str | Path | None = None,
    *,
    layers: str | None = None,
    components: str | None = None,
    max_tokens: int | None = None,
    loss: Loss | None = None,
    spec: str | Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float = 1e-3,
    budget: float | None = None,
) -> Run:
    """Open a checkpoint or a spec, ready for ``steps``; what the options mean, ``analyze`` says."""
    check_tolerance(tolerance)
    if budget is not None and not 0 < budget < float("inf"):
        raise UsageError(f"--budget {budget}: give a number of seconds above 0")
    started = monotonic()
    problem = open_problem(source, data, dtype, seed, max_tokens, loss, spec)
    names = select(problem, layers, components)
    settings = {
        "scope": "model",
        "seed": seed,
        "tolerance": tolerance,
        "budget": budget,
        "layers": layers,
        "components": components,
    }
    return Run(Analyst(problem, problem.curvature(), seed, tolerance), names, settings, started)


def check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: give a number between 0 and 1")


def analyze(source: str | Path, data: str | Path | None = None, **options: Any) -> Report:
    """The curvature report of a checkpoint (a file or a folder) or of a block spec in YAML.

    ``data`` is a file of what is scored (see ``docs/data.md``); without it the data are drawn from the seed.  Options,
    all by name: ``layers`` (``"0,3-5"``) and ``components`` (``"attn.*,mlp.up"``) select what is reported;
    ``max_tokens``, ``loss``, ``spec``, ``dtype`` and ``seed`` are those of ``open_problem``; ``tolerance`` is the error
    of an eigenvalue to reach, over its block's spectral norm; ``budget`` is a time in seconds, in which errors become
    as small as they can.  ``InputError`` if the files cannot be read, ``UsageError`` if an option makes no sense.

    >>> report = analyze("sample_runs/pydoc/ckpt-end.pt", "sample_runs/pydoc/val.bin", max_tokens=64, layers="3",
    ...                  components="norm2")
    >>> report.frame[["parameter", "lambda_max"]].round(4)
      parameter  lambda_max
    0    weight      0.2050
    1      bias      0.3147
    """
    run = begin(source, data, **options)
    for _ in run.steps():
        pass
    return run.report
