"""Every block of a model on its own: exact curvature for every pair of its parameters, in three parts.

A block is taken at its real input, under the mean squared error of its output to a target.  Its Hessian is then a
token-wise Kronecker sum (``hesscore.explicit``): traces and Frobenius norms are exact at any size, and the spectrum is
where a pair's matrix can be decomposed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Generator, Tensor

from hesscore import memory
from hesscore.curvature import Block, Curvature, Terms, inner, outer
from hesscore.errors import InputError, UsageError
from hesscore.explicit.block import block_hessian
from hesscore.explicit.size import kept
from hesscore.problem import Problem, open_problem
from hesscore.spec import SPEC_SUFFIXES, Loss, Spec, read_spec
from hesscore.spectrum.ends import UNSEEN, NonFiniteError, ends, product_with_rounding
from hesscore.spectrum.gram import Gram, size_of
from hesscore.spectrum.lanczos import unit as unit_vectors
from hesscore.wiring.names import place
from hesscore.wiring.size import parameter_count

PARTS: dict[str, Terms | None] = {"full": None, "outer": outer, "functional": inner}
"""The Hessian, its Gauss-Newton part, and the rest."""

MAX_TOKENS = 256
"""Next tokens that are scored by default: memory grows with them, and the work with their square."""

WHOLE = "block"
"""Stands for all selected parameters of a block together."""

FLAT = "no curvature beyond rounding"

EXACT_UP_TO = 4096
"""Rows up to which a symmetric matrix is decomposed; no larger number of entries is formed for other pairs."""

SINGULAR_UP_TO = 2048
"""The shorter side up to which singular values are computed, which take ten times the work of eigenvalues."""

SMALL_UP_TO = 100_000
"""Parameters of a spec of one block up to which it is reported by pairs unless the scope is given."""

COPIES = 4
"""Of a matrix that is decomposed, or measured in another way."""


@dataclass(frozen=True)
class BlockRow:
    """The curvature between two parameters of a block, ``H[row, column]``, or of the whole block.

    For two different parameters singular values stand for absolute eigenvalues.  ``trace`` and ``frobenius`` are exact
    but for rounding; the spectrum is where it is ``exact``, else its ends come with errors.  ``None`` is a number that
    has no meaning, or could not be had; ``note`` says why.
    """

    layer: int
    row: str
    column: str
    part: str
    n_rows: int
    n_columns: int
    trace: float | None = None
    frobenius: float | None = None
    spectral_norm: float | None = None
    spectral_norm_error: float | None = None
    lambda_max: float | None = None
    lambda_max_error: float | None = None
    lambda_min: float | None = None
    lambda_min_error: float | None = None
    condition: float | None = None
    spectral_entropy: float | None = None
    negative_mass: float | None = None
    exact: bool = False
    converged: bool = False
    note: str = ""


COLUMNS = tuple(field.name for field in fields(BlockRow))


def is_small_block(source: str | Path) -> bool:
    """Whether ``source`` is a spec of one layer without a vocabulary, of which every pair is a matter of minutes."""
    if Path(source).suffix.lower() not in SPEC_SUFFIXES:
        return False
    spec = read_spec(source)
    return spec.layers == 1 and spec.vocab is None and parameter_count(spec) <= SMALL_UP_TO


def open_blocks(
    source: str | Path,
    data: str | Path | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    loss: Loss | None = None,
    spec: str | Path | None = None,
) -> Problem:
    """``open_problem`` in float64, with fewer tokens by default."""
    if data is not None and max_tokens is None:
        max_tokens = MAX_TOKENS
    return open_problem(source, data, "float64", seed, max_tokens, loss, spec)


def by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """The parameters that lie in a block; ``UsageError`` if there are none."""
    found: dict[int, list[str]] = {}
    for name in names:
        if (layer := place(name)[0]) is not None:
            found.setdefault(layer, []).append(name)
    if not found:
        raise UsageError("--scope block: what is selected lies in no block")
    return found


def check(problem: Problem, layers: Mapping[int, Sequence[str]]) -> None:
    """Refuse blocks that would not fit in memory, saying how many tokens would."""
    spec = problem.spec.alone
    parts = {place(name)[1] for names in layers.values() for name in names}
    entries = max(sum(problem.parameters[name].numel() for name in names) for names in layers.values()) ** 2
    scored = [batch.constants["weights"] for batch in problem.batches]
    sequences, length = sum(map(len, scored)), scored[0].shape[1]

    def need(tokens: int) -> int:
        numbers = kept(spec, parts, tokens, min(tokens, length))
        return 8 * (numbers + COPIES * min(entries, EXACT_UP_TO**2))

    if said := memory.excess(need(sequences * length)):
        fit = bisect_right(range(1, sequences * length), memory.free(), key=need)
        of_what = "--max-tokens" if problem.tensors else "batch times seq_len"
        advice = f"a {of_what} of {fit} fits" if fit else "no token fits"
        raise InputError(
            f"{problem.source}: a block on {sequences * length} tokens {said}: {advice}; "
            "select --components to take less, or --scope model"
        )


def count(names: Sequence[str]) -> int:
    """How many rows ``analyze`` gives for the parameters of one block."""
    return len(PARTS) * (len(names) * (len(names) + 1) // 2 + 1)


def analyze(
    curvature: Curvature, spec: Spec, layer: int, names: Sequence[str], seed: int = 0, tolerance: float = 1e-3
) -> Iterator[BlockRow]:
    """A row for each pair of the parameters ``names``, and for all of them together, part by part.

    ``curvature`` is ``Problem.block`` of this ``layer`` of ``spec``; ``names`` are those of the model, in any order,
    of whole components.  Where a spectrum is not exact, the errors of its ends are within ``tolerance`` times the
    spectral norm in a row that has converged.  What is drawn depends on ``seed`` and the row alone.
    """
    components = {place(name)[1] for name in names}
    own = {
        name.replace("blocks.0.", f"blocks.{layer}."): name
        for name in curvature.graph.parameters
        if place(name)[0] == 0 and place(name)[1] in components
    }
    if sorted(names) != sorted(own):
        raise UsageError(f"{', '.join(names)}: name every parameter of a component, and each once")
    at, start = {}, 0
    for name in own:
        at[name] = range(start, start + curvature.leaves[own[name]].numel())
        start = at[name].stop
    for part, terms in PARTS.items():
        hessian = block_hessian(curvature, spec.alone, terms, components)
        square = 0.0
        for a, b in combinations_with_replacement(own, 2):
            row = BlockRow(layer, _short(a), _short(b), part, len(at[a]), len(at[b]))
            matrix = hessian.block(at[a], at[b])
            block = curvature.block(own[a], own[b], terms)
            row = _measured(row, block, matrix.dense, matrix.frobenius, matrix.trace, seed, tolerance)
            square += (row.frobenius or 0.0) ** 2 * (1 if a == b else 2)
            yield row
        row = BlockRow(layer, WHOLE, WHOLE, part, start, start)
        block = curvature.block(own.values(), terms=terms)
        yield _measured(row, block, hessian.dense, partial(pow, square, 0.5), hessian.trace, seed, tolerance)


def _short(name: str) -> str:
    _, component, parameter = place(name)
    return f"{component}.{parameter}"


def _measured(
    row: BlockRow,
    block: Block,
    dense: Callable[[], Tensor],
    frobenius: Callable[[], float],
    trace: Callable[[], float],
    seed: int,
    tolerance: float,
) -> BlockRow:
    rng = torch.Generator().manual_seed(seed ^ crc32(f"{row.layer} {row.row} {row.column} {row.part}".encode()))
    symmetric = row.row == row.column
    entries, shorter = row.n_rows * row.n_columns, min(row.n_rows, row.n_columns)
    formed = entries <= EXACT_UP_TO**2 and 8 * COPIES * entries <= memory.free()
    matrix = dense() if formed else None
    row = replace(
        row,
        frobenius=frobenius() if matrix is None else float(matrix.norm()),
        trace=trace() if symmetric else None,
    )
    try:
        if matrix is not None and (symmetric or shorter <= SINGULAR_UP_TO):
            if not matrix.isfinite().all():
                raise NonFiniteError
            return _decomposed(row, matrix, *_rounding(block, rng))
        return estimated(row, block, tolerance, rng)
    except NonFiniteError:
        return replace(row, note="a product with the Hessian is not finite")


def _decomposed(row: BlockRow, matrix: Tensor, flat: bool, rounding: float) -> BlockRow:
    """Everything, from all eigenvalues or singular values; what is within their error, which is rounding, is zero."""
    symmetric = row.row == row.column
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2) if symmetric else torch.linalg.svdvals(matrix).flip(0)
    values = values.clamp(min=0) if row.part == "outer" else values  # a squared error is convex
    norm = float(values.abs().max())
    error = rounding + UNSEEN[values.dtype] * norm + (float((matrix - matrix.T).norm()) if symmetric else 0.0)
    flat = flat or norm <= error
    if flat:
        error += norm
    found: dict[str, Any] = {"spectral_norm": norm, "spectral_norm_error": error, "exact": True, "converged": True}
    if symmetric:
        found |= {"lambda_max": float(values[-1]), "lambda_max_error": error}
        found |= {"lambda_min": float(values[0]), "lambda_min_error": error}
    if flat:
        return replace(row, **found, note=FLAT)
    values = values[values.abs() > error]
    total = float(values.abs().sum())
    found["condition"] = norm / float(values.abs().min())
    found["spectral_entropy"] = float(torch.special.entr(values.abs() / total).sum())
    if symmetric:
        found["negative_mass"] = float(values.clamp(max=0).abs().sum()) / total
    return replace(row, **found)


def estimated(row: BlockRow, block: Block, tolerance: float, rng: Generator) -> BlockRow:
    """The ends of the spectrum, by Lanczos."""
    symmetric = row.row == row.column
    unit = 1.0 if symmetric else size_of(block, rng)
    found = ends(block if symmetric else Gram(block, unit), tolerance, rng)
    (low, high), (low_error, high_error) = found.values, found.errors
    low = max(low, 0.0) if row.part == "outer" else low
    if symmetric:
        norm, error = max(abs(low), abs(high)), max(low_error, high_error)
        row = replace(row, lambda_max=high, lambda_max_error=high_error, lambda_min=low, lambda_min_error=low_error)
    else:
        high_error += max(-low, 0.0)  # no Gram matrix has a negative eigenvalue: that much is rounding
        norm = unit * max(high, 0.0) ** 0.5
        least, most = (unit * max(end, 0.0) ** 0.5 for end in (high - high_error, high + high_error))
        error = max(norm - least, most - norm)
    note = "too large for its whole spectrum"
    if found.flat:
        note = FLAT
    elif not found.converged:
        note += "; not converged"
    return replace(row, spectral_norm=norm, spectral_norm_error=error, converged=found.converged, note=note)


def _rounding(block: Block, rng: Generator) -> tuple[bool, float]:
    """Whether a random product holds nothing but rounding, and how much of it: see ``Ends``."""
    start = unit_vectors(torch.randn(block.shape[1], 1, generator=rng, dtype=torch.float64))
    moved, rounding = product_with_rounding(block.__matmul__, start)
    return bool(moved.norm() <= rounding), float(rounding)
