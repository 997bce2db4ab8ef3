"""``hess analyze``: the curvature report of a checkpoint or a block spec."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Components, Csv, Dtype, Json, Layers, MaxTokens, Quiet, Seed, Tokens
from .process import keep_on_interrupt
from .render import Measured, message, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.analysis import Row
    from hesscore.report import Report


CAUSES = ("loss", "softmax", "norm", "activation", "product")


def analyze(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint (.pt) or a block spec (.yaml).")],
    tokens: Tokens = None,
    max_tokens: MaxTokens = None,
    layers: Layers = None,
    components: Components = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float,
        typer.Option(metavar="X", help="Error of an eigenvalue, over its block's spectral norm, to reach."),
    ] = 1e-3,
    csv: Csv = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Report the curvature of every parameter block.

    How steep it is, with which error, and what causes it.
    """
    from hesscore.analysis import analyze as rows_of
    from hesscore.analysis import cost, select
    from hesscore.errors import UsageError
    from hesscore.problem import open_problem
    from hesscore.report import Report, check_writable, deliver

    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: give a number between 0 and 1")
    check_writable([csv, json], [source, tokens])
    started = monotonic()
    problem = open_problem(source, tokens, dtype, seed, max_tokens)
    names = select(problem, layers, components)
    if not quiet:
        for note in problem.notes:
            message(f"note: {note}")
        if not sys.stderr.isatty():  # a terminal gets a bar
            message(f"{_count(len(names), 'block')} on {_count(problem.scored, 'token')}")
    curvature = problem.curvature()
    settings = {"seed": seed, "tolerance": tolerance, "layers": layers, "components": components}
    report = Report(problem, float(curvature.loss), settings, names)
    keep_on_interrupt()
    try:
        with progress("analyze", sum(cost(problem, name) for name in names), quiet) as advance:
            for row in rows_of(problem, curvature, names, seed, tolerance):
                report.rows.append(row)
                advance(cost(problem, row.name))
    except KeyboardInterrupt:
        message(f"interrupted: {len(report.rows)} of {len(names)} blocks are finished")
    report.duration = monotonic() - started
    deliver({csv: report.to_csv(), json: report.to_json()}, lambda: _show(report))
    if len(report.rows) < len(names):
        raise typer.Exit(130)


def _show(report: Report) -> None:
    from hesscore.analysis import COLUMNS

    problem = report.problem
    spec = problem.spec
    parameters = _count(sum(weight.numel() for weight in problem.parameters.values()), "parameter")
    scored = _count(problem.scored, "scored token")
    family, what = problem.provenance.get("family", "spec"), "cross entropy" if spec.vocab else "squared error"
    show(
        f"{problem.source}: {family}, {_count(spec.layers, 'layer')}, d_model {spec.d_model}, {parameters}",
        f"loss {report.loss:.6g}: mean {what} over {scored}, {problem.provenance['data']}",
        "",
    )
    caused = [row for row in report.rows if row.gauss_newton_share is not None]
    sharpest = sorted(caused, key=lambda row: -(row.lambda_max or 0))
    if sharpest:
        show("sharpest blocks, by lambda_max, and what causes it, in percent:")
        for row in sharpest[:3]:
            size = Measured(row.lambda_max, row.lambda_max_error)
            main = sorted(_causes(row).items(), key=lambda cause: -abs(cause[1]))[:3]
            shares = ", ".join(f"{kind} {share:.0f}" for kind, share in main if round(share))
            show(f"  {_name(row):22} {size!s:>10}   {shares}")
        show("")
    if not on_terminal():
        table(COLUMNS, [list(record.values()) for record in report.records])
        return
    table(
        ("block", "|grad|", "lambda_max", "lambda_min", "trace", *(kind[:4] for kind in CAUSES)),
        [
            (
                _name(row),
                Measured(row.grad_norm),
                Measured(row.lambda_max, row.lambda_max_error),
                Measured(row.lambda_min, row.lambda_min_error),
                Measured(row.trace, row.trace_stderr),
                *(round(share) if row.gauss_newton_share is not None else None for share in _causes(row).values()),
            )
            for row in report.rows
        ],
        spare=("|grad|", "trace"),
    )
    show("(n): error of the last digits; a bound for lambda, a standard error for trace.")
    show("The last five columns: what causes lambda_max, in percent; parts may cancel.")
    notes: dict[str, list[str]] = {}
    for row in report.rows:
        if row.note:
            notes.setdefault(row.note, []).append(_name(row))
    show(*(f"{note}: {', '.join(names)}" for note, names in notes.items()))


def _causes(row: Row) -> dict[str, float]:
    """What causes ``lambda_max``, in percent of it."""
    return {kind: 100 * (getattr(row, f"from_{kind}") or 0) / (row.lambda_max or 1) for kind in CAUSES}


def _name(row: Row) -> str:
    return row.name.removeprefix("blocks.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
