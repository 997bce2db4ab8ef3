"""What is analysed: a model at its weights, on its data, in one precision; specs and checkpoints resolve to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hesscore.checkpoints import load
from hesscore.curvature import CACHED_ELEMENTS, Batch, Curvature
from hesscore.errors import InputError, UsageError
from hesscore.graph import Graph
from hesscore.inputs import UNSCORED, read_data
from hesscore.spec import Spec, read_spec
from hesscore.wiring.model import inputs, model, parameters

DOUBLE_UP_TO = 5_000_000
"""Parameters up to which float64 is the default precision."""

MAX_TOKENS = 4096
"""Next tokens that are scored by default: time and memory grow with them, and a file may hold millions."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}

SPEC_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Problem:
    """A graph with its parameters and data: what ``Curvature`` needs, and where it all came from."""

    source: str
    spec: Spec
    parameters: Mapping[str, Tensor]
    batches: list[Batch]
    scored: int
    """Tokens in the mean that is the loss."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """The name in the file of each parameter."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def graph(self) -> Graph:
        return model(self.spec)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    def curvature(self) -> Curvature:
        """The curvature of the mean loss; ``InputError`` if that is not finite."""
        curvature = Curvature(self.graph, self.parameters, self.batches)
        if not torch.isfinite(curvature.loss):
            raise InputError(f"{self.source}: the loss is {float(curvature.loss)}, so there is nothing to analyse")
        return curvature


def open_problem(
    source: str | Path,
    tokens: str | Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
) -> Problem:
    """Resolve a checkpoint or a YAML spec.

    ``tokens`` is a ``.bin`` or ``.npy`` file, of which the first ``max_tokens`` (by default ``MAX_TOKENS``) next tokens
    are scored; without it, or for a spec, the data are drawn from ``seed``.  ``dtype`` is float64 for models up to
    ``DOUBLE_UP_TO`` parameters, else float32, unless it is given.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: give one of {', '.join(DTYPES)}")
    if not 0 <= seed < 2**64:
        raise UsageError(f"--seed {seed}: give a number from 0 to 2^64 - 1")
    if max_tokens is not None and tokens is None:
        raise UsageError("--max-tokens needs --tokens: drawn data are scored whole")
    if Path(source).suffix in SPEC_SUFFIXES:
        if tokens is not None:
            raise UsageError(f"{source} is a spec: its input is drawn from the seed, so --tokens has no meaning")
        spec = read_spec(source)
        weights, names, provenance = parameters(spec, seed), {}, {"weights": f"drawn from seed {seed}"}
        notes = ["seeded weights and inputs: these numbers describe the architecture, not a trained model"]
    else:
        checkpoint = load(source)
        spec, weights, names = checkpoint.spec, checkpoint.parameters, checkpoint.tensors
        provenance, notes = {"family": checkpoint.family, "checkpoint_sha256": checkpoint.sha256}, checkpoint.notes[:]
    if tokens is None:
        data, target = _drawn(spec, seed)
        scored = data.shape[0] * data.shape[1]
        if names:
            notes.append(
                "no --tokens: scored on random tokens, where the model was never trained; not its real curvature"
            )
        provenance["data"] = f"drawn from seed {seed}"
    else:
        assert spec.vocab is not None
        read = read_data(tokens, spec.vocab, spec.seq_len, MAX_TOKENS if max_tokens is None else max_tokens)
        data, target, scored = read.tokens, read.targets, read.scored
        provenance |= {"data": str(tokens), "data_sha256": read.sha256}
        notes += read.notes
    count = sum(weight.numel() for weight in weights.values())
    precision = DTYPES[dtype or ("float64" if count <= DOUBLE_UP_TO else "float32")]
    return Problem(
        source=str(source),
        spec=spec,
        parameters={name: weight.to(precision) for name, weight in weights.items()},
        batches=split(spec, data, target, precision),
        scored=scored,
        tensors=names,
        provenance=provenance,
        notes=tuple(notes),
    )


def split(spec: Spec, data: Tensor, target: Tensor, dtype: torch.dtype) -> list[Batch]:
    """The data in parts whose widest array, attention or hidden layer or logits, fits the processor's cache."""
    length = data.shape[1]
    widest = length * max(spec.heads * length, spec.d_ff, spec.vocab or 0)
    size = max(1, CACHED_ELEMENTS // widest)
    scored = torch.ones(data.shape[:2]) if spec.vocab is None else target != UNSCORED
    batches = []
    for part, aim, share in zip(data.split(size), target.split(size), scored.split(size), strict=True):
        constants = {
            name: constant.to(dtype) if constant.is_floating_point() else constant
            for name, constant in inputs(spec, part, aim).items()
        }
        batches.append(Batch(float(share.sum() / scored.sum()), constants))
    return batches


def _drawn(spec: Spec, seed: int) -> tuple[Tensor, Tensor]:
    """Seeded data and targets: uniform token ids, or standard normal activations if there is no vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    if spec.vocab is None:
        shape = (2, spec.batch, spec.seq_len, spec.d_model)
        data, target = torch.randn(shape, generator=rng, dtype=torch.float64)
        return data, target
    ids = torch.randint(spec.vocab, (spec.batch, spec.seq_len + 1), generator=rng)
    return ids[:, :-1], ids[:, 1:]
