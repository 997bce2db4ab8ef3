"""What fits: the precision, the parts and the memory of a model on its data, before any of it is taken."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch

from hesscore import memory
from hesscore.curvature import CACHED_ELEMENTS
from hesscore.errors import InputError, UsageError
from hesscore.inputs.data import Data, counted
from hesscore.spec import MAX_LAYERS, Spec
from hesscore.wiring.size import kept, parameter_count

DOUBLE_UP_TO = 5_000_000
"""Parameters up to which float64 is the default precision."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def precision_of(spec: Spec, dtype: str | None) -> torch.dtype:
    return DTYPES[dtype or ("float64" if parameter_count(spec) <= DOUBLE_UP_TO else "float32")]


def together(spec: Spec, sequences: int, length: int) -> int:
    """How many sequences make a part of the data."""
    cached = max(
        1, CACHED_ELEMENTS // (length * max(spec.heads * length, spec.d_ff, 0 if spec.pools else spec.outputs or 0))
    )
    return min(cached, -(-sequences // memory.threads(sequences)))


def need(spec: Spec, sequences: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that weights, data and their products take; Python's numbers, as there may be any number of them."""
    size = together(spec, sequences, length)
    count, parts = parameter_count(spec), -(-sequences // size)
    part = dtype.itemsize * size * kept(spec, length)
    return dtype.itemsize * count + memory.working(count, parts, part, dtype)


def check_layers(source: str | Path, spec: Spec) -> None:
    """Refuse what would take too long to write down, whatever it would take to compute."""
    if spec.layers > MAX_LAYERS:
        raise UsageError(f"{source}: layers: {spec.layers} are more than {MAX_LAYERS}")


def check_spec(source: str | Path, spec: Spec, dtype: torch.dtype) -> None:
    """Refuse what cannot be built, naming the field that it would be well without."""
    check_layers(source, spec)

    def takes(spec: Spec) -> int:
        return need(spec, spec.batch, spec.length, dtype)

    if said := memory.excess(takes(spec)):
        least: dict[str, dict[str, Any]] = {name: {name: 1} for name in ("layers", "d_ff", "batch", "seq_len")}
        least["d_model"] = {"d_model": 2, "heads": 1, "kv_heads": 1}
        if spec.vocab is not None:
            least["vocab"] = {"vocab": 1}
        field = min(least, key=lambda name: takes(spec.model_copy(update=least[name])))
        sizes = f"{parameter_count(spec):,} parameters and {spec.batch * spec.length:,} tokens"
        raise UsageError(f"{source}: {field}: {getattr(spec, field)} is too large: {sizes} {said}")


def check_data(source: str | Path, spec: Spec, data: Data, dtype: torch.dtype) -> None:
    """Refuse sequences that would not fit in memory, saying how many would."""
    sequences, length = data.data.shape[0], data.data.shape[1] + spec.class_token

    def takes(some: int) -> int:
        return need(spec, some, length, dtype)

    if said := memory.excess(takes(sequences)):
        fit = bisect_right(range(1, sequences), memory.free(), key=takes)
        tokens = counted(spec, data)
        advice = f"--max-tokens {int(tokens[:fit].sum())} fits" if fit else f"not even {length} tokens fit"
        raise InputError(f"{source}: {int(tokens.sum())} tokens {said}: {advice}")
