"""The state of Adam in a checkpoint: what its preconditioner is made of."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hesscore.checkpoints.places import Place
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.tensors import FLOATS, check_memory, first_names, listed, plain
from hesscore.errors import InputError
from hesscore.files import short

OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad")
"""What every group of torch's Adam and AdamW has; NAdam, RAdam and those of other libraries lack one of them."""

REAL = (*FLOATS, torch.int32, torch.int64)
"""What a number in a tensor may be."""

MOST = 1e30
"""Of numbers that may be of any size."""


@dataclass(frozen=True)
class Settings:
    """Of a group of parameters, and how many steps have been taken."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int

    @property
    def limit(self) -> float:
        """The preconditioned sharpness beyond which Adam is unstable: ``(2 + 2 beta1)/((1 - beta1) lr)``."""
        return (2 + 2 * self.beta1) / ((1 - self.beta1) * self.lr)


@dataclass(frozen=True)
class Adam:
    """The state of an Adam or AdamW of torch, by the leaves of the model.

    ``second_moments`` are in the leaves' layout and the file's dtype, views wherever that can be; with amsgrad they are
    the largest that there were.
    """

    second_moments: dict[str, Tensor]
    settings: dict[str, Settings]

    @property
    def reference(self) -> Settings:
        """Those whose learning rate stands for that of the model: the largest."""
        return max(self.settings.values(), key=lambda settings: settings.lr)

    def preconditioner(self, leaf: str) -> Tensor:
        """``D = (1 - beta1^t) (sqrt(v/(1 - beta2^t)) + eps)`` in float64, positive, of the shape of the leaf.

        A step is ``-lr D^-1 m`` of the first moment ``m``.  (Cohen et al., arXiv 2207.14484.)  A leaf with a smaller
        learning rate than the ``reference`` has a larger ``D`` instead.
        """
        s = self.settings[leaf]
        root = self.second_moments[leaf].double().sqrt() / (1 - s.beta2**s.step) ** 0.5
        return self.reference.lr / s.lr * (1 - s.beta1**s.step) * (root + s.eps)


class _Slot(NamedTuple):
    """A parameter as torch's optimizers store it: its group, and its state, which is empty if it was never moved."""

    group: dict[Any, Any]
    state: dict[Any, Any]


def read_adam(
    stored: Stored, untrained: Collection[str], lying: Mapping[str, tuple[str, Place]]
) -> tuple[Adam | None, list[str]]:
    """The optimizer beside a state dict, if it is an Adam whose moments can be told apart; else a note that says why.

    ``untrained`` are the keys of buffers and copies; ``lying`` has the key of each leaf, and how it lies there.
    Anything may be wrong with the state: nothing is raised.
    """
    found = list(_optimizers(stored.beside))
    if not found:
        return None, []
    try:
        if len(found) > 1:
            raise InputError(f"there are {len(found)} optimizers")
        return _adam(found[0], stored, untrained, lying), []
    except InputError as error:
        return None, [f"the state of its optimizer is not used: {error}"]


def _optimizers(beside: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    """By what they hold, as their names differ; Lightning has a list of them."""
    for value in beside.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and "param_groups" in item:
                yield plain(item)


def _adam(
    optimizer: dict[Any, Any], stored: Stored, untrained: Collection[str], lying: Mapping[str, tuple[str, Place]]
) -> Adam:
    slots = _slots(optimizer)
    first = first_names(stored.tensors)
    order = _order(slots, stored.tensors, first, untrained)
    moved = {key: slot for key, slot in zip(order, slots, strict=True) if slot.state}
    keys = dict.fromkeys(key for key, _ in lying.values())
    if lacking := [key for key in keys if first[key] not in moved]:
        raise InputError(f"it has no moments of {listed(lacking)}")
    used = {key: moved[first[key]] for key in keys}
    moments = {key: _moment(slot).detach() for key, slot in used.items()}
    check_memory({f"the moment of {key}": moment for key, moment in moments.items()}, stored.size)
    for key, moment in moments.items():
        _check_moment(key, moment)
    settings = {key: _settings(slot) for key, slot in used.items()}
    return Adam(
        second_moments={leaf: place.take(moments[key]) for leaf, (key, place) in lying.items()},
        settings={leaf: settings[key] for leaf, (key, _) in lying.items()},
    )


def _slots(optimizer: dict[Any, Any]) -> list[_Slot]:
    """The parameters in the order of their numbers, which is that of the groups."""
    groups, state = optimizer["param_groups"], optimizer.get("state")
    if not (isinstance(groups, list) and isinstance(state, dict)):
        raise InputError("it is not laid out as torch's")
    state, slots = plain(state), list[_Slot]()
    for group in groups:
        group = plain(group) if isinstance(group, dict) else {}
        if not isinstance(group.get("params"), list):
            raise InputError("it is not laid out as torch's")
        if any(option not in group for option in OPTIONS):
            raise InputError("its optimizer is no Adam")
        for number in group["params"]:
            own = state.pop(number, {}) if type(number) is int and number == len(slots) else None
            if not isinstance(own, dict):
                raise InputError("it is not laid out as torch's")
            slots.append(_Slot(group, plain(own)))
    if state:
        raise InputError(f"{len(state)} of its moments are of no group")
    if not any(slot.state for slot in slots):
        raise InputError("it has taken no step")
    return slots


def _order(
    slots: Sequence[_Slot], tensors: Mapping[str, Tensor], first: Mapping[str, str], untrained: Collection[str]
) -> Sequence[str]:
    """The key of each parameter, by its first name, if shapes and groups leave no doubt."""
    if names := _names(slots):
        if not first.keys() >= {*names}:
            raise InputError("it names other parameters than the file has")
        order = [first[name] for name in names]
        if len({*order}) < len(order):
            raise InputError("it has two of its parameters for one tensor")
        if wrong := _misfits(order, slots, tensors):
            raise _other_shapes(wrong, slots)
        return order
    if [*tensors] in (sorted(tensors), sorted(tensors, key=_natural)):
        raise InputError("the weights are sorted by name, so their order in the model is lost")
    own = {first[key] for key, tensor in tensors.items() if key not in untrained and tensor.dtype in FLOATS}
    trained = [key for key in tensors if key in own]
    if len(trained) != len(slots):
        raise InputError(f"it is of {len(slots)} parameters, and the file has {len(trained)}")
    split = sorted(trained, key=lambda key: tensors[key].ndim < 2)  # nanoGPT's, and that of most who train
    orders = [trained, split] if split != trained else [trained]
    wrongs = [_misfits(order, slots, tensors) for order in orders]
    if min(wrongs) > 0:
        raise _other_shapes(min(wrongs), slots)
    if wrongs.count(0) > 1:
        raise InputError("so many of its moments are missing that the others fit in two ways")
    order = orders[wrongs.index(0)]
    runs = groupby(zip(order, slots, strict=True), key=lambda pair: id(pair[1].group))
    groups = [tuple(tensors[key].shape for key, _ in run) for _, run in runs]
    if len({*groups}) < len(groups):
        raise InputError("two of its groups are of the same shapes, so which is which is not sure")
    return order


def _names(slots: Sequence[_Slot]) -> list[str]:
    """What torch calls the parameters, if it was given ``named_parameters()``."""
    names: list[str] = []
    for _, run in groupby(slots, key=lambda slot: id(slot.group)):
        members = list(run)
        own = members[0].group.get("param_names", [])
        if not isinstance(own, list) or len(own) not in (0, len(members)) or {*map(type, own)} - {str}:
            raise InputError("it is not laid out as torch's")
        names += own
    if len({*names}) not in (0, len(slots)):
        raise InputError("it has not a name for each parameter")
    return names


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts numbers in a name by their size."""
    return [(len(part), part) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", key)]


def _misfits(order: Sequence[str], slots: Sequence[_Slot], tensors: Mapping[str, Tensor]) -> int:
    """How many moments have other shapes than the weights in that order."""
    return sum(
        bool(slot.state) and _moment(slot).shape != tensors[key].shape for key, slot in zip(order, slots, strict=True)
    )


def _other_shapes(wrong: int, slots: Sequence[_Slot]) -> InputError:
    return InputError(f"{wrong} of {len(slots)} moments have other shapes than the weights")


def _moment(slot: _Slot) -> Tensor:
    """The second moment of a parameter that was moved, of which nothing is checked."""
    if type(slot.group["amsgrad"]) is not bool:
        raise InputError("its amsgrad is neither true nor false")
    moment = slot.state.get("max_exp_avg_sq" if slot.group["amsgrad"] else "exp_avg_sq")
    if isinstance(moment, Tensor):
        return moment
    raise InputError("a second moment in it is no tensor")


def _check_moment(key: str, moment: Tensor) -> None:
    if moment.dtype not in FLOATS:
        raise InputError(f"the moments of {short(key)} are not real numbers")
    low, high = moment.aminmax()
    if not 0 <= low <= high < inf:  # NaN is neither
        raise InputError(f"the second moments of {short(key)} are negative, NaN or infinite")


def _settings(slot: _Slot) -> Settings:
    group = slot.group
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise InputError("its betas are not two numbers")
    step = _number("step", slot.state.get("step"), 1, 2**53)
    if step % 1:
        raise InputError(f"its step is {step:g}")
    return Settings(
        lr=_number("lr", group["lr"], 1 / MOST, MOST),
        beta1=_number("beta1", betas[0], 0, 1),
        beta2=_number("beta2", betas[1], 0, 1),
        eps=_number("eps", group["eps"], 1 / MOST, MOST),
        step=int(step),
    )


def _number(name: str, value: object, low: float, end: float) -> float:
    """A number, or a tensor with one, from ``low`` on and below ``end``."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1 and value.dtype in REAL):
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value < end:
        raise InputError(f"its {name} is not a number from {low:g} to {end:g}")
    return float(value)
