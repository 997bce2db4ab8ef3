"""``hess analyze``: the curvature report of a checkpoint or a block spec."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .blocks import analyze_blocks
from .options import Components, Csv, Data, Dtype, Json, Layers, Loss, MaxTokens, MemoryLimit, Quiet, Seed, Spec
from .process import keep_on_interrupt
from .render import Measured, message, notes, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.analysis import Row
    from hesscore.report import Report


SCOPES = ("model", "block")
CAUSES = ("loss", "softmax", "norm", "activation", "product")


def analyze(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint (.pt) or a block spec (.yaml).")],
    scope: Annotated[
        str | None,
        typer.Option(
            metavar="SCOPE", help="model, or block: every block on its own, exactly (default for a small block spec)."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT", help="What the output of a block is compared with: input (default), zero, random."
        ),
    ] = None,
    data: Data = None,
    max_tokens: MaxTokens = None,
    loss: Loss = None,
    spec: Spec = None,
    layers: Layers = None,
    components: Components = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float,
        typer.Option(metavar="X", help="Error of an eigenvalue, over its block's spectral norm, to reach."),
    ] = 1e-3,
    memory_limit: MemoryLimit = None,
    csv: Csv = None,
    json: Json = None,
    heatmap: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the pairs of --scope block, as .svg or .png.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Report the curvature of every parameter block.

    How steep it is, with which error, and what causes it; with --scope block, of every pair of a block's parameters.
    """
    from hesscore import memory
    from hesscore.analysis import analyze as rows_of
    from hesscore.analysis import cost, select
    from hesscore.blocks import is_small_block
    from hesscore.errors import UsageError
    from hesscore.output import check_writable, deliver
    from hesscore.picture import check_format
    from hesscore.problem import TARGETS, open_problem
    from hesscore.report import Report

    if not 0 < tolerance < 1:
        raise UsageError(f"--tolerance {tolerance}: give a number between 0 and 1")
    if scope not in (None, *SCOPES):
        raise UsageError(f"--scope {scope}: give one of {', '.join(SCOPES)}")
    if target not in (None, *TARGETS):
        raise UsageError(f"--target {target}: give one of {', '.join(TARGETS)}")
    if heatmap is not None:
        check_format("--heatmap", heatmap)
    check_writable([csv, json, heatmap], [source, data, spec])
    memory.limit(memory_limit)
    given: dict[str, Any] = {"data": data, "max_tokens": max_tokens, "loss": loss, "spec": spec, "seed": seed}
    scope = scope or ("block" if is_small_block(source) else "model")
    settings = {"scope": scope, "seed": seed, "tolerance": tolerance, "layers": layers, "components": components}
    if scope == "block":
        if dtype not in (None, "float64"):
            raise UsageError(f"--dtype {dtype}: --scope block computes in float64")
        outputs = {"csv": csv, "json": json, "heatmap": heatmap}
        analyze_blocks(source, given, outputs, quiet, settings | {"target": target or "input"})
        return
    for option, value in ("--target", target), ("--heatmap", heatmap):
        if value is not None:
            raise UsageError(f"{option} needs --scope block")
    started = monotonic()
    problem = open_problem(source, dtype=dtype, **given)
    names = select(problem, layers, components)
    if not quiet:
        for note in problem.notes:
            message(f"note: {note}")
        if not sys.stderr.isatty():  # a terminal gets a bar
            what = "sequence" if problem.spec.pools else "token"
            message(f"{_count(len(names), 'block')} on {_count(problem.scored, what)}")
    curvature = problem.curvature()
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
    scored = _count(problem.scored, "sequence" if spec.pools else "scored token")
    family, what = problem.provenance.get("family", "spec"), "cross entropy" if spec.classifies else "squared error"
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
    notes((_name(row), row.note) for row in report.rows)


def _causes(row: Row) -> dict[str, float]:
    """What causes ``lambda_max``, in percent of it."""
    return {kind: 100 * (getattr(row, f"from_{kind}") or 0) / (row.lambda_max or 1) for kind in CAUSES}


def _name(row: Row) -> str:
    return row.name.removeprefix("blocks.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
