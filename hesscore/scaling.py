"""How curvature grows: the spectral norms of a block's Hessian over a sweep of one quantity, as powers of it.

The outer and the functional part are taken apart.  The functional part is linear in the residual, which would grow in
its own way: so the target is the block's output less a residual that is drawn, and the same for every value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, isfinite, log
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Generator

from hesscore.blocks import FLAT, BlockRow, estimated
from hesscore.bounds.growth import exponent
from hesscore.bounds.settings import option
from hesscore.chain import Point
from hesscore.curvature import Block, Curvature, inner, outer
from hesscore.errors import InputError, UsageError
from hesscore.problem import check_spec, drawn_data, split
from hesscore.spec import Spec, make_spec, read_spec
from hesscore.spectrum.ends import UNSEEN, NonFiniteError, product_with_rounding
from hesscore.spectrum.lanczos import unit
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters

PARTS = {"outer": outer, "functional": inner}

FIELDS = {"seq_len": "seq_len", "width": "d_model", "layers": "layers"}
"""The field of a spec that a quantity sets; ``width`` also sets ``d_ff``, which keeps its ratio to it."""

QUANTITIES = ("input_scale", *FIELDS)
"""What can be swept; ``input_scale`` is the factor before standard normal tokens, 1 unless it is given."""

DEFAULT = {"input_scale": (0.05, 0.1, 0.2, 0.4), "seq_len": (8, 16, 32, 64)}
"""What is swept where nothing is asked for, one after the other."""

ACROSS = (
    ("attn.k.weight", "attn.q.weight"),
    ("attn.k.weight", "attn.v.weight"),
    ("attn.q.weight", "attn.v.weight"),
)
"""The pairs off the diagonal."""

FIRST = {"attn.q.weight": 3, "attn.k.weight": 3, "attn.v.weight": 1, "attn.o.weight": 1}
"""The power of the tokens' size with which the output of attention moves with a weight, at small scores."""

SECOND = {
    ("attn.k.weight", "attn.k.weight"): 5,
    ("attn.q.weight", "attn.q.weight"): 5,
    **dict.fromkeys(ACROSS, 3),
}
"""The power with which it bends."""

EXACT_UP_TO = 512
"""Rows and columns up to which the singular values of a pair are computed; larger ones take Lanczos."""

TOLERANCE = 1e-3
"""Error of a norm by Lanczos, over it (of a pair: of its square), that is good enough for a fit."""

LOST = 1e-9
"""How much of the residual may be lost beside a large output, over it."""


class Setting(NamedTuple):
    """What is measured: a spec, on standard normal tokens times ``input_scale``."""

    spec: Spec
    input_scale: float


class Sweep(NamedTuple):
    """The values of one quantity, and the setting of each."""

    quantity: str
    values: tuple[float, ...]
    settings: tuple[Setting, ...]


class Norm(NamedTuple):
    """A spectral norm with its error; ``fault`` says why it is of no use to a fit."""

    value: float
    error: float
    fault: str = ""


Key = tuple[str, str, str]
"""Row, column and part of the Hessian."""


class Measurement(NamedTuple):
    """All norms at one value of a sweep, for one draw of weights and data."""

    value: float
    draw: int
    norms: Mapping[Key, Norm]


class Mean(NamedTuple):
    """The geometric mean of the norms at ``x`` that are in a fit, over so many draws.

    ``error`` is the largest of these norms' errors, each over its norm.
    """

    x: float
    norm: float
    error: float
    draws: int


@dataclass(frozen=True)
class ScalingRow:
    """``|H[row, column]|_2`` grows as the power ``exponent`` of a quantity; see ``hesscore.bounds.growth.exponent``.

    ``theory`` is the exponent for a layer of attention alone at small scores (see ``theory``).  ``None`` is a number
    that could not be had, or that theory does not give; ``note`` says what was left out of the fit.
    """

    quantity: str
    row: str
    column: str
    part: str
    exponent: float | None
    stderr: float | None
    theory: float | None
    points: tuple[Mean, ...]
    note: str = ""


COLUMNS = tuple(field.name for field in fields(ScalingRow) if field.name != "points")


def plan(source: str | Path, given: Mapping[str, Sequence[float]]) -> list[Sweep]:
    """The sweeps over the block spec at ``source``: of the quantity that is ``given`` several values, or ``DEFAULT``.

    A quantity that is given one value is held at it.  ``UsageError`` for what cannot be built or does not fit.
    """
    if source == "":
        raise UsageError("SPEC is empty: name a file")
    spec = read_spec(source)
    if spec.vocab is not None:
        raise UsageError(f"{source}: vocab: {spec.vocab}: leave it out: a block or a stack is swept on its own")
    for quantity, values in given.items():
        if len(set(values)) < len(values):
            raise UsageError(f"{_options([quantity])}: a value is given twice")
    swept = {quantity: tuple(values) for quantity, values in given.items() if len(values) > 1}
    if given and not swept:
        raise UsageError(f"{_options(given)}: one value is no sweep: give one of {_options(QUANTITIES)} several times")
    if len(swept) > 1:
        raise UsageError(f"{_options(swept)}: one quantity is swept at a time: give the others one value each")
    held = {quantity: values[0] for quantity, values in given.items() if quantity not in swept}
    return [
        Sweep(quantity, values, tuple(_setting(source, spec, held | {quantity: value}) for value in values))
        for quantity, values in (swept or DEFAULT).items()
    ]


def _setting(source: str | Path, spec: Spec, chosen: Mapping[str, float]) -> Setting:
    size = chosen.get("input_scale", 1.0)
    if not (size > 0 and isfinite(size)):
        raise UsageError(f"--input-scale {size}: give a finite number above 0")
    changes = {FIELDS[quantity]: value for quantity, value in chosen.items() if quantity in FIELDS}
    if "d_model" in changes:
        changes["d_ff"] = spec.hidden_at(changes["d_model"])
    try:
        spec = make_spec(spec.model_dump() | changes)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    check_spec(source, spec, torch.float64)
    return Setting(spec, size)


def _options(quantities: Iterable[str]) -> str:
    return ", ".join(map(option, quantities))


def pairs(spec: Spec) -> list[tuple[str, str]]:
    """Every parameter of the first block with itself, and the weights of attention with each other."""
    own = [name.removeprefix("blocks.0.") for name in model(spec).parameters if name.startswith("blocks.0.")]
    return [*((name, name) for name in own), *ACROSS]


def theory(quantity: str, spec: Spec, row: str, column: str, part: str) -> float | None:
    """The exponent in the size of the tokens, for weights of a layer of attention alone at small scores.

    The output moves with a weight as the power ``FIRST`` of that size, and bends with two as ``SECOND``.  Behind a
    norm, whose eps is small beside the tokens, it does not know their size.
    """
    alone = spec.layers == 1 and not spec.d_ff and (spec.norm == "none" or spec.placement != "post")
    if quantity != "input_scale" or not alone or not {row, column} <= FIRST.keys():
        return None
    power = FIRST[row] + FIRST[column] if part == "outer" else SECOND.get((row, column))
    return None if power is None else float(power if spec.norm == "none" else 0)


def cost(setting: Setting) -> float:
    """In proportion to the work of a measurement: tangents times numbers that each of them moves."""
    spec, _ = setting
    sizes = [min(EXACT_UP_TO, spec.d_model**2)] * (4 + len(ACROSS)) + [min(EXACT_UP_TO, spec.d_model * spec.d_ff)] * 2
    moved = spec.layers * (spec.d_model + spec.d_ff + spec.heads * spec.seq_len)
    return float(sum(sizes) * spec.batch * spec.seq_len * moved)


def measure(sweep: Sweep, draws: int, seed: int = 0) -> Iterator[Measurement]:
    """Every value of a sweep for one draw, then for the next; a draw depends on ``seed`` and its number alone."""
    for draw in range(draws):
        for value, setting in zip(sweep.values, sweep.settings, strict=True):
            drawn = draw_seed(seed, draw)
            curvature = problem(setting, drawn)
            norms = {}
            for row, column in pairs(setting.spec):
                for part, terms in PARTS.items():
                    block = curvature.block(f"blocks.0.{row}", f"blocks.0.{column}", terms)
                    rng = torch.Generator().manual_seed(drawn ^ crc32(f"{row} {column} {part}".encode()))
                    norms[row, column, part] = spectral_norm(block, part, rng)
            yield Measurement(value, draw, norms)


def draw_seed(seed: int, draw: int) -> int:
    """The seed of one draw of weights and data."""
    return seed ^ crc32(f"draw {draw}".encode())


def problem(setting: Setting, seed: int) -> Curvature:
    """The curvature at seeded weights and tokens, of which the output is a standard normal residual off its target."""
    spec, size = setting
    graph, weights = model(spec), parameters(spec, seed)
    drawn = drawn_data(spec, seed)
    x, residual = size * drawn.data, drawn.target
    output = graph.nodes[graph.nodes[-1].sources[0]].name
    y = Point(graph, {**weights, **inputs(spec, x, x)}, watch={output}).watched[output]
    target = y - residual
    if not (y - target - residual).norm() <= LOST * residual.norm():
        raise InputError(f"at input_scale {size:g} the residual is lost beside an output of {float(y.abs().max()):.1e}")
    return Curvature(graph, weights, split(spec, replace(drawn, data=x, target=target)))


def spectral_norm(block: Block, part: str, rng: Generator) -> Norm:
    """Exact but for rounding, or by Lanczos for a block of more rows or columns than ``EXACT_UP_TO``."""
    try:
        if max(block.shape) > EXACT_UP_TO:
            row = BlockRow(0, " ".join(block.rows), " ".join(block.columns), part, *block.shape)
            row = estimated(row, block, TOLERANCE, rng)
            assert row.spectral_norm is not None and row.spectral_norm_error is not None
            fault = FLAT if row.note == FLAT else "" if row.converged else "not converged"
            return Norm(row.spectral_norm, row.spectral_norm_error, fault)
        matrix = block.dense()
        if not matrix.isfinite().all():
            raise NonFiniteError
        start = unit(torch.randn(block.shape[1], 1, generator=rng, dtype=torch.float64))
        _, rounding = product_with_rounding(block.__matmul__, start)
        value = float(torch.linalg.matrix_norm(matrix, 2))
        error = float(rounding) + UNSEEN[matrix.dtype] * value
        return Norm(value, error, FLAT if value <= error else "")
    except NonFiniteError:
        return Norm(float("nan"), float("nan"), "not finite")


def rows(sweep: Sweep, done: Sequence[Measurement]) -> list[ScalingRow]:
    """A row for each pair and part, from what is measured of the sweep."""
    keys = done[0].norms if done else ()
    return [_row(sweep, key, [(one.value, one.draw, one.norms[key]) for one in done]) for key in keys]


def _row(sweep: Sweep, key: Key, every: Sequence[tuple[float, int, Norm]]) -> ScalingRow:
    good = [point for point in every if not point[2].fault]
    power = exponent([x for x, _, _ in good], [norm.value for _, _, norm in good], [draw for _, draw, _ in good])
    at: dict[float, list[Norm]] = {}
    for x, _, norm in good:
        at.setdefault(x, []).append(norm)
    faults = Counter(norm.fault for _, _, norm in every if norm.fault)
    return ScalingRow(
        sweep.quantity,
        *key,
        exponent=power.value if power else None,
        stderr=power.stderr if power and isfinite(power.stderr) else None,
        theory=theory(sweep.quantity, sweep.settings[0].spec, *key),
        points=tuple(_mean(x, norms) for x, norms in at.items()),
        note="; ".join(
            f"{fault}{'' if many == len(every) else f' in {many} of {len(every)} norms'}"
            for fault, many in faults.items()
        ),
    )


def _mean(x: float, norms: Sequence[Norm]) -> Mean:
    mean = exp(sum(log(norm.value) for norm in norms) / len(norms))
    return Mean(x, mean, max(norm.error / norm.value for norm in norms), len(norms))
