"""``hess scaling``: how fast the curvature of a block grows, next to theory."""

from __future__ import annotations

import json as text
import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hesscore import __version__

from .options import Csv, Json, Quiet, Seed
from .process import keep_on_interrupt
from .render import Measured, message, notes, on_terminal, progress, show, table

if TYPE_CHECKING:
    from hesscore.scaling import Measurement, ScalingRow, Sweep

NOTE = "seeded weights and inputs: these numbers describe the architecture, not a trained model"


def scaling(
    source: Annotated[str, typer.Argument(metavar="SPEC", help="A block spec (.yaml) without a vocabulary.")],
    input_scale: Annotated[
        list[float] | None, typer.Option(metavar="X", help="Standard normal tokens times X (default 1).")
    ] = None,
    seq_len: Annotated[list[int] | None, typer.Option(min=1, metavar="N", help="Tokens of a sequence.")] = None,
    width: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="d_model; d_ff keeps its ratio to it.")
    ] = None,
    layers: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Blocks in the stack, of which the first one is measured."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Draws of weights and data.")] = 5,
    seed: Seed = 0,
    csv: Csv = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Measure how the curvature of a block grows.

    As powers of the one quantity that is given several times (--width 8 --width 16); one that is given once is held
    there. By default of input norm, and then of sequence length.
    """
    import pandas as pd
    import torch

    from hesscore.output import SCHEMA_VERSION, check_writable, deliver
    from hesscore.scaling import COLUMNS, cost, measure, plan, rows

    options = {"input_scale": input_scale, "seq_len": seq_len, "width": width, "layers": layers}
    check_writable([csv, json], [source])
    started = monotonic()
    sweeps = plan(source, {name: values for name, values in options.items() if values})
    total = seeds * sum(len(sweep.values) for sweep in sweeps)
    if not quiet:
        message(f"note: {NOTE}")
        if not sys.stderr.isatty():  # a terminal gets a bar
            message(f"{total} measurements: {' and '.join(sweep.quantity for sweep in sweeps)}, {_draws(seeds)}")
    done: list[list[Measurement]] = [[] for _ in sweeps]
    keep_on_interrupt()
    try:
        work = [{value: cost(at) for value, at in zip(sweep.values, sweep.settings, strict=True)} for sweep in sweeps]
        with progress("scaling", seeds * sum(sum(each.values()) for each in work), quiet) as advance:
            for sweep, each, found in zip(sweeps, work, done, strict=True):
                for one in measure(sweep, seeds, seed):
                    found.append(one)
                    advance(each[one.value])
    except KeyboardInterrupt:
        message(f"interrupted: {sum(map(len, done))} of {total} measurements are finished; what is shown is of these")
    finished = sum(map(len, done))
    every = [rows(sweep, found) for sweep, found in zip(sweeps, done, strict=True)]
    records = [asdict(row) | {"points": [mean._asdict() for mean in row.points]} for some in every for row in some]
    about: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "hess_version": __version__,
        "torch_version": torch.__version__,
        "source": source,
        "sweeps": [
            {
                "quantity": sweep.quantity,
                "values": sweep.values,
                "input_scale": None if sweep.quantity == "input_scale" else sweep.settings[0].input_scale,
                "spec": sweep.settings[0].spec.model_dump(),
            }
            for sweep in sweeps
        ],
        "dtype": "float64",
        "seeds": seeds,
        "seed": seed,
        "measurements": {"finished": finished, "asked_for": total},
        "duration_seconds": round(monotonic() - started, 3),
        "notes": [NOTE],
        "rows": records,
    }
    frame = pd.DataFrame(records, columns=list(COLUMNS))
    contents = {csv: frame.to_csv(index=False), json: text.dumps(about, indent=1, allow_nan=False) + "\n"}
    deliver(contents, lambda: _show(source, seeds, sweeps, every))
    if finished < total:
        raise typer.Exit(130)


def _show(source: str, seeds: int, sweeps: Sequence[Sweep], every: Sequence[Sequence[ScalingRow]]) -> None:
    """Every row in a pipe; on a terminal a table for each sweep, both parts of a pair in one line."""
    from hesscore.scaling import COLUMNS

    show(f"{source}: {_draws(seeds)}", "how the spectral norm of H[row, column] grows, outer and functional part")
    if not on_terminal():
        show("")
        table(COLUMNS, [[getattr(row, name) for name in COLUMNS] for some in every for row in some])
        return
    for sweep, some in zip(sweeps, every, strict=True):
        if some:
            show("", f"as a power of {sweep.quantity} = {', '.join(f'{x:g}' for x in sweep.values)}{_held(sweep)}")
            _show_sweep(some)
    show("(n): standard error of the last digits, rounded up; large if no power law fits.")
    if any(row.theory is not None for some in every for row in some):
        show("theory: for attention alone, where scores are small.")
    show("All digits, and the norms at each value: --csv, --json.")


def _show_sweep(some: Sequence[ScalingRow]) -> None:
    parts = ("outer", "functional")
    known = any(row.theory is not None for row in some)
    pairs: dict[str, dict[str, ScalingRow]] = {}
    for row in some:
        pairs.setdefault(_pair(row), {})[row.part] = row
    table(
        ("row x column", *(name for part in parts for name in (part, *("theory",) * known))),
        [
            (pair, *(cell for part in parts for cell in (_growth(of[part]), *(_theory(of[part]),) * known)))
            for pair, of in pairs.items()
        ],
    )
    notes((_pair(row), row.note and f"{row.note} ({row.part})") for row in some)


def _pair(row: ScalingRow) -> str:
    return row.row if row.row == row.column else f"{row.row} x {row.column}"


def _growth(row: ScalingRow) -> Measured | float | None:
    """Without an error where two points leave nothing over for it."""
    return row.exponent if row.exponent is None or row.stderr is None else Measured(row.exponent, row.stderr)


def _theory(row: ScalingRow) -> int | None:
    return None if row.theory is None else int(row.theory)


def _held(sweep: Sweep) -> str:
    """What stays as it is."""
    spec, size = sweep.settings[0]
    held = {"input_scale": size, "seq_len": spec.seq_len, "width": spec.d_model, "layers": spec.layers}
    return "; " + ", ".join(f"{name} {value:g}" for name, value in held.items() if name != sweep.quantity)


def _draws(seeds: int) -> str:
    return f"{seeds} draw{'s' if seeds > 1 else ''} of weights and data"
