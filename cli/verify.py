"""``hess verify``: the closed forms against channels that know nothing of them."""

from __future__ import annotations

import json as text
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hesscore import __version__

from .options import Csv, Dtype, Json, MaxTokens, Quiet, Seed, Tokens
from .render import message, progress, table

if TYPE_CHECKING:
    from hesscore.verify import Check

COLUMNS = ("object", "channel", "error", "tolerance", "asymmetry", "passed")


def verify(
    source: Annotated[
        str | None,
        typer.Argument(help="A checkpoint or a block spec; without one, every map and a grid of small models."),
    ] = None,
    tokens: Tokens = None,
    max_tokens: MaxTokens = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error; by default 1e-10, and 1e-4 in float32.")
    ] = None,
    csv: Csv = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Check the curvature against autograd and finite differences; exit 1 beyond the tolerance."""
    import pandas as pd
    import torch

    from hesscore.errors import UsageError
    from hesscore.problem import open_problem
    from hesscore.report import check_writable, write
    from hesscore.verify import TOLERANCE, count, verify_grid, verify_maps, verify_model

    if tolerance is not None and not 0 < tolerance < inf:
        raise UsageError(f"--tolerance {tolerance}: give a number above 0, such as 1e-10")
    if source is None and (tokens or max_tokens or dtype):
        raise UsageError("--tokens, --max-tokens and --dtype need a SOURCE")
    if csv == json == "-":
        raise UsageError("--csv and --json cannot both write to stdout")
    check_writable([csv, json], [source, tokens])

    about: dict[str, Any] = {"hess_version": __version__, "torch_version": torch.__version__, "source": source}
    checks: Iterator[Check]
    if source is None:
        torch.set_num_threads(1)  # tensors of a dozen numbers are not worth sharing out
        given = tolerance or TOLERANCE[torch.float64]
        checks, total = chain(verify_maps(seed, given), verify_grid(seed, given)), count()
    else:
        problem = open_problem(source, tokens, dtype, seed, max_tokens)
        if not quiet:
            for note in problem.notes:
                message(f"note: {note}")
        checks = verify_model(problem.graph, problem.parameters, problem.batches, seed, tolerance)
        total = count(problem.graph)
        about |= {**problem.provenance, "dtype": str(problem.dtype).removeprefix("torch."), "scored": problem.scored}

    done: list[Check] = []
    try:
        with progress("verify", total, quiet) as advance:
            for check in checks:
                done.append(check)
                advance(1)
    except KeyboardInterrupt:
        message(f"interrupted: {len(done)} of {total} checks are finished")
    passed = len(done) == total and all(check.passed for check in done)
    rows = [asdict(check) | {"passed": check.passed} for check in done]
    if "-" not in (csv, json):
        table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows])
    if csv is not None:
        write(csv, pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(index=False))
    if json is not None:
        write(json, _json(about | {"seed": seed, "passed": passed}, rows))
    if len(done) < total:
        raise typer.Exit(130)
    message(_verdict(done))
    if not passed:
        raise typer.Exit(1)


def _verdict(checks: Sequence[Check]) -> str:
    failed = [check for check in checks if not check.passed]
    if failed:
        where = f"the first: {failed[0].object} by {failed[0].channel}, error {failed[0].error:.1e}"
        return f"NOT verified: {len(failed)} of {len(checks)} checks are beyond their tolerance; {where}"
    worst, loosest = max(checks, key=lambda check: check.error), max(check.tolerance for check in checks)
    where = f"the largest error is {worst.error:.1e}, of {worst.object} by {worst.channel}"
    return f"verified: {len(checks)} checks within {loosest:.1e}; {where}"


def _json(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """JSON has no word for NaN and infinity: they become ``null``."""
    plain = [{name: value if _sayable(value) else None for name, value in row.items()} for row in rows]
    return text.dumps({"schema_version": 1, **about, "rows": plain}, indent=1, allow_nan=False) + "\n"


def _sayable(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)
