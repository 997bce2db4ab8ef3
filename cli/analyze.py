"""``hess analyze``: the curvature report of a checkpoint or a block spec."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .blocks import analyze_blocks
from .options import Components, Csv, Data, Dtype, Json, Layers, Loss, MaxTokens, MemoryLimit, Quiet, Seed, Spec
from .process import keep_on_interrupt
from .render import Measured, message, notes, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.analysis import Finding, Row
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
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="The best report within this time, errors as large as they then are."),
    ] = None,
    memory_limit: MemoryLimit = None,
    csv: Csv = None,
    json: Json = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with all pictures and tables; it opens offline.")
    ] = None,
    md: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a summary in Markdown; - is stdout."),
    ] = None,
    heatmap: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw the pairs of --scope block, as .svg or .png.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Report the curvature of every parameter block.

    And of the whole model: how steep it is, with which error, and what causes it; how near training is to the edge of
    stability.  With --scope block, of every pair of a block's parameters.
    """
    from hesscore import memory
    from hesscore.blocks import is_small_block
    from hesscore.errors import UsageError
    from hesscore.output import check_writable, deliver
    from hesscore.picture import check_format
    from hesscore.problem import TARGETS
    from hesscore.run import begin, check_tolerance

    check_tolerance(tolerance)
    if scope not in (None, *SCOPES):
        raise UsageError(f"--scope {scope}: give one of {', '.join(SCOPES)}")
    if target not in (None, *TARGETS):
        raise UsageError(f"--target {target}: give one of {', '.join(TARGETS)}")
    if heatmap is not None:
        check_format("--heatmap", heatmap)
    check_writable([csv, json, html, md, heatmap], [source, data, spec])
    memory.limit(memory_limit)
    given: dict[str, Any] = {"data": data, "max_tokens": max_tokens, "loss": loss, "spec": spec, "seed": seed}
    selection: dict[str, Any] = {"layers": layers, "components": components}
    if (scope or ("block" if is_small_block(source) else "model")) == "block":
        if dtype not in (None, "float64"):
            raise UsageError(f"--dtype {dtype}: --scope block computes in float64")
        _only("--scope model", {"--budget": budget, "--html": html, "--md": md})
        wanted = {"csv": csv, "json": json, "heatmap": heatmap}
        settings = {"scope": "block", "seed": seed, "tolerance": tolerance, **selection}
        analyze_blocks(source, given, wanted, quiet, settings | {"target": target or "input"})
        return
    _only("--scope block", {"--target": target, "--heatmap": heatmap})
    run = begin(source, dtype=dtype, tolerance=tolerance, budget=budget, **given, **selection)
    problem, count = run.problem, len(run.names)
    if not quiet:
        for note in problem.notes:
            message(f"note: {note}")
        if not sys.stderr.isatty():  # a terminal gets a bar
            what = "sequence" if problem.spec.pools else "token"
            message(f"{_count(count, 'block')} on {_count(problem.scored, what)}")
    keep_on_interrupt()
    done = False
    try:
        with progress("analyze", run.work, quiet) as advance:
            for work in run.steps():
                advance(work)
        done = True
    except KeyboardInterrupt:
        message(f"interrupted: {len(run.findings)} of {count} blocks are finished")
    report = run.report
    outputs: dict[str | None, Callable[[], str]] = {
        csv: report.to_csv,
        json: report.to_json,
        html: partial(_page, report),
        md: partial(_markdown, report),
    }
    deliver({path: write() for path, write in outputs.items() if path is not None}, lambda: _show(report))
    if not done:
        raise typer.Exit(130)


def _page(report: Report) -> str:
    from hesscore.pages.page import page

    return page(report.content)


def _markdown(report: Report) -> str:
    from hesscore.pages.markdown import markdown

    return markdown(report.content)


def _only(scope: str, options: Mapping[str, object]) -> None:
    """Refuse options that have no meaning in the other scope."""
    from hesscore.errors import UsageError

    for option, value in options.items():
        if value is not None:
            raise UsageError(f"{option} needs {scope}")


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
    if report.whole and report.whole.row.lambda_max is not None:
        _show_whole(report, report.whole)
    caused = [finding for finding in report.findings if finding.row.gauss_newton_share is not None]
    sharpest = sorted(caused, key=lambda finding: -(finding.row.lambda_max or 0))
    if sharpest:
        show("sharpest blocks, by lambda_max, and what causes most of it, in percent:")
        for finding in sharpest[:3]:
            row = finding.row
            show(f"  {_name(row):22} {Measured(row.lambda_max, row.lambda_max_error)!s:>10}   {_main(finding)}")
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


def _show_whole(report: Report, whole: Finding) -> None:
    row = whole.row
    ends = (
        f"lambda_max {Measured(row.lambda_max, row.lambda_max_error)}, "
        f"lambda_min {Measured(row.lambda_min, row.lambda_min_error)}, trace {Measured(row.trace, row.trace_stderr)}"
    )
    show(f"whole model: {ends}", f"  caused, in percent, by {_main(whole)}")
    verdicts = report.stability.verdict if report.stability else []
    show(*verdicts, *([report.heterogeneity.verdict] if report.heterogeneity else []), "")


def _main(finding: Finding) -> str:
    """The three maps that cause most of ``lambda_max``, in percent of it."""
    parts = sorted(finding.causes.items(), key=lambda cause: -abs(cause[1]))[:3]
    shares = [(node.removeprefix("blocks."), 100 * part / (finding.row.lambda_max or 1)) for node, part in parts]
    return ", ".join(f"{node} {share:.0f}" for node, share in shares if round(share))


def _causes(row: Row) -> dict[str, float]:
    """What causes ``lambda_max``, in percent of it."""
    return {kind: 100 * (getattr(row, f"from_{kind}") or 0) / (row.lambda_max or 1) for kind in CAUSES}


def _name(row: Row) -> str:
    return row.name.removeprefix("blocks.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
