"""Rotary positions as ``config.json`` says them, scaled or not."""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from hesscore.checkpoints.config import Config
from hesscore.errors import InputError, UsageError
from hesscore.fields import validated
from hesscore.files import short
from hesscore.spec import Size

WIDEST = 2**16
"""Features of a head: beyond any, and few enough to compute an angle for each."""

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


class _Rope(BaseModel):
    """All that transformers computes frequencies from."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    rope_type: RopeType = "default"
    rope_theta: float = Field(default=10_000.0, gt=1)
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    original_max_position_embeddings: Size | None = None
    factor: float | None = Field(default=None, ge=1)
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: float | None = Field(default=None, ge=0)
    mscale_all_dim: float | None = Field(default=None, ge=0)
    truncate: bool = True


class RotaryConfig(Config):
    """With rotary positions: ``rope_parameters``, or what older files have in its place."""

    partial: ClassVar[bool] = False
    """Whether only some features of a head may be rotated."""

    max_position_embeddings: Size
    original_max_position_embeddings: Size | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: float | None = None

    def rotary(self, head_width: int) -> Rotary:
        """What the positions are of heads of this width; ``InputError`` for a scaling that is not known."""
        given = {
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
            "original_max_position_embeddings": self.original_max_position_embeddings,
        }
        fields: dict[str, Any] = {}
        written = {name: value for name, value in given.items() if name in self.model_fields_set}
        for said in filter(None, (written, self.rope_scaling, self.rope_parameters)):
            own = {("rope_type" if name == "type" else name): value for name, value in said.items()}
            for name, value in own.items():
                if fields.setdefault(name, value) != value:
                    both = f"{short(fields[name])} in one place and {short(value)} in another"
                    raise InputError(f"config.json: rope_parameters: {name} is {both}: keep one")
        fields = {name: value for name, value in (given | fields).items() if value is not None}
        try:
            rope = validated(_Rope, fields)
        except UsageError as error:
            raise InputError(f"config.json: rope_parameters: {error}") from error
        width = int(head_width * rope.partial_rotary_factor)
        if not 2 <= width <= WIDEST:
            raise InputError(f"config.json: {width} of {head_width} features of a head are rotated, not 2 to {WIDEST}")
        if width != head_width and not self.partial:
            raise InputError("config.json: partial_rotary_factor is not 1, which models of this kind do not have")
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise InputError("config.json: rope_parameters: low_freq_factor is not below high_freq_factor")
        if rope.rope_type != "default" and rope.factor is None:
            raise InputError(f"config.json: rope_parameters: {short(rope.rope_type)} needs a factor")
        powers = [rope.rope_theta ** (-2 * i / width) for i in range(width // 2)]
        partial = None if width == head_width else width
        if rope.rope_type in ("default", "dynamic"):  # the same up to the length of the training: no data are longer
            return Rotary(rope.rope_theta, partial, None, 1.0)
        length = rope.original_max_position_embeddings or self.max_position_embeddings
        scaled, scale = SCALINGS[rope.rope_type](rope, powers, length)
        return Rotary(rope.rope_theta, partial, tuple(scaled), scale)


class Rotary(NamedTuple):
    """The fields of a spec."""

    rotary_base: float
    rotary_dim: int | None
    rotary_frequencies: tuple[float, ...] | None
    rotary_scale: float


def _linear(rope: _Rope, powers: list[float], length: int) -> tuple[list[float], float]:
    """All angles are ``factor`` times smaller."""
    return [power / (rope.factor or 1) for power in powers], 1.0


def _llama3(rope: _Rope, powers: list[float], length: int) -> tuple[list[float], float]:
    """Those of wavelengths beyond ``length / low_freq_factor`` are ``factor`` times smaller, with a smooth passage."""
    low, high, factor = rope.low_freq_factor, rope.high_freq_factor, rope.factor or 1

    def scaled(power: float) -> float:
        turns = length * power / (2 * pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * power / factor + kept * power

    return [scaled(power) for power in powers], 1.0


def _yarn(rope: _Rope, powers: list[float], length: int) -> tuple[list[float], float]:
    """Features that turn fewer than ``beta_slow`` times within ``length`` are slowed, those beyond ``beta_fast`` kept.

    Queries and keys are stretched for it.  (Peng, Quesnelle, Fan and Shippole, YaRN, 2023.)
    """
    factor, width = rope.factor or 1, 2 * len(powers)

    def feature(turns: float) -> float:
        return width * log(length / (turns * 2 * pi)) / (2 * log(rope.rope_theta))

    def stretch(by: float) -> float:
        return 0.1 * by * log(factor) + 1.0 if factor > 1 else 1.0

    first, last = feature(rope.beta_fast or 32), feature(rope.beta_slow or 1)
    if rope.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last = last + 0.001 if first == last else last
    slowed = [min(max((i - first) / (last - first), 0.0), 1.0) for i in range(len(powers))]
    scale = rope.attention_factor
    if scale is None:
        both = rope.mscale and rope.mscale_all_dim
        scale = stretch(rope.mscale or 0) / stretch(rope.mscale_all_dim or 0) if both else stretch(1)
    return [s * power / factor + (1 - s) * power for s, power in zip(slowed, powers, strict=True)], scale


SCALINGS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
