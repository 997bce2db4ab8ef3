"""Model families: what a file calls each weight, and how it lies there."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hesscore.checkpoints.optimizer import Adam, read_adam
from hesscore.checkpoints.places import Place, Shape
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.tensors import check_finite, check_float, check_memory, check_names, check_shape, listed
from hesscore.errors import InputError, UsageError
from hesscore.spec import MAX_LAYERS, Loss, Spec
from hesscore.wiring.model import model
from hesscore.wiring.names import Named, place

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module)\.")
"""What torch.compile and DistributedDataParallel put before names, at any depth."""


class Head(NamedTuple):
    """A head that a file may have."""

    loss: Loss
    weight: str
    """The name of its last weight, ``(outputs, width)``."""
    tensors: str
    """A pattern of the names of all of its tensors, and of none of the body's."""


@dataclass
class Content:
    """What a family makes a model of.  What it does not use it leaves out, saying why."""

    tensors: dict[str, Tensor]
    """By the family's own names."""
    stored_as: dict[str, str]
    """The key of each tensor in the file."""
    stored: Stored
    loss: Loss | None
    """What was asked for."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Keys in the file of tensors that are not analysed, and why."""
    untrained: set[str] = field(default_factory=set)
    """Those of them that no optimizer has: buffers and copies."""
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(stored: Stored, own: Callable[[str], str], loss: Loss | None = None) -> Content:
        """The tensors of a file by their ``own`` names; ``InputError`` if two have one."""
        stored_as: dict[str, str] = {}
        for key in stored.tensors:
            name = own(key)
            if name in stored_as:
                raise InputError(f"{listed([stored_as[name], key])} are two tensors for one place: keep one")
            stored_as[name] = key
        tensors = {name: stored.tensors[key] for name, key in stored_as.items()}
        return Content(tensors, stored_as, stored, loss)

    def leave_out(self, pattern: str, why: str, trained: bool = True) -> None:
        """Drop the tensors whose whole name matches; buffers and copies are not ``trained``."""
        for name in [name for name in self.tensors if re.fullmatch(pattern, name)]:
            del self.tensors[name]
            self.left_out[self.stored_as[name]] = why
            if not trained:
                self.untrained.add(self.stored_as[name])

    def merge(self, name: str, of: str) -> None:
        """Take ``name`` for another name of the tensor ``of``; ``InputError`` if both are there and differ."""
        if name not in self.tensors:
            return
        if of not in self.tensors:
            self.tensors[of], self.stored_as[of] = self.tensors.pop(name), self.stored_as[name]
        elif same_values(self.tensors[name], self.tensors[of]):
            self.leave_out(re.escape(name), f"a copy of {self.stored_as[of]}", trained=False)
        else:
            raise InputError(f"{self.stored_as[name]} and {self.stored_as[of]} are one tensor, but differ: keep one")

    def tied(self, head: str, table: str, asked: bool = True) -> bool:
        """Whether the head is the token table: it is ``asked`` to be, and absent or equal, and then left out."""
        if not asked or head not in self.tensors:
            return asked
        if table in self.tensors and not same_values(self.tensors[head], self.tensors[table]):
            self.notes.append(f"{self.stored_as[head]} differs from {self.stored_as[table]}: the head is not tied")
            return False
        self.leave_out(re.escape(head), f"tied: it is {self.stored_as.get(table, table)}", trained=False)
        return True

    def rows(self, name: str) -> int:
        """Of a tensor, which may be anything."""
        return next(iter(self.tensors[name].shape), 0)

    def head(
        self, heads: Sequence[Head], classifies: Callable[[int], Loss | None] = lambda labels: "sequence"
    ) -> tuple[Loss, int | None]:
        """What is scored, and how many classes or numbers there are: by the head asked for, or the first one there.

        ``classifies`` tells the loss of a head of ``sequence`` from its number of outputs.  The other heads are left
        out.  ``hidden`` needs none.
        """
        found: dict[Loss, Head] = {}
        for head in heads:
            if head.weight not in self.tensors:
                continue
            loss = classifies(self.rows(head.weight)) if head.loss == "sequence" else head.loss
            if loss is None:
                self.leave_out(head.tensors, "of a head for several labels at once, which is not scored")
            else:
                found[loss] = head
        there: list[Loss] = [*found, "hidden"]
        chosen = self.loss or there[0]
        if chosen not in there:
            raise UsageError(f"--loss {chosen}: the file has no head for it; it can be scored by {', '.join(there)}")
        for loss, head in found.items():
            if loss != chosen:
                self.leave_out(head.tensors, f"of the head for {loss}, which is not scored")
        words = chosen in ("hidden", "causal_lm", "masked_lm")
        return chosen, None if words else self.rows(found[chosen].weight)


@dataclass(frozen=True)
class Checkpoint:
    """A trained model.

    ``parameters`` holds every leaf of ``wiring.model.model(spec)`` in the wiring's layout, in the file's dtype: a view
    of a tensor in the file wherever that can be.  ``tensors`` says which one, and which part of it
    (``c_attn.weight[0:64]``); ``left_out`` says why other tensors of the file are not there; ``notes`` say what a
    reader of the results should know.
    """

    family: str
    spec: Spec
    parameters: dict[str, Tensor]
    tensors: dict[str, str]
    left_out: dict[str, str]
    folder: Path
    sha256: str
    notes: list[str]
    optimizer: Adam | None = None


class Family(ABC):
    """One kind of checkpoint.  A subclass in this folder registers itself: nothing else need be told."""

    name: ClassVar[str]
    bases: ClassVar[tuple[str, ...]] = ()
    """What stands before the names of the body where a head stands beside it, as ``bert.``; some files lack it."""

    registry: ClassVar[dict[str, Family]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            Family.registry[cls.name] = cls()

    @abstractmethod
    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        """Whether a file with these ``names``, as the family calls them, is meant for it, sound or not."""

    @abstractmethod
    def spec(self, content: Content) -> Spec:
        """The architecture.  Afterwards ``content`` has no tensor but those of ``places``, if the file is sound."""

    @abstractmethod
    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """Where a leaf of ``model(spec)`` of this shape lies."""

    def places(self, spec: Spec) -> dict[str, Place]:
        """Where each leaf of ``model(spec)`` lies."""
        return {name: self.place(place(name), shape, spec) for name, shape in model(spec).parameters.items()}

    def own(self, key: str) -> str:
        """What the family calls a tensor with this key in a file."""
        name = WRAPPERS.sub("", key)
        while base := next((base for base in ("model.", *self.bases) if name.startswith(base)), None):
            name = name.removeprefix(base)
        return name

    def views(self, tensors: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
        """Every leaf of ``model(spec)`` out of ``tensors``: weights, gradients or moments, by the family's names.

        They are views, but for parts that are interleaved.
        """
        return {leaf: place.take(tensors[place.name]) for leaf, place in self.places(spec).items()}

    def checkpoint(self, stored: Stored, loss: Loss | None = None) -> Checkpoint:
        """The model in a file; ``InputError`` if it is not exactly what its architecture asks for."""
        content = Content.of(stored, self.own, loss)
        spec = self.spec(content)
        if (spec.weight_sets or spec.layers) > len(content.tensors) or spec.layers > MAX_LAYERS:
            raise InputError(
                f"its architecture has {spec.layers} layers, but the file only {len(content.tensors)} tensors"
            )
        return checked(self.name, content, spec, self.places(spec))


def checked(family: str, content: Content, spec: Spec, places: Mapping[str, Place]) -> Checkpoint:
    """The model of ``spec`` in a file; ``InputError`` if its tensors are not exactly those of ``places``."""
    assert set(places) == set(model(spec).parameters)
    shapes = {place.name: place.shape for place in places.values()}
    stored, tensors, stored_as = content.stored, content.tensors, content.stored_as
    check_names(tensors, shapes)
    check_memory({stored_as[name]: tensor for name, tensor in tensors.items()}, stored.size)
    for name, shape in shapes.items():
        check_float(stored_as[name], tensors[name])
        check_shape(stored_as[name], tensors[name], shape)
    for name in shapes:
        check_finite(stored_as[name], tensors[name])
    lying = {leaf: (stored_as[place.name], place) for leaf, place in places.items()}
    optimizer, unread = read_adam(stored, content.untrained, lying)
    kinds = {tensor.dtype for tensor in tensors.values()} & {torch.float16, torch.bfloat16}
    stored_in = sorted(str(kind).removeprefix("torch.") for kind in kinds)
    return Checkpoint(
        family=family,
        spec=spec,
        parameters={leaf: place.take(tensors[place.name]) for leaf, place in places.items()},
        tensors={leaf: key + place.part for leaf, (key, place) in lying.items()},
        left_out=content.left_out,
        folder=stored.folder,
        sha256=stored.sha256,
        notes=[*stored.notes, *content.notes, *(f"weights stored in {kind}" for kind in stored_in), *unread],
        optimizer=optimizer,
    )


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and (a.is_set_to(b) or torch.equal(a, b))


def numbered(names: Iterable[str], pattern: str) -> int:
    """How many blocks the names number: ``pattern`` has their number for its group."""
    return len({found[1] for name in names if (found := re.match(pattern, name))})
