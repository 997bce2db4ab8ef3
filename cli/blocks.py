"""``hess analyze --scope block``: every block on its own, for every pair of its parameters."""

from __future__ import annotations

import sys
from itertools import combinations_with_replacement
from math import log10
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer

from .process import keep_on_interrupt
from .render import Measured, heat, message, notes, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.blocks import BlockRow
    from hesscore.report import BlockReport

AGAINST = {"input": "against its input", "zero": "against zero", "random": "against a random target"}


def analyze_blocks(
    source: str,
    given: dict[str, Any],
    outputs: dict[str, str | None],
    quiet: bool,
    settings: dict[str, Any],
) -> None:
    """Analyse what ``settings`` (seed, tolerance, target and selection) ask for, and write ``csv, json, heatmap``.

    ``given`` are the data and what is scored of them, as ``open_blocks`` takes them.
    """
    from hesscore.analysis import select
    from hesscore.blocks import analyze, by_layer, check, count, open_blocks
    from hesscore.heatmap import draw
    from hesscore.output import deliver
    from hesscore.report import BlockReport

    started = monotonic()
    seed = settings["seed"]
    problem = open_blocks(source, **given)
    layers = by_layer(select(problem, settings["layers"], settings["components"]))
    total = sum(count(names) for names in layers.values())
    if not quiet:
        for note in problem.notes:
            message(f"note: {note}")
        if not sys.stderr.isatty():  # a terminal gets a bar
            message(f"{total:,} rows on {problem.scored:,} tokens")
    check(problem, layers)
    report = BlockReport(problem, {}, settings, [name for names in layers.values() for name in names])
    keep_on_interrupt()
    try:
        sizes = [[problem.parameters[name].numel() for name in names] for names in layers.values()]
        with progress("analyze", sum(map(_work_of_a_block, sizes)), quiet) as advance:
            for layer, names in layers.items():
                curvature = problem.block(layer, settings["target"], seed)
                report.loss[layer] = float(curvature.loss)
                for row in analyze(curvature, problem.spec, layer, names, seed, settings["tolerance"]):
                    report.rows.append(row)
                    advance(_work(row.n_rows, row.n_columns))
    except KeyboardInterrupt:
        message(f"interrupted: {len(report.rows)} of {total} rows are finished")
    report.duration = monotonic() - started
    contents: dict[str | None, str | bytes] = {outputs["csv"]: report.to_csv(), outputs["json"]: report.to_json()}
    if outputs["heatmap"] and report.rows:
        title = f"{source}: Frobenius norm of the Hessian by pairs of parameters"
        contents[outputs["heatmap"]] = draw(report.rows, title, outputs["heatmap"])
    deliver(contents, lambda: _show(report))
    if len(report.rows) < total:
        raise typer.Exit(130)


def _work(rows: int, columns: int) -> int:
    """In proportion to decomposing a matrix; what is too large for that is estimated, and takes no longer."""
    from hesscore.blocks import EXACT_UP_TO

    shorter, longer = sorted(min(n, EXACT_UP_TO) for n in (rows, columns))
    return longer * shorter**2


def _work_of_a_block(sizes: list[int]) -> int:
    """Of all rows for parameters of these sizes."""
    from hesscore.blocks import PARTS

    pairs = [*combinations_with_replacement(sizes, 2), (sum(sizes), sum(sizes))]
    return len(PARTS) * sum(_work(rows, columns) for rows, columns in pairs)


def _show(report: BlockReport) -> None:
    """Every row in a pipe; on a terminal the norms of the weights, and the rows of the diagonal."""
    problem = report.problem
    losses = ", ".join(f"{loss:.4g}" for loss in report.loss.values())
    show(
        f"{problem.source}: {problem.provenance.get('family', 'spec')}, d_model {problem.spec.d_model}, "
        f"d_ff {problem.spec.d_ff}, {problem.spec.layers} layer{'s' if problem.spec.layers > 1 else ''}",
        f"each block on its own, on {problem.scored:,} tokens, {AGAINST[report.settings['target']]}: "
        f"mean squared error {losses}",
        "",
    )
    if not on_terminal():
        table(report.columns, [list(record.values()) for record in report.records])
        return
    for layer in report.loss:
        _show_block(layer, [row for row in report.rows if row.layer == layer])
    own = (row for row in report.rows if row.part == "full" and row.row == row.column)
    notes((f"{row.layer}.{row.row}", row.note) for row in own)
    show("(n): error of the last digits; -: not to be had, or not finished.")
    show("outer, functional: Frobenius norms of the two parts of the Hessian.")
    show("All pairs, parts and digits: --csv, --json, --heatmap.")


def _show_block(layer: int, rows: list[BlockRow]) -> None:
    from hesscore.blocks import FLAT

    own = {(row.part, row.row): row for row in rows if row.row == row.column}
    full = [row for row in rows if row.part == "full"]
    weights = [row.row for row in full if row.row == row.column and row.row.endswith(".weight")]
    logs = {(row.row, row.column): _log(row.frobenius) for row in full if row.note != FLAT}
    if weights:
        show(f"block {layer}: log10 of the Frobenius norm of the Hessian, weights by weights")
        labels = [name.removesuffix(".weight").rpartition(".")[2] for name in weights]
        heat(labels, [[logs.get((a, b), logs.get((b, a))) for b in weights] for a in weights])
    table(
        ("block", "|H|_F", "outer", "functional", "lambda_max", "lambda_min", "trace", "condition", "entropy", "neg %"),
        [
            (
                f"{layer}.{row.row}",
                *(_exact(own.get((part, row.row)), "frobenius") for part in ("full", "outer", "functional")),
                Measured(row.lambda_max, row.lambda_max_error),
                Measured(row.lambda_min, row.lambda_min_error),
                _exact(row, "trace"),
                None if row.condition is None else float(f"{row.condition:.2g}"),
                None if row.spectral_entropy is None else Measured(row.spectral_entropy),
                None if row.negative_mass is None else round(100 * row.negative_mass, 1),
            )
            for row in full
            if row.row == row.column
        ],
        spare=("neg %", "entropy", "condition", "trace"),
    )


def _exact(row: BlockRow | None, name: str) -> Measured:
    """A number that is exact but for rounding; where there is nothing but rounding, its error is all of it."""
    from hesscore.blocks import FLAT

    value = getattr(row, name) if row else None
    return Measured(value, abs(value) if value and row and row.note == FLAT else 0.0)


def _log(norm: float | None) -> float | None:
    return log10(norm) if norm else None
