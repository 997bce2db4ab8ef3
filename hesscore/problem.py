"""What is analysed: a model at its weights, on its data, in one precision; specs and checkpoints resolve to it.

Or each of its blocks on its own, at its real input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

import torch
from torch import Generator, Tensor

from hesscore import chain
from hesscore.capacity import DTYPES, check_data, check_spec, precision_of, together
from hesscore.checkpoints import load
from hesscore.checkpoints.optimizer import Adam
from hesscore.curvature import Batch, Curvature
from hesscore.errors import InputError, UsageError
from hesscore.graph import Graph
from hesscore.inputs import data as given
from hesscore.inputs.data import UNSCORED, Data
from hesscore.inputs.reading import read_data
from hesscore.spec import SPEC_SUFFIXES, Loss, Spec, read_spec
from hesscore.wiring.inputs import SAME_FOR_ALL, inputs
from hesscore.wiring.model import mask, model, parameters

MAX_TOKENS = 4096
"""Next tokens that are scored by default: time and memory grow with them, and a file may hold millions."""

DRAWN_LENGTH = 256
"""Tokens of a sequence that is drawn for a checkpoint, at most: some take thousands."""

TARGETS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "input": lambda x, rng: x,
    "zero": lambda x, rng: torch.zeros_like(x),
    "random": lambda x, rng: torch.randn(x.shape, generator=rng, dtype=x.dtype),
}
"""What the output of a block on its own is compared with; random ones are standard normal."""


@dataclass(frozen=True)
class Problem:
    """A graph with its parameters and data: what ``Curvature`` needs, and where it all came from."""

    source: str
    spec: Spec
    parameters: Mapping[str, Tensor] = field(repr=False)
    batches: list[Batch] = field(repr=False)
    scored: int
    """Tokens, or sequences, in the mean that is the loss."""
    tensors: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The name in the file of each parameter."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    optimizer: Adam | None = field(default=None, repr=False)
    """In whose state the checkpoint was saved, if it holds one."""

    @cached_property
    def graph(self) -> Graph:
        return model(self.spec)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    def curvature(self) -> Curvature:
        """The curvature of the mean loss; ``InputError`` if that is not finite, or another one the second time."""
        curvature = Curvature(self.graph, self.parameters, self.batches)
        if not torch.isfinite(curvature.loss):
            raise InputError(f"{self.source}: the loss is {float(curvature.loss)}, so there is nothing to analyse")
        if (again := curvature.loss_again()) != curvature.loss:
            both = f"{float(curvature.loss)!r} and then {float(again)!r}"
            raise InputError(f"{self.source}: the loss is {both}: this machine is not deterministic")
        return curvature

    def block(self, layer: int, target: str = "input", seed: int = 0) -> Curvature:
        """The curvature of one block on its own, in float64: a model of one layer with the parameters ``blocks.0.*``.

        Its input is what it is given within the model, its loss the mean squared error of its output to one of
        ``TARGETS``, over the scored tokens: the others are seen by attention, and weigh nothing.
        """
        spec, owner = self.spec, f"blocks.{self.spec.owner(layer)}."
        normed = spec.placement != "post" and spec.norm != "none"
        first = f"blocks.{layer}.{'norm1' if normed else 'attn.q'}"
        source = self.graph.nodes[self.graph.nodes[self.graph.index[first]].sources[0]].name
        weights = {name: weight.double() for name, weight in self.parameters.items()}
        inputs, scored, masks = [], [], []
        for batch in self.batches:
            constants = batch.constants
            inputs.append(chain.Point(self.graph, {**weights, **constants}, watch={source}).watched[source])
            scored.append(_tokens_scored(spec, constants))
            masks.append(constants[mask(spec, layer)])
        x = torch.cat(inputs)
        rng = torch.Generator().manual_seed(seed ^ crc32(f"blocks.{layer}".encode()))
        own = {"input": x, "target": TARGETS[target](x, rng), "weights": torch.cat(scored), "mask": masks[0]}
        if any(len(pairs) > 1 for pairs in masks):  # each sequence has its own
            own["mask"] = torch.cat([m.expand(len(w), *m.shape[1:]) for m, w in zip(masks, scored, strict=True)])
        graph = model(spec.alone)
        shared = {name: self.batches[0].constants[name] for name in graph.constants if name not in own}
        moving = {name: weights[name.replace("blocks.0.", owner)] for name in graph.parameters}
        curvature = Curvature(graph, moving, [Batch(1.0, own | shared)])
        if not torch.isfinite(curvature.loss):
            raise InputError(f"{self.source}: the loss of block {layer} is {float(curvature.loss)}")
        return curvature


def open_problem(
    source: str | Path,
    data: str | Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    loss: Loss | None = None,
    spec: str | Path | None = None,
) -> Problem:
    """Resolve a checkpoint or a YAML spec.

    ``data`` is a file of what is scored (``hesscore.inputs``), of which the first ``max_tokens`` (by default
    ``MAX_TOKENS``) are; without it, or for a spec, the data are drawn from ``seed``.  ``dtype`` is float64 for models
    up to ``DOUBLE_UP_TO`` parameters, else float32, unless it is given.  ``loss`` is by default that of the
    checkpoint's head.  Of a checkpoint of no known family, the file ``spec`` says what its tensors are.
    """
    check_options(source, data, dtype, seed, max_tokens, loss, spec)
    if Path(source).suffix.lower() in SPEC_SUFFIXES:
        return _of_spec(source, data, dtype, seed, loss)
    checkpoint = load(source, loss, spec)
    found, notes = checkpoint.spec, checkpoint.notes[:]
    precision = precision_of(found, dtype)
    provenance: dict[str, Any] = {
        "family": checkpoint.family,
        "checkpoint_sha256": checkpoint.sha256,
        "left_out": checkpoint.left_out,
    }
    if data is None:
        given = drawn_data(found, seed, min(found.length, DRAWN_LENGTH))
        provenance |= {"data": f"drawn from seed {seed}", "max_tokens": None}
        notes.append(f"no --data: scored on {_drawn(found)}; not its real curvature")
    else:
        max_tokens = MAX_TOKENS if max_tokens is None else max_tokens
        given = read_data(data, found, max_tokens, seed, checkpoint.folder)
        provenance |= {"data": str(data), "data_sha256": given.sha256, "max_tokens": max_tokens}
        notes += given.notes
    check_data(data or source, found, given, precision)
    return Problem(
        source=str(source),
        spec=found,
        # In one layout, so that a model has the same report to the last digit however it is stored.
        parameters={name: weight.to(precision).contiguous() for name, weight in checkpoint.parameters.items()},
        batches=split(found, given),
        scored=given.scored,
        tensors=checkpoint.tensors,
        provenance=provenance,
        notes=tuple(notes),
        optimizer=checkpoint.optimizer,
    )


def check_options(
    source: str | Path,
    data: str | Path | None = None,
    dtype: str | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
    loss: str | None = None,
    spec: str | Path | None = None,
) -> None:
    """``UsageError`` for what ``open_problem`` could do nothing with, whatever the files hold."""
    for name, path in ("SOURCE", source), ("--data", data), ("--spec", spec):
        if path == "":
            raise UsageError(f"{name} is empty: name a file")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: give one of {', '.join(DTYPES)}")
    if spec is not None and Path(source).suffix.lower() in SPEC_SUFFIXES:
        raise UsageError(f"{source} is a spec itself: --spec is for checkpoints")
    if loss is not None and loss not in get_args(Loss):
        raise UsageError(f"--loss {loss}: give one of {', '.join(get_args(Loss))}")
    if not 0 <= seed < 2**64:
        raise UsageError(f"--seed {seed}: give a number from 0 to 2^64 - 1")
    if max_tokens is not None and data is None:
        raise UsageError("--max-tokens needs --data: drawn data are scored whole")


def _of_spec(source: str | Path, data: str | Path | None, dtype: str | None, seed: int, loss: Loss | None) -> Problem:
    if data is not None:
        raise UsageError(f"{source} is a spec: its input is drawn from the seed, so --data has no meaning")
    if loss is not None:
        raise UsageError(f"{source} is a spec: its own field says the loss, so --loss has no meaning")
    spec = read_spec(source)
    precision = precision_of(spec, dtype)
    check_spec(source, spec, precision)
    given = drawn_data(spec, seed)
    return Problem(
        source=str(source),
        spec=spec,
        parameters={name: weight.to(precision) for name, weight in parameters(spec, seed).items()},
        batches=split(spec, given),
        scored=given.scored,
        provenance={name: f"drawn from seed {seed}" for name in ("weights", "data")} | {"max_tokens": None},
        notes=("seeded weights and inputs: these numbers describe the architecture, not a trained model",),
    )


def _drawn(spec: Spec) -> str:
    """What is drawn in the place of data, and how the model takes it."""
    if spec.image_size:
        return "random pixels, which are no images"
    return "random tokens, where the model was never trained" if spec.vocab else "random activations"


def drawn(source: str, spec: Spec, seed: int = 0, input_norm: float | None = None) -> Problem:
    """A spec without a vocabulary, in float64 on seeded data, of which the longest token has ``input_norm``."""
    check_spec(source, spec, torch.float64)
    data = drawn_data(spec, seed)
    if input_norm is not None:
        data = replace(data, data=data.data * (input_norm / data.data.norm(dim=-1).max()))
    provenance = {"weights": f"drawn from seed {seed}", "data": f"drawn from seed {seed}"}
    return Problem(source, spec, parameters(spec, seed), split(spec, data), data.scored, provenance=provenance)


def split(spec: Spec, data: Data) -> list[Batch]:
    """The data in parts whose widest array, attention or hidden layer or logits, fits the processor's cache.

    There is one for each thread at least, where there are sequences enough.
    """
    count, length = data.data.shape[:2]
    size = together(spec, count, length + spec.class_token)
    constants = inputs(spec, data.data, data.target, data.keep, data.weights, data.segments)
    weights = constants["weights"]
    scored = weights * (data.target != UNSCORED) if spec.classifies else weights
    own = {
        name: constant.split(size)
        for name, constant in constants.items()
        if name not in SAME_FOR_ALL and len(constant) == count
    }
    shared = {name: constant for name, constant in constants.items() if name not in own}
    parts = [
        Batch(float(part.sum() / scored.sum()), shared | {name: parts[i] for name, parts in own.items()})
        for i, part in enumerate(scored.split(size))
    ]
    return [part for part in parts if part.share]


def _tokens_scored(spec: Spec, constants: Mapping[str, Tensor]) -> Tensor:
    """The weight of each token in the loss, ``(B, L)``; of those that are not padding, where sequences are scored."""
    weights = constants["weights"]
    if spec.pools:
        keep = constants["mask"][:, 0, 0].diagonal(dim1=1, dim2=2) if spec.causal else constants["mask"][:, 0, 0, 0]
        return keep.double().expand(len(weights), -1)
    return weights * (constants["targets"] != UNSCORED) if spec.classifies else weights


def drawn_data(spec: Spec, seed: int, length: int | None = None) -> Data:
    """Seeded data and targets, of their own random numbers: those of the weights would make data that go with them."""
    return given.drawn(spec, torch.Generator().manual_seed(seed ^ crc32(b"data")), length)
