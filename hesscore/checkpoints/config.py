"""``config.json`` of transformers: what it says of the architecture is honoured or refused, never passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

from hesscore import spec
from hesscore.checkpoints.reading import Stored
from hesscore.errors import InputError, UsageError
from hesscore.fields import validated
from hesscore.files import short

ACTIVATIONS: dict[str, spec.Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Ours, by their names in transformers."""


def _ours(name: object) -> spec.Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{short(name)} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


Activation = Annotated[spec.Activation, BeforeValidator(_ours)]


MISSING = (
    "no config.json beside it, nor model_args of nanoGPT in it, and shapes alone do not tell its heads: "
    "model.config.save_pretrained(folder) writes one"
)


class Config(BaseModel):
    """The fields that say how a model is built, with the defaults that transformers has for them.

    A subclass lists every field of its models that has a say in what they compute without dropout: those that we do
    not compute with their one value that we do, as ``Literal``.  Fields that are not listed have none.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names that transformers takes for fields."""

    model_type: str | None = None
    architectures: list[str] | None = None
    pad_token_id: int | None = None
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = None

    def last(self, loss: spec.Loss) -> dict[str, Any]:
        """Of a causal model, whose sequences are scored by their last token: the fields that say which that is."""
        if loss not in ("sequence", "regression"):
            return {}
        if self.pad_token_id is not None and self.pad_token_id < 0:
            raise InputError(f"config.json: pad_token_id is {self.pad_token_id}: it says where a sequence ends")
        return {"pool": "last", "pad_token": self.pad_token_id}

    def classifies(self, labels: int) -> spec.Loss | None:
        """What a head of a sequence with so many outputs is scored by; several labels at once by nothing here."""
        if self.problem_type == "multi_label_classification":
            return None
        kind = self.problem_type or ("regression" if labels == 1 else "single_label_classification")
        return "regression" if kind == "regression" else "sequence"


def architecture(**fields: Any) -> spec.Spec:
    """The spec with these fields; ``InputError`` if there cannot be one."""
    try:
        return spec.make_spec(fields)
    except UsageError as error:
        raise InputError(f"no such architecture: {error}") from error


AnyConfig = TypeVar("AnyConfig", bound=Config)


def config_of(stored: Stored, kind: type[AnyConfig], types: tuple[str, ...]) -> AnyConfig:
    """The fields of a file's ``config.json``; ``InputError`` if it is missing, wrong, or of other ``model_type``s."""
    fields: dict[str, Any] | None = stored.config
    if fields is None:
        raise InputError(MISSING)
    model_type = fields.get("model_type")
    if model_type is not None and model_type not in types:
        of = ", ".join(types)
        raise InputError(f"config.json: model_type {short(model_type)} is not supported; with such tensors {of} is")
    for alias, name in kind.aliases.items():
        if alias in fields:
            if fields.get(name, fields[alias]) != fields[alias]:
                both = f"{alias} is {short(fields[alias])}, and {name} {short(fields[name])}"
                raise InputError(f"config.json: {both}: they are one number, so keep one")
            fields = {**fields, name: fields[alias]}
    if fields.get("auto_map"):
        raise InputError("config.json: auto_map names code of its own, so what the model computes is not known")
    try:
        return validated(kind, fields)
    except UsageError as error:
        raise InputError(f"config.json: {error}") from error
