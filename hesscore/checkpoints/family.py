"""Model families: what a file calls each weight, and how it lies there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hesscore.checkpoints.tensors import check_finite, check_names, check_shape
from hesscore.files import File
from hesscore.spec import Spec
from hesscore.wiring.model import model


@dataclass(frozen=True)
class Place:
    """Where a leaf lies in a file: in which tensor, transposed or not, at which output features if fused."""

    name: str
    transposed: bool = False
    features: range | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """The leaf, in our layout (linear weights are ``(in, out)``), as a view of the file's tensor."""
        turned = tensor.T if self.transposed else tensor
        return turned if self.features is None else turned[..., self.features.start : self.features.stop]

    def shape(self, leaf: tuple[int, ...]) -> tuple[int, ...]:
        """The least shape of the file's tensor that holds a leaf of this shape here."""
        whole = leaf if self.features is None else (*leaf[:-1], self.features.stop)
        return whole[::-1] if self.transposed else whole

    def __str__(self) -> str:
        return self.name + (f"[{self.features.start}:{self.features.stop}]" if self.features else "")


@dataclass(frozen=True)
class Weights:
    """What a family finds in a file: tensors by the family's own names, and the spec that they follow."""

    spec: Spec
    tensors: Mapping[str, Tensor]
    stored_as: Mapping[str, str]
    """The key of each tensor in the file, wrapper prefixes included."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoint:
    """A trained model.

    ``parameters`` holds every leaf of ``wiring.model.model(spec)`` in the wiring's layout: a view of a tensor
    in the file, in its dtype.  ``tensors`` says which one, and which part of it (``c_attn.weight[0:64]``);
    ``notes`` say what a reader of the results should know.
    """

    family: str
    spec: Spec
    parameters: dict[str, Tensor]
    tensors: dict[str, str]
    sha256: str
    notes: list[str]


class Family(ABC):
    """One kind of checkpoint.  A subclass in this folder registers itself: nothing else need be told."""

    name: ClassVar[str]
    marks: ClassVar[str]
    """What a file of this family holds, for the message about a file of no known family."""

    registry: ClassVar[dict[str, Family]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Family.registry[cls.name] = cls()

    @abstractmethod
    def recognises(self, content: Mapping[Any, Any]) -> bool:
        """Whether a file with this content is meant for this family, sound or not."""

    @abstractmethod
    def weights(self, content: Mapping[Any, Any], size: int) -> Weights:
        """Take the weights from a file's content; ``size`` is the file's, in bytes."""

    @abstractmethod
    def places(self, spec: Spec) -> dict[str, Place]:
        """Where each leaf of ``model(spec)`` lies."""

    def views(self, tensors: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
        """Every leaf of ``model(spec)`` as a view of ``tensors``: writing to a leaf writes to the tensor.

        ``tensors`` are weights, gradients or an optimizer's moments, by the family's names.
        """
        return {leaf: place.view(tensors[place.name]) for leaf, place in self.places(spec).items()}

    def shapes(self, spec: Spec) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that a file of ``spec`` holds, by the family's names."""
        leaves = model(spec).parameters
        # The parts of a fused tensor come in order, so the last one gives its shape.
        return {place.name: place.shape(leaves[leaf]) for leaf, place in self.places(spec).items()}

    def checkpoint(self, content: Mapping[Any, Any], file: File) -> Checkpoint:
        """The model in a file's content; ``InputError`` if it is not exactly what its spec asks for."""
        found = self.weights(content, file.size)
        places, shapes = self.places(found.spec), self.shapes(found.spec)
        check_names(found.tensors, shapes)
        for name, shape in shapes.items():
            check_shape(found.stored_as[name], found.tensors[name], shape)
        for name in shapes:
            check_finite(found.stored_as[name], found.tensors[name])
        kinds = {tensor.dtype for tensor in found.tensors.values()} & {torch.float16, torch.bfloat16}
        stored_in = sorted(str(kind).removeprefix("torch.") for kind in kinds)
        return Checkpoint(
            family=self.name,
            spec=found.spec,
            parameters=self.views(found.tensors, found.spec),
            tensors={
                leaf: str(Place(found.stored_as[place.name], place.transposed, place.features))
                for leaf, place in places.items()
            },
            sha256=file.sha256(),
            notes=[*found.notes, *(f"weights stored in {kind}" for kind in stored_in)],
        )
