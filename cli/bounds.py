"""``hess bounds``: how steep a block can be at most, from less and more knowledge of it."""

from __future__ import annotations

from functools import partial
from math import isfinite
from shutil import get_terminal_size
from textwrap import wrap
from time import monotonic
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from .blocks import AGAINST
from .options import Csv, Data, Json, Layers, Loss, MaxTokens, MemoryLimit, Quiet, Seed, Spec
from .process import keep_on_interrupt
from .render import Measured, message, on_terminal, progress, show, table

_Value = TypeVar("_Value")

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hesscore.bounds.report import BoundsReport
    from hesscore.bounds.tiers import BoundRow


def bounds(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE", help="A block spec (.yaml) or a checkpoint (.pt); else a block of GPT-2 small."
        ),
    ] = None,
    seq_len: Annotated[
        list[int] | None,
        typer.Option(min=1, max=10**12, metavar="N", help="Tokens of a sequence; give it again for a curve."),
    ] = None,
    input_norm: Annotated[
        list[float] | None, typer.Option(metavar="X", help="Norm of the longest input token; again for a curve.")
    ] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, metavar="N", help="Heads; again for a curve.")] = None,
    width: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="d_model, with d_ff in proportion; again for a curve.")
    ] = None,
    given: Annotated[
        list[str] | None, typer.Option(metavar="NAME=X", help="A scalar that is known, as norm2.scale=0.4.")
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="all, or some of published,apriori,swept,enclosure,exact (default the first two; all on data).",
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="WHAT", help="What the output is compared with: input, zero, random.")
    ] = "input",
    data: Data = None,
    max_tokens: MaxTokens = None,
    loss: Loss = None,
    spec: Spec = None,
    layers: Layers = None,
    seed: Seed = 0,
    memory_limit: MemoryLimit = None,
    csv: Csv = None,
    json: Json = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw several values of apriori and exact, as .svg or .png.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Bound the curvature of a block, before a run or on data.

    Spectral norms of the Hessian of the mean squared error of a block's output, for every pair of its weights, outer
    and functional parts apart. A spec takes less than a second.
    """
    from hesscore import memory
    from hesscore.bounds.curves import check, draw
    from hesscore.bounds.report import BoundsReport
    from hesscore.bounds.scalars import TARGETS
    from hesscore.bounds.settings import Sweep, ask
    from hesscore.bounds.tiers import WITHOUT_DATA, chosen, count, rows
    from hesscore.errors import UsageError
    from hesscore.output import check_writable, deliver

    started = monotonic()
    sweep = Sweep(_each(seq_len), _each(input_norm), _each(heads), _each(width))
    for norm in sweep.input_norm:
        if norm is None or not (isfinite(norm) and norm > 0):
            raise UsageError(f"--input-norm {norm}: give a finite number above 0")
    if target not in TARGETS:
        raise UsageError(f"--target {target}: give one of {', '.join(TARGETS)}")
    wanted = chosen(tiers, data=data is not None)
    known = dict(map(_named, given or ()))
    swept = sweep.swept
    if plot is not None:
        check(plot, swept)
    check_writable([csv, json, plot], [source, data, spec])
    memory.limit(memory_limit)
    measured = bool(set(wanted) - set(WITHOUT_DATA)) or data is not None
    asked = ask(
        source,
        sweep,
        known,
        target,
        measured,
        layers,
        {"data": data, "max_tokens": max_tokens, "loss": loss, "spec": spec, "seed": seed},
    )
    settings = {"target": target, "seed": seed, "given": known}
    report = BoundsReport(source or "a block of GPT-2 small", wanted, settings, swept, asked.provenance)
    if not quiet:
        for note in asked.notes:
            message(f"note: {note}")
    keep_on_interrupt()
    finished = False
    try:
        with progress("bounds", asked.total, quiet or not measured) as advance:
            for block in asked.blocks:
                report.blocks.append(block)
                each = count(block.spec)
                for row in rows(
                    block.spec, block.scalars, block.length, target, wanted, block.layer, block.curvature, seed
                ):
                    report.rows.append(row)
                    advance(1 / each)
        finished = True
    except KeyboardInterrupt:
        message(f"interrupted: {len(report.rows)} rows are finished")
    report.duration = monotonic() - started
    contents: dict[str | None, str | bytes] = {csv: report.to_csv(), json: report.to_json()}
    if plot is not None and report.rows:
        contents[plot] = draw(report, plot)
    deliver(contents, lambda: _show(report))
    if not finished:
        raise typer.Exit(130)


def _each(values: Sequence[_Value] | None) -> list[_Value]:
    return list(dict.fromkeys(values or ()))


def _named(text: str) -> tuple[str, float]:
    from hesscore.errors import UsageError

    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UsageError(f"--given {text}: give it as norm2.scale=0.4") from None


def _show(report: BoundsReport) -> None:
    """Every row in a pipe; on a terminal the diagonal and the whole block, or the curves of what was swept."""
    from hesscore.bounds.claims import verdicts
    from hesscore.bounds.tiers import PARTS, TIERS

    show(f"{report.source}: bounds on the spectral norm of the Hessian")
    show(f"a block on its own, under the mean squared error of its output, {AGAINST[report.settings['target']]}")
    _show_scalars(report)
    if not on_terminal():
        table(list(report.frame.columns), [list(record.values()) for record in report.records])
    else:
        for part in PARTS[1:] + PARTS[:1]:
            rows = [row for row in report.rows if row.part == part and row.row == row.column]
            show(f"{part}:")
            if report.swept:
                _show_curves(report, part, rows)
            else:
                _show_tiers(report, rows)
    for line in verdicts(report):
        _show_wrapped(line)
    beaten = [row for row in report.rows if row.beaten]
    if beaten and on_terminal():
        names = dict.fromkeys(f"{row.row}, {row.column} {row.part}" for row in beaten)
        _show_wrapped(f"the published bound is beaten in {len(beaten)} rows: {'; '.join(names)}")
    for tier in report.tiers:
        if tier == "enclosure" and report.swept and on_terminal():
            continue  # is not in the curves
        _show_wrapped(f"{tier}: {TIERS[tier].hypotheses}; constants {TIERS[tier].constants}")
    if on_terminal():
        if "exact" in report.tiers and not report.swept:
            show("(n): error of the last digits.")
        show("All pairs and digits: --csv, --json.")


def _show_scalars(report: BoundsReport) -> None:
    """Those of the first block, by their origin; what is not named is 0."""
    if not report.blocks:
        return
    block = report.blocks[0]
    for origin in dict.fromkeys(block.origin.values()):
        named = [
            f"{name} {value:.4g}" for name, value in block.scalars.items() if block.origin[name] == origin and value
        ]
        if named:
            _show_wrapped(f"{origin}: {', '.join(named)}")
    if len(report.blocks) > 1:
        show("(scalars of the first of several blocks; --json has all)")
    show("")


def _show_wrapped(text: str) -> None:
    """At the width of a terminal, whole in a pipe."""
    show(*(wrap(text, get_terminal_size().columns, subsequent_indent="  ") if on_terminal() else [text]))


def _show_tiers(report: BoundsReport, rows: Sequence[BoundRow]) -> None:
    """A column for each tier, and how far the a-priori bound is from the exact value."""
    several = len({row.layer for row in rows}) > 1
    columns: dict[str, Callable[[BoundRow], object]] = {tier: partial(_value, tier) for tier in report.tiers}
    if "exact" in columns:
        for tier in ("apriori", "swept"):
            if tier in columns:
                columns[f"{tier}/exact"] = partial(_ratio, tier)
    table(
        ("weight", *columns),
        [
            (f"{row.layer}.{row.row}" if several else row.row, *(column(row) for column in columns.values()))
            for row in rows
        ],
        spare=[name for name in ("published", "swept/exact", "apriori/exact") if name in columns],
    )


def _value(tier: str, row: BoundRow) -> object:
    if tier == "enclosure":
        low, high = (f"{end:.4g}" for end in (row.enclosure_lower or 0.0, row.enclosure_upper or 0.0))
        return low if low == high else f"{low} .. {high}"
    if tier == "exact":
        return Measured(row.exact, row.exact_error)
    return Measured(getattr(row, tier))


def _ratio(tier: str, row: BoundRow) -> float | None:
    bound = getattr(row, tier)
    return float(f"{bound / row.exact:.3g}") if bound and row.exact else None


def _show_curves(report: BoundsReport, part: str, rows: Sequence[BoundRow]) -> None:
    """A line for each block and tier: its bound at each value, and the exponent."""
    from hesscore.bounds.report import FITTED

    values = list(dict.fromkeys(getattr(row, report.swept or "") for row in rows))
    lines, growth = [], report.growth
    for name in dict.fromkeys(row.row for row in rows):
        own = [row for row in rows if row.row == name]
        for tier in (tier for tier in FITTED if tier in report.tiers):
            found = [getattr(row, tier) for row in own]
            if any(found):
                fit = growth.get((name, name, part), {}).get(tier)
                lines.append((name, tier, *map(Measured, found), str(fit) if fit else None))
    shown = [f"{value:.12g}" for value in values]
    middle = sorted(shown[1:-1], key=lambda value: abs(shown.index(value) - len(shown) / 2))
    table(("weight", "tier", *shown, "exponent"), lines, spare=middle)
