"""The description of a Transformer: what ``configs/*.yaml`` holds and what every checkpoint resolves to."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from hesscore.errors import UsageError


class Spec(BaseModel):
    """A stack of Transformer blocks, with embedding and head if it has a ``vocab``.

    With it, the loss is the mean cross entropy of the scored tokens.  Without it, it is a stack on its own: the input
    is a tensor of activations, and the loss the mean squared error of the output to a target.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    d_model: PositiveInt
    d_ff: PositiveInt
    layers: PositiveInt = 1
    heads: PositiveInt = 1
    kv_heads: PositiveInt | None = None
    """Heads that share keys and values in groups; ``heads`` by default."""
    vocab: PositiveInt | None = None

    placement: Literal["pre", "post", "parallel"] = "pre"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
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

    seq_len: PositiveInt = 64
    """Length of the seeded input, and of the table of learned positions."""
    batch: PositiveInt = 1
    init_std: PositiveFloat | None = None
    """Standard deviation of seeded weights; ``1/sqrt(fan in)`` by default."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

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
    """Read a YAML file; every fault is a ``UsageError`` that names the field."""
    try:
        data = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a spec is a mapping of fields such as d_model, not {type(data).__name__}")
    try:
        return Spec(**data)
    except ValidationError as error:
        raise UsageError(f"{path}: {'; '.join(_explain(e) for e in error.errors())}") from error
    except TypeError as error:
        raise UsageError(f"{path}: field names must be text") from error


def _explain(error: ErrorDetails) -> str:
    field = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, Spec.model_fields, 1)
        return f"unknown field {field}" + (f", did you mean {near[0]}?" if near else "")
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message[0].lower()}{message[1:]}" if field else message
