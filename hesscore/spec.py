"""The description of a Transformer: what ``configs/*.yaml`` holds and what every checkpoint resolves to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator
from pydantic_core import ErrorDetails

from hesscore.errors import InputError, UsageError
from hesscore.files import File, examine, naming, short

SPEC_SUFFIXES = (".yaml", ".yml")

LONGEST_FILE = 2**16
"""Bytes; a spec takes a few hundred."""

LONGEST_VALUE = 80
"""Characters."""

FAULTS_SHOWN = 4

NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.[0-9]))(\.[0-9]*)?([eE][-+]?[0-9]+)?")
"""Decimal: YAML 1.1 would read 010 as 8, 1:30 as 90 and 1e-5 as text."""

LARGEST = 10**12
"""Of a size: beyond any machine, and small enough for products of sizes to be floats."""

Size = Annotated[int, Field(gt=0, le=LARGEST)]


class Spec(BaseModel):
    """A stack of Transformer blocks, with embedding and head if it has a ``vocab``.

    With it, the loss is the mean cross entropy of the scored tokens.  Without it, it is a stack on its own: the input
    is a tensor of activations, and the loss the mean squared error of the output to a target.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    d_model: Size
    d_ff: Annotated[int, Field(ge=0, le=LARGEST)]
    """Hidden width of the feed-forward part; 0 leaves that out."""
    layers: Size = 1
    heads: Size = 1
    kv_heads: Size | None = None
    """Heads that share keys and values in groups; ``heads`` by default."""
    vocab: Size | None = None

    placement: Literal["pre", "post", "parallel"] = "pre"
    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"
    norm_eps: float = Field(default=1e-5, ge=0)
    causal: bool = True
    activation: Literal["relu", "relu_squared", "gelu", "gelu_tanh", "silu", "tanh"] = "gelu"
    gated: bool = False
    bias: bool = True
    """Biases of the linear maps and the shift of LayerNorm (RMSNorm has none)."""
    positions: Literal["none", "learned", "rotary"] = "none"
    rotary_base: PositiveFloat = 10_000.0
    tied: bool = False
    """The head is the token embedding."""

    seq_len: Size = 64
    """Length of the seeded input, and of the table of learned positions."""
    batch: Size = 1
    init_std: PositiveFloat | None = None
    """Standard deviation of seeded weights; ``1/sqrt(fan in)`` by default."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def alone(self) -> Spec:
        """One block of the stack, on its own."""
        positions = self.positions if self.positions == "rotary" else "none"
        return self.model_copy(update={"layers": 1, "vocab": None, "tied": False, "positions": positions})

    def hidden_at(self, width: float) -> int:
        """``d_ff`` in proportion, at another ``d_model``; none where there is none."""
        return max(1, round(width * self.d_ff / self.d_model)) if self.d_ff else 0

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        if self.d_model % self.heads:
            raise ValueError(f"d_model: {self.d_model} is not divisible by heads: {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads: {self.heads} is not divisible by kv_heads: {self.groups}")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"positions: rotary needs an even head width, not {self.head_dim}")
        if self.vocab is None:
            for field, wrong in ("tied", self.tied), ("positions", self.positions == "learned"):
                if wrong:
                    raise ValueError(f"{field}: {getattr(self, field)} needs a vocab")
        return self


def read_spec(path: str | Path) -> Spec:
    """Read a YAML file: ``InputError`` where there is no text to read, ``UsageError`` that names the field at fault."""
    with naming(path):
        text = _text(examine(path))
    try:
        return make_spec(_fields(text))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def make_spec(fields: Mapping[str, object]) -> Spec:
    """``UsageError`` that names the fields at fault."""
    try:
        return Spec.model_validate(fields)
    except ValidationError as error:
        faults = [_explain(fault) for fault in error.errors()[:FAULTS_SHOWN]]
        if error.error_count() > FAULTS_SHOWN:
            faults.append(f"and {error.error_count() - FAULTS_SHOWN} more")
        raise UsageError("; ".join(faults)) from error


def _text(file: File) -> str:
    if file.size > LONGEST_FILE:
        raise UsageError(f"{file.path}: {file.size} bytes are no spec, which takes {LONGEST_FILE} at most")
    try:
        return file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def _fields(text: str) -> dict[str, object]:
    """The fields of a mapping.  Their values are not nested, so that no file can be deeper or larger than it looks."""
    fields: dict[str, object] = {}
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    try:
        for start in yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.MappingStartEvent:
            if not isinstance(next(events), start):
                raise UsageError("a spec is a mapping of fields, such as d_model: 768")
        while isinstance(key := next(events), yaml.ScalarEvent):
            name, value = _shown(key.value), next(events)
            if key.value in fields:
                raise UsageError(f"{name}: given again in line {_line(key)}")
            if not isinstance(value, yaml.ScalarEvent) or value.tag or len(value.value) > LONGEST_VALUE:
                raise UsageError(f"{name}: line {_line(value)} is not one short value without a tag")
            fields[key.value] = _value(value)
        if not isinstance(key, yaml.MappingEndEvent):
            raise UsageError(f"line {_line(key)}: a field has a name such as d_model")
        if not isinstance(next(events), yaml.DocumentEndEvent) or not isinstance(next(events), yaml.StreamEndEvent):
            raise UsageError("a file holds one spec, without ---")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two are of absurd escapes
        raise UsageError(f"not valid YAML: {' '.join(str(error).split())}") from error
    return fields


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _value(scalar: yaml.ScalarEvent) -> object:
    text: str = scalar.value
    if scalar.style is not None:  # in quotes
        return text
    if text in ("", "~", "null"):
        return None
    number = NUMBER.fullmatch(text)
    if number is not None:
        return float(text) if number[2] or number[3] else int(text)
    return yaml.SafeLoader.bool_values.get(text.lower(), text)


def _explain(error: ErrorDetails) -> str:
    field = _shown(".".join(map(str, error["loc"])))
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, Spec.model_fields, 1)
        return f"unknown field {field}" + (f", did you mean {near[0]}?" if near else "")
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message[0].lower()}{message[1:]}" if field else message


def _shown(name: str) -> str:
    return short(name if name.isprintable() else ascii(name))
