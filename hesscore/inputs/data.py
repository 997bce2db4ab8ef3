"""What a model is scored on, and how it is drawn where there is none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hesscore.spec import Spec

UNSCORED = -100
"""The target of a position that is not scored."""

MASKED = 0.15
"""Share of the tokens that a masked model is scored on."""


@dataclass(frozen=True)
class Data:
    """What a model is scored on, as ``hesscore.wiring.inputs.inputs`` takes it."""

    data: Tensor
    target: Tensor
    keep: Tensor | None = None
    """False on padding, ``(B, L)``."""
    segments: Tensor | None = None
    sha256: str | None = None
    """Of the whole file, if there is one."""
    notes: tuple[str, ...] = ()

    @property
    def scored(self) -> int:
        """How many tokens or sequences are in the mean that is the loss."""
        if not self.target.is_floating_point():
            return int((self.target != UNSCORED).sum())
        whole = len(self.target) * self.target.shape[1]
        return whole if self.keep is None or self.target.shape[1] == 1 else int(self.keep.sum())


def drawn(spec: Spec, rng: Generator, length: int | None = None) -> Data:
    """Uniform token ids and classes, standard normal pixels, activations and targets; 15 % of them are masked."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def ids(below: int | None, *shape: int) -> Tensor:
        return torch.randint(below or 1, shape, generator=rng)

    batch, length = spec.batch, length or spec.length
    if not spec.embeds and spec.objective == "hidden":
        return Data(*normal(2, batch, length, spec.d_model))
    if spec.objective == "causal_lm":
        following = ids(spec.vocab, batch, length + 1)
        return Data(following[:, :-1], following[:, 1:])
    if spec.image_size:
        data = normal(batch, length - spec.class_token, spec.channels * (spec.patch_size or 1) ** 2)
    else:
        data = ids(spec.vocab, batch, length) if spec.vocab else normal(batch, length, spec.d_model)
    if spec.objective == "masked_lm":
        target = ids(spec.vocab, batch, length)
        target[torch.rand(batch, length, generator=rng) > MASKED] = UNSCORED
        target[0, 0] = target[0, 0].clamp(min=0)  # one at least
    elif spec.objective == "hidden":
        target = normal(batch, length, spec.d_model)
    elif spec.objective == "regression":
        target = normal(batch, 1, spec.labels or 1)
    else:
        target = ids(spec.labels, batch, 1 if spec.pools else length)
    return Data(data, target)
