"""``hess diff``: two reports or checkpoints, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Components, Csv, Data, Layers, Loss, MaxTokens, MemoryLimit, Quiet, Seed, Spec
from .process import keep_on_interrupt
from .render import Measured, message, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.diff import Difference


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A report (.json) or a checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    data: Data = None,
    max_tokens: MaxTokens = None,
    loss: Loss = None,
    spec: Spec = None,
    layers: Layers = None,
    components: Components = None,
    seed: Seed = 0,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The best report of each checkpoint within this time.")
    ] = None,
    memory_limit: MemoryLimit = None,
    csv: Csv = None,
    quiet: Quiet = False,
) -> None:
    """Compare two reports or checkpoints, block by block.

    A ratio is shown with what it rests on: a change within the errors is none.
    """
    from hesscore import memory
    from hesscore.diff import difference
    from hesscore.output import check_writable, deliver

    check_writable([csv], [a, b, data, spec])
    memory.limit(memory_limit)
    options: dict[str, Any] = {
        "data": data,
        "max_tokens": max_tokens,
        "loss": loss,
        "spec": spec,
        "layers": layers,
        "components": components,
        "seed": seed,
        "budget": budget,
    }
    found = difference(_content(a, options, quiet), _content(b, options, quiet))
    if not quiet:
        for note in found.notes:
            message(f"note: {note}")
    deliver({csv: found.frame.to_csv(index=False)}, lambda: _show(found))


def _content(source: str, options: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Of a report as it is, of a checkpoint by analysing it."""
    from hesscore.run import begin
    from hesscore.stored import read_report

    if Path(source).suffix.lower() == ".json":
        return read_report(source)
    run = begin(source, **options)
    keep_on_interrupt()
    try:
        with progress(f"analyze {source}", run.work, quiet) as advance:
            for work in run.steps():
                advance(work)
    except KeyboardInterrupt:
        message("interrupted: nothing is compared")
        raise typer.Exit(130) from None
    return run.report.content


def _show(found: Difference) -> None:
    from hesscore.diff import COLUMNS

    show(
        f"A: {found.source_a}, loss {found.loss_a:.6g}",
        f"B: {found.source_b}, loss {found.loss_b:.6g}",
        "",
    )
    if not on_terminal():
        table(COLUMNS, [[getattr(change, name) for name in COLUMNS] for change in found.changes])
        return
    table(
        ("block", "lambda_max A", "lambda_max B", "B/A", "trace A", "trace B", "|grad| B/A"),
        [
            (
                "model"
                if change.component == "model"
                else f"{'' if change.layer is None else f'{change.layer}.'}{change.component}.{change.parameter}",
                Measured(change.lambda_max_a, change.lambda_max_a_error),
                Measured(change.lambda_max_b, change.lambda_max_b_error),
                None if change.ratio is None else f"{change.ratio:.3g}" if change.apart else "same",
                Measured(change.trace_a, change.trace_a_stderr),
                Measured(change.trace_b, change.trace_b_stderr),
                change.grad_norm_b / change.grad_norm_a if change.grad_norm_a and change.grad_norm_b else None,
            )
            for change in found.changes
        ],
        spare=("|grad| B/A", "trace A", "trace B"),
    )
    show("(n): error of the last digits.  same: no further apart than the errors.")
