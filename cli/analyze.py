"""``hess analyze``: the curvature report of a checkpoint or a block spec."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Components, Csv, Dtype, Json, Layers, MaxTokens, Quiet, Seed, Tokens
from .render import message, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.analysis import Row
    from hesscore.report import Report


def analyze(
    source: Annotated[str, typer.Argument(help="A checkpoint (.pt) or a block spec (.yaml).")],
    tokens: Tokens = None,
    max_tokens: MaxTokens = None,
    layers: Layers = None,
    components: Components = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float, typer.Option(help="Residual of an eigenvalue, over its block's spectral norm, that ends the search.")
    ] = 1e-3,
    csv: Csv = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Report the curvature of every parameter block: how steep it is, with which error, and what causes it."""
    from hesscore.analysis import analyze as rows_of
    from hesscore.analysis import cost, select
    from hesscore.errors import UsageError
    from hesscore.problem import open_problem
    from hesscore.report import Report, check_writable, write

    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: give a number between 0 and 1")
    check_writable([csv, json])
    started = monotonic()
    problem = open_problem(source, tokens, dtype, seed, max_tokens)
    names = select(problem, layers, components)
    if not quiet:
        for note in problem.notes:
            message(f"note: {note}")
    curvature = problem.curvature()
    settings = {"seed": seed, "tolerance": tolerance, "layers": layers, "components": components}
    report = Report(problem, float(curvature.loss), settings)
    try:
        with progress("analyze", sum(cost(problem, name) for name in names), quiet) as advance:
            for row in rows_of(problem, curvature, names, seed, tolerance):
                report.rows.append(row)
                advance(cost(problem, row.name))
    except KeyboardInterrupt:
        report.skipped = dict.fromkeys(names[len(report.rows) :], "interrupted")
        message(f"interrupted: {len(report.rows)} of {len(names)} blocks are finished")
    report.duration = monotonic() - started
    if "-" not in (csv, json):
        _show(report)
    if csv is not None:
        write(csv, report.to_csv())
    if json is not None:
        write(json, report.to_json())
    if report.skipped:
        raise typer.Exit(130)


def _show(report: Report) -> None:
    from hesscore.analysis import COLUMNS

    problem = report.problem
    spec, count = problem.spec, sum(weight.numel() for weight in problem.parameters.values())
    kind = problem.provenance.get("family", "spec")
    show(f"{problem.source}: {kind}, {spec.layers} layers, d_model {spec.d_model}, {count:,} parameters")
    what = "cross entropy" if spec.vocab else "squared error"
    show(f"loss {report.loss:.6g}: mean {what} over {problem.scored:,} scored tokens of {problem.provenance['data']}")
    sharpest = sorted((row for row in report.rows if row.lambda_max), key=lambda row: -(row.lambda_max or 0))[:3]
    if sharpest:
        show("", "sharpest blocks, and what causes their lambda_max:")
        for row in sharpest:
            show(f"  {row.name:28} {_within(row.lambda_max, row.lambda_max_error):>20}   {_causes(row)}")
    show("")
    if on_terminal():
        columns = ("block", "|weight|", "|grad|", "lambda_max", "lambda_min", "trace", "caused by", "note")
        table(columns, [_summary(row) for row in report.rows])
    else:
        frame = report.frame
        table(COLUMNS, frame.astype(object).where(frame.notna(), None).to_numpy().tolist())


def _summary(row: Row) -> list[object]:
    return [
        row.name,
        row.weight_norm,
        row.grad_norm,
        _within(row.lambda_max, row.lambda_max_error),
        _within(row.lambda_min, row.lambda_min_error),
        _within(row.trace, row.trace_stderr),
        _causes(row),
        row.note,
    ]


def _within(value: float | None, error: float | None) -> str:
    return "-" if value is None or error is None else f"{value:.4g} ± {error:.1g}"


def _causes(row: Row) -> str:
    """The sources of ``lambda_max`` in percent, largest first, those below one percent left out."""
    if not row.lambda_max or row.gauss_newton_share is None:
        return "-"
    parts = {
        kind: 100 * part / row.lambda_max
        for kind in ("loss", "softmax", "norm", "activation", "product")
        if (part := getattr(row, f"from_{kind}")) is not None
    }
    order = sorted(parts, key=lambda kind: -abs(parts[kind]))
    return ", ".join(f"{kind} {parts[kind]:.0f} %" for kind in order if abs(parts[kind]) >= 1)
