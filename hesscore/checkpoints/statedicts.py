"""Where the state dict is in a file: training scripts put it into dictionaries of all kinds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hesscore.checkpoints.tensors import listed, plain, tensors_in
from hesscore.errors import InputError
from hesscore.files import short

NAMES = ("model", "state_dict", "model_state_dict", "module")
"""What leads to the weights of the model itself, and not to an average of them or to another model's."""

DEEPEST = 10
"""How many dictionaries are looked into, one in the other."""


class Found(NamedTuple):
    """A state dict, and what stood beside it: of all dictionaries on the way to it, the inner ones first."""

    tensors: dict[str, Tensor]
    beside: dict[Any, Any]
    notes: list[str]


@dataclass(frozen=True)
class _Level:
    """A dictionary within others, which are ``outer``, by ``keys``."""

    content: dict[Any, Any]
    keys: tuple[str, ...] = ()
    outer: tuple[dict[Any, Any], ...] = ()

    def __str__(self) -> str:
        return short(".".join(self.keys)) or "the outermost dictionary"


def find(content: dict[Any, Any]) -> Found:
    """The state dict in a file: the dictionary of tensors that ``NAMES`` lead to, or else the only one there is.

    ``InputError`` if there is none, or several, of which none is more likely than the others.
    """
    holding = [level for level in _levels(content) if any(map(_may_be_weight, level.content.values()))]
    if not holding:
        raise InputError(f"holds no dictionary of tensors; its keys are {listed(content)}: save model.state_dict()")
    named = [level for level in holding if level.keys and set(level.keys) <= {*NAMES}]
    if not named and len(holding) > 1:
        raise InputError(f"holds several state dicts: {listed(map(str, holding))}; save the one to be analysed alone")
    chosen = (named or holding)[0]
    state = chosen.content
    beside: dict[Any, Any] = {}
    for outer, key in zip(chosen.outer, chosen.keys, strict=True):
        beside.update((other, value) for other, value in outer.items() if other != key)
    if not chosen.outer:  # where a state dict is the whole file, a script may have added to it
        beside = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        state = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    others = listed(str(level) for level in holding if level is not chosen)
    notes = [f"its weights are those of {chosen}; left out: {others}"] if len(holding) > 1 else []
    return Found(tensors_in(state), beside, notes)


def _levels(content: dict[Any, Any]) -> Iterator[_Level]:
    """The dictionaries that names lead to, each once, but none of an optimizer's."""
    waiting, seen = deque([_Level(plain(content))]), {id(content)}
    while waiting:
        level = waiting.popleft()
        if "param_groups" in level.content:
            continue
        yield level
        for key, value in level.content.items() if len(level.keys) < DEEPEST else ():
            if isinstance(key, str) and isinstance(value, dict) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(_Level(plain(value), (*level.keys, key), (*level.outer, level.content)))


def _may_be_weight(value: object) -> bool:
    """A loss is a single number, and the state of a generator a row of bytes."""
    return isinstance(value, Tensor) and value.ndim > 0 and not (value.ndim == 1 and value.dtype == torch.uint8)
