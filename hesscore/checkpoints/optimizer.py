"""Adam's second moments and settings, where a training script saved its optimizer beside the weights.

torch numbers parameters in the order in which the optimizer was given them, and keeps no names.  So the numbers are
matched with the tensors of the state dict in its order, all shapes must agree, and there must be one way to do it.
What cannot be matched is left out, with a note: the curvature needs no optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from hesscore.checkpoints.places import Place
from hesscore.checkpoints.tensors import FLOATS, check_memory, plain


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
    """The state of an Adam or AdamW, by the leaves of the model, in their layout."""

    second_moments: dict[str, Tensor]
    settings: dict[str, Settings]

    @property
    def reference(self) -> Settings:
        """Those whose learning rate stands for that of the model: the largest."""
        return max(self.settings.values(), key=lambda settings: settings.lr)

    def preconditioner(self, leaf: str) -> Tensor:
        """``D = (1 - beta1^t) (sqrt(v/(1 - beta2^t)) + eps)`` in float64, of the shape of the leaf.

        A step is ``-lr D^-1 m`` of the first moment ``m``.  (Cohen et al., arXiv 2207.14484.)  A leaf with a smaller
        learning rate than the ``reference`` has a larger ``D`` instead.
        """
        s, v = self.settings[leaf], self.second_moments[leaf].double()
        return self.reference.lr / s.lr * (1 - s.beta1**s.step) * ((v / (1 - s.beta2**s.step)).sqrt() + s.eps)


class _UnreadError(ValueError):
    """Why an optimizer's state is not read."""


def adam(
    beside: Mapping[Any, Any], tensors: Mapping[str, Tensor], places: Mapping[str, Place], stored_as: Mapping[str, str]
) -> tuple[Adam | None, list[str]]:
    """The optimizer that stood ``beside`` the state dict ``tensors``, if there is one, and notes on why it is not read.

    ``places`` say where each leaf lies, by the family's names, and ``stored_as`` the keys of these in the file.
    """
    found = list(_optimizers(beside))
    if not found:
        return None, []
    try:
        if len(found) > 1:
            raise _UnreadError(f"there are {len(found)} of them")
        groups, state = _sound(found[0])
        numbers = [number for group in groups for number in group["params"]]
        order = _order(groups, numbers, state, tensors)
        moments: dict[str, Tensor] = {}
        settings: dict[str, Settings] = {}
        for group in groups:
            for number in group["params"]:
                moments[order[number]] = _moment(state, number)
                settings[order[number]] = _settings(group, state[number])
        check_memory(moments, sum(map(_bytes, moments.values())))
        if not all(moment.isfinite().all() and (moment >= 0).all() for moment in moments.values()):
            raise _UnreadError("a second moment is negative, or no number")
        keys = {leaf: stored_as[place.name] for leaf, place in places.items()}
        if missing := [leaf for leaf, key in keys.items() if key not in moments]:
            raise _UnreadError(f"it has nothing for {missing[0]}")
        second = {leaf: place.take(moments[keys[leaf]]) for leaf, place in places.items()}
        return Adam(second, {leaf: settings[key] for leaf, key in keys.items()}), []
    except Exception as error:  # of every kind there is, as nobody vouches for these bytes
        why = str(error) if isinstance(error, _UnreadError) else "it is not as torch saves one"
        return None, [f"the state of its optimizer is not used: {why}"]


def _optimizers(beside: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    """State dicts of optimizers: alone, or in a list, as Lightning has them."""
    for value in beside.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and {"state", "param_groups"} <= plain(one).keys():
                yield plain(one)


def _sound(optimizer: dict[Any, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    groups = [plain(group) for group in optimizer["param_groups"]]
    state = {number: plain(entry) for number, entry in plain(optimizer["state"]).items()}
    if not state:
        raise _UnreadError("it has taken no step")
    if not all("exp_avg_sq" in entry for entry in state.values()):
        raise _UnreadError("it is no Adam")
    return groups, state


def _order(
    groups: list[dict[str, Any]], numbers: list[int], state: Mapping[int, Any], tensors: Mapping[str, Tensor]
) -> dict[int, str]:
    """The key of each number: in the order of the state dict, or first all matrices, and then all vectors."""
    if sorted(numbers) != list(range(len(numbers))) or set(state) != set(numbers):
        raise _UnreadError(f"it has {len(state)} moments for {len(numbers)} parameters")
    if list(tensors) == sorted(tensors):
        raise _UnreadError("the weights are sorted by name, so that their order is lost")
    keys = list(tensors)
    candidates = [keys]
    matrices = [key for key in keys if tensors[key].ndim >= 2]
    if [len(group["params"]) for group in groups] == [len(matrices), len(keys) - len(matrices)]:
        candidates.append([*matrices, *(key for key in keys if tensors[key].ndim < 2)])
    shapes = [_moment(state, number).shape for number in numbers]
    fits = [order for order in candidates if [tensors[key].shape for key in order] == shapes]
    if not fits:
        raise _UnreadError(f"its {len(numbers)} moments fit the {len(keys)} weights in no known order")
    if len(fits) > 1 and fits[0] != fits[1]:
        raise _UnreadError("its moments fit the weights in two orders")
    return dict(zip(numbers, fits[0], strict=True))


def _moment(state: Mapping[int, Any], number: int) -> Tensor:
    """The second moment; with amsgrad, the largest one so far."""
    entry = state[number]
    moment = entry.get("max_exp_avg_sq", entry["exp_avg_sq"])
    if type(moment) is not Tensor or moment.dtype not in FLOATS:
        raise _UnreadError("a second moment is no tensor of real numbers")
    return moment.detach()


def _bytes(moment: Tensor) -> int:
    return moment.untyped_storage().nbytes()


def _settings(group: dict[str, Any], entry: dict[str, Any]) -> Settings:
    beta1, beta2 = map(float, group["betas"])
    found = Settings(float(group["lr"]), beta1, beta2, float(group["eps"]), int(entry["step"]))
    sound = found.lr > 0 and isfinite(found.lr) and 0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 <= found.eps < 1
    if not sound or found.step < 1:
        raise _UnreadError(f"its settings are {found}")
    return found
