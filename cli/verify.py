"""``hess verify``: the closed forms against channels that know nothing of them."""

from __future__ import annotations

import json as text
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from math import inf, isfinite, isnan
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hesscore import __version__

from .options import Csv, Data, Dtype, Json, Loss, MaxTokens, MemoryLimit, Quiet, Seed, Spec
from .process import keep_on_interrupt
from .render import message, on_terminal, progress, table

if TYPE_CHECKING:
    from hesscore.verify import Check

COLUMNS = ("object", "channel", "error", "tolerance", "asymmetry", "passed")


def verify(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE", help="A checkpoint or a block spec; without one, every map and a grid of small models."
        ),
    ] = None,
    data: Data = None,
    max_tokens: MaxTokens = None,
    loss: Loss = None,
    spec: Spec = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="X", help="Largest relative error, at most 1e-3; by default 1e-10, and 1e-4 in float32."),
    ] = None,
    memory_limit: MemoryLimit = None,
    csv: Csv = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Check the curvature against autograd and finite differences.

    Exit 1 beyond the tolerance.
    """
    import pandas as pd
    import torch

    from hesscore import memory
    from hesscore.errors import UsageError
    from hesscore.output import check_writable, deliver
    from hesscore.problem import open_problem
    from hesscore.verify import CHANNELS, LOOSEST, TOLERANCE, count, grid, parts, verify_grid, verify_maps, verify_model

    if tolerance is not None and not 0 < tolerance <= LOOSEST:
        raise UsageError(
            f"--tolerance {tolerance}: give a number above 0 and up to {LOOSEST}, or hardly a fault is seen"
        )
    if source is None and (data or max_tokens or dtype or loss or spec):
        raise UsageError("--data, --max-tokens, --dtype, --loss and --spec need a SOURCE")
    check_writable([csv, json], [source, data, spec])
    memory.limit(memory_limit)

    started = monotonic()
    channels = [channel.__name__ for channel in CHANNELS]
    about: dict[str, Any] = {"hess_version": __version__, "torch_version": torch.__version__, "source": source}
    checks: Iterator[Check]
    if source is None:
        torch.set_num_threads(1)  # tensors of a dozen numbers are not worth sharing out
        asked = tolerance or TOLERANCE[torch.float64]
        checks, total = chain(verify_maps(seed, asked), verify_grid(seed, asked)), count()
        what = f"every map and {len(grid())} small models"
    else:
        given: dict[str, Any] = {"data": data, "max_tokens": max_tokens, "loss": loss, "spec": spec, "seed": seed}
        problem = open_problem(source, dtype=dtype, **given)
        if not quiet:
            for note in problem.notes:
                message(f"note: {note}")
        asked = tolerance or TOLERANCE[problem.dtype]
        checks = verify_model(problem.graph, problem.parameters, problem.batches, seed, asked)
        total, what = count(problem.graph), f"the model and its {len(parts(problem.graph))} parts"
        about |= {**problem.provenance, "dtype": str(problem.dtype).removeprefix("torch."), "scored": problem.scored}
    if not quiet:
        message(f"{total} checks: {what}, by {', '.join(channels)}")

    done: list[Check] = []
    keep_on_interrupt()
    try:
        with progress("verify", total, quiet) as advance:
            for check in checks:
                done.append(check)
                advance(1)
    except KeyboardInterrupt:
        message(f"interrupted: {len(done)} of {total} checks are finished")
    passed = len(done) == total and all(check.passed for check in done)
    about |= {"seed": seed, "tolerance": asked, "channels": channels}
    about |= {"passed": passed, "duration_seconds": round(monotonic() - started, 3)}
    rows = [asdict(check) | {"passed": check.passed} for check in done]
    if len(done) == total:
        message(_verdict(done, asked))
    texts = {csv: pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(index=False), json: _json(about, rows)}
    deliver(texts, lambda: _show(done))
    if len(done) < total:
        raise typer.Exit(130)
    if not passed:
        raise typer.Exit(1)


def _show(checks: Sequence[Check]) -> None:
    """Every row in a pipe; on a terminal those that failed, and the worst of each channel."""
    shown = [check for check in checks if not (check.passed and on_terminal())]
    if shown:
        table(COLUMNS, [[getattr(check, name) for name in COLUMNS] for check in shown])
    if on_terminal():
        table(("channel", "checks", "failed", "largest error", "of"), _summary(checks))


def _summary(checks: Sequence[Check]) -> Iterator[tuple[object, ...]]:
    for channel in dict.fromkeys(check.channel for check in checks):
        own = [check for check in checks if check.channel == channel]
        worst = _worst(own)
        yield channel, len(own), sum(not check.passed for check in own), worst.error, worst.object


def _worst(checks: Sequence[Check]) -> Check:
    return max(checks, key=lambda check: inf if isnan(check.error) else check.error)


def _verdict(checks: Sequence[Check], asked: float) -> str:
    """What was found, and who could not tell as exactly as was asked."""
    failed = [check for check in checks if not check.passed]
    if failed:
        where = f"the first: {failed[0].object} by {failed[0].channel}, error {failed[0].error:.1e}"
        return f"NOT verified: {len(failed)} of {len(checks)} checks are beyond their tolerance; {where}"
    told: dict[str, float] = {}
    for check in checks:
        if check.tolerance > asked:
            told[check.channel] = max(check.tolerance, told.get(check.channel, 0.0))
    vague = "".join(f"; {channel} can tell no better than {best:.1e} here" for channel, best in told.items())
    worst = _worst(checks)
    where = f"the largest error is {worst.error:.1e}, of {worst.object} by {worst.channel}"
    return f"verified: {len(checks)} checks within {asked:.1e}{vague}; {where}"


def _json(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """JSON has no word for NaN and infinity: they become ``null``."""
    plain = [{name: value if _sayable(value) else None for name, value in row.items()} for row in rows]
    return text.dumps({"schema_version": 1, **about, "rows": plain}, indent=1, allow_nan=False) + "\n"


def _sayable(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)
