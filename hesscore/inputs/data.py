"""What a model is scored on, how much of it, and how it is drawn where there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from hesscore.errors import UsageError
from hesscore.spec import Spec

UNSCORED = -100
"""The target of a position that is not scored."""

MASKED = 0.15
"""Share of the tokens that a masked model is scored on."""

LONGEST_WINDOW = 1024
"""Tokens of a sequence that is not given as such: attention takes memory by the square of them."""


@dataclass(frozen=True)
class Data:
    """What a model is scored on, as ``hesscore.wiring.inputs.inputs`` takes it."""

    data: Tensor
    target: Tensor
    keep: Tensor | None = None
    """False on padding, ``(B, L)``."""
    segments: Tensor | None = None
    weights: Tensor | None = None
    """Of the tokens in a squared error, ``(B, L)``; by default 1, and 0 on padding."""
    sha256: str | None = None
    """Of the whole file, if there is one."""
    notes: tuple[str, ...] = ()

    @property
    def scored_at(self) -> Tensor:
        """Whether the mean that is the loss has a term there: tokens ``(B, L)``, or sequences ``(B, 1)``."""
        if not self.target.is_floating_point():
            return self.target != UNSCORED
        if self.weights is not None:
            return self.weights > 0
        whole = torch.ones(self.target.shape[:2], dtype=torch.bool)
        return whole if self.keep is None or whole.shape[1] == 1 else self.keep

    @property
    def scored(self) -> int:
        """How many tokens or sequences are in the mean that is the loss."""
        return int(self.scored_at.sum())


def window(spec: Spec) -> int:
    """Tokens of a sequence that is cut from a longer one, at most; a whole image."""
    return spec.length if spec.image_size else min(spec.length, LONGEST_WINDOW)


def counted(spec: Spec, data: Data) -> Tensor:
    """The tokens that ``max_tokens`` counts, ``(B, L)``: those that are scored, or all of a sequence that is scored."""
    if not spec.pools:
        return data.scored_at
    batch, length = data.data.shape[0], data.data.shape[1] + spec.class_token
    seen = torch.ones(batch, length, dtype=torch.bool) if data.keep is None else data.keep
    return seen & data.scored_at


def cut(spec: Spec, data: Data, max_tokens: int | None, total: int | None = None) -> Data:
    """Score the first ``max_tokens`` only, all by default, and drop the sequences of which nothing is scored.

    Where sequences are scored, each is whole or not there: the first ones that have so many tokens together at most.
    A note says what is left, of the ``total`` in a file of which no more was read than is scored.
    """
    tokens = counted(spec, data)
    within = tokens if max_tokens is None else tokens & (tokens.flatten().cumsum(0).view_as(tokens) <= max_tokens)
    rows = within.any(1)
    if spec.pools:
        rows &= within.sum(1) == tokens.sum(1)
        if not rows.any():
            first = int(tokens.sum(1)[tokens.any(1)][0])
            why = f"a sequence is scored whole, and the first has {first} tokens"
            raise UsageError(f"max_tokens is {max_tokens}: {why}, so give that many at least")
    target, weights = data.target, data.weights
    if not spec.pools and not torch.equal(within, tokens):
        if spec.classifies:
            target = torch.where(within, target, UNSCORED)
        else:
            weights = within.double()

    def taken(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[rows]

    left = replace(
        data,
        data=data.data[rows],
        target=target[rows],
        keep=taken(data.keep),
        segments=taken(data.segments),
        weights=taken(weights),
    )
    total = data.scored if total is None else total
    what = "sequences" if spec.pools else "tokens"
    said = (f"only the first {left.scored} of {total} {what} are scored",) if left.scored < total else ()
    return replace(left, notes=data.notes + said)


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
