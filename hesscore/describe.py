"""What a checkpoint holds, what of it would be analysed, on which data, and what that would take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import hesscore
from hesscore.capacity import check_layers, need, precision_of
from hesscore.checkpoints import load
from hesscore.inputs.data import window
from hesscore.output import SCHEMA_VERSION, plain
from hesscore.problem import MAX_TOKENS, check_options
from hesscore.spec import SPEC_SUFFIXES, Loss, Spec, read_spec
from hesscore.wiring.model import model
from hesscore.wiring.names import place
from hesscore.wiring.size import operations

PRODUCTS = 140
"""With the Hessian, or what takes as long, for a row of ``hess analyze``: 125 to 160 on trained models."""

EFFORT = 2.0
"""Time of a product over that of its matrix products alone, where these are as fast as large square ones."""


@dataclass(frozen=True)
class Part:
    """A parameter of each of ``layers`` blocks, or of the model around them, of this ``shape``."""

    component: str
    parameter: str
    layers: int | None
    shape: tuple[int, ...]
    n_params: int
    """Of all layers together."""
    tensor: str
    """Its name in the file, in the first of these layers."""


@dataclass(frozen=True)
class Description:
    source: str
    family: str
    sha256: str | None
    spec: Spec
    parts: list[Part]
    left_out: dict[str, str]
    """Tensors of the file that are not analysed, and why."""
    notes: list[str]
    wants: list[str]
    """What may be given as data."""
    dtype: str
    tokens: int
    """For which time and memory are predicted."""
    memory: int
    """Bytes."""
    seconds: float
    """Of ``hess analyze`` for all parameters, roughly."""

    @property
    def n_params(self) -> int:
        return sum(part.n_params for part in self.parts)

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "hess_version": hesscore.__version__,
            "source": self.source,
            "family": self.family,
            "checkpoint_sha256": self.sha256,
            "spec": self.spec.model_dump(),
            "n_params": self.n_params,
            "parameters": [{name: plain(value) for name, value in asdict(part).items()} for part in self.parts],
            "left_out": self.left_out,
            "notes": self.notes,
            "wants": self.wants,
            "predicted": {
                "tokens": self.tokens,
                "dtype": self.dtype,
                "memory_bytes": self.memory,
                "seconds": round(self.seconds, 1),
            },
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def describe(
    source: str | Path,
    dtype: str | None = None,
    loss: Loss | None = None,
    names: str | Path | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Description:
    """Look at a checkpoint or a spec; nothing of its curvature is computed.

    ``names`` is the file that says what the tensors of one of no known family are; time and memory are predicted for
    ``max_tokens`` of data, or for the data that a spec draws.
    """
    check_options(source, dtype=dtype, loss=loss, spec=names)
    if Path(source).suffix.lower() in SPEC_SUFFIXES:
        spec, notes = read_spec(source), ["a spec: weights and data are drawn from a seed"]
        check_layers(source, spec)
        leaves = model(spec).parameters
        length, sequences = spec.length, spec.batch
        about: dict[str, Any] = {"family": "spec", "sha256": None, "left_out": {}, "notes": notes, "wants": []}
        tensors = dict.fromkeys(leaves, "")
    else:
        held = load(source, loss, names)
        spec, tensors = held.spec, held.tensors
        leaves = {name: tuple(leaf.shape) for name, leaf in held.parameters.items()}
        length = window(spec) if spec.image_size else min(window(spec), max_tokens)
        sequences = max(1, max_tokens // length)
        about = {"family": held.family, "sha256": held.sha256, "left_out": held.left_out, "notes": held.notes}
        about["wants"] = list(wants(spec, held.folder))
    precision = precision_of(spec, dtype)
    work = sum(operations(spec, length, spec.layers - (place(name)[0] or 0)) for name in leaves)
    return Description(
        source=str(source),
        spec=spec,
        parts=list(_parts(leaves, tensors)),
        dtype=str(precision).removeprefix("torch."),
        tokens=sequences * length,
        memory=need(spec, sequences, length, precision),
        seconds=EFFORT * PRODUCTS * sequences * work / _speed(precision),
        **about,
    )


def _parts(leaves: Mapping[str, tuple[int, ...]], tensors: Mapping[str, str]) -> Iterator[Part]:
    """Those that differ in nothing but their layer together, in the order of the graph."""
    found: dict[tuple[str, str, tuple[int, ...], bool], list[str]] = {}
    for name, shape in leaves.items():
        layer, component, parameter = place(name)
        found.setdefault((component, parameter, shape, layer is None), []).append(name)
    for (component, parameter, shape, alone), names in found.items():
        layers = None if alone else len(names)
        yield Part(component, parameter, layers, shape, len(names) * prod(shape), tensors[names[0]])


def wants(spec: Spec, folder: Path) -> Iterator[str]:
    """The data that the model can be scored on, in words, each with how it is given."""
    arrays = []
    if spec.image_size:
        size = f"{spec.channels}, {spec.image_size}, {spec.image_size}"
        arrays.append(f"pixel_values (B, {size}), prepared as the model was trained")
    elif spec.vocab:
        arrays.append(f"input_ids (B, up to {spec.length}) below {spec.vocab}")
        arrays.append("attention_mask")
        if spec.segments:
            arrays.append(f"token_type_ids below {spec.segments}")
    else:
        arrays.append(f"inputs_embeds (B, L, {spec.d_model})")
        arrays.append("attention_mask")
    labels = {
        "causal_lm": "labels (by default the next tokens)",
        "masked_lm": "labels, the tokens at masked positions, else -100",
        "token": f"labels (B, L) below {spec.labels}, -100 where nothing is scored",
        "sequence": f"labels (B) below {spec.labels}",
        "regression": f"labels (B, {spec.labels}), numbers",
        "hidden": f"labels (B, L, {spec.d_model}), what the output is compared with (by default drawn from the seed)",
    }
    yield f".npz with {', '.join([*arrays, labels[spec.objective]])}"
    if spec.objective not in ("causal_lm", "masked_lm", "hidden"):
        return
    if not spec.vocab:
        yield f".npy with {arrays[0]}"
        return
    yield ".npy or .bin (uint16) with token ids"
    readers = [name for name in ("tokenizer.json", "meta.pkl") if (folder / name).exists()]
    there = f"there is {readers[0]}" if readers else "there is none"
    yield f".txt, by a tokenizer.json or nanoGPT's meta.pkl beside the checkpoint ({there})"


def _speed(dtype: torch.dtype) -> float:
    """Multiplications and additions a second, of a large matrix product here."""
    a = torch.ones(1024, 1024, dtype=dtype)
    a @ a
    started, times = perf_counter(), 0
    while perf_counter() - started < 0.1:
        a @ a
        times += 1
    return times * 2 * 1024**3 / (perf_counter() - started)
