"""What is asked of tensors from a file that nobody vouches for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hesscore.errors import InputError
from hesscore.files import short

REAL = "save it in float32, as weights are real numbers"

QUANTISED = re.compile(r"\.(qweight|qzeros|SCB|absmax|nested_absmax|quant_map)$")
"""What GPTQ, AWQ and bitsandbytes call what belongs to quantised weights."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plain(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """The items of a dictionary from a file, as a plain dictionary.

    A pickle may give an ``OrderedDict`` attributes, so ``mapping.items`` need not be the method of that name.
    """
    return dict(dict.items(mapping))


def tensors_in(state: dict[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict by name, without their autograd."""
    tensors = {}
    for name, value in plain(state).items():
        if not isinstance(name, str):
            raise InputError(f"a state dict has text for keys, not type {type(name).__name__}")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise InputError(f"{short(name)} is of type {type(value).__name__}, not a tensor")
        tensors[name] = value.detach()
    return tensors


def check_memory(tensors: Mapping[str, Tensor], size: int) -> None:
    """Refuse tensors that overlap, or that take more memory than a file of ``size`` bytes can fill.

    The shapes and strides in a file may state anything.  After this, no step takes more time or memory than
    the file's size warrants.
    """
    taken: Counter[int] = Counter()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        taken[memory.data_ptr()] += tensor.nbytes
        if taken[memory.data_ptr()] > memory.nbytes():
            raise InputError(f"{short(name)} shares its memory with other weights or itself: save a clone of it")
    if taken.total() > size:
        raise InputError(f"its tensors are {taken.total()} bytes, the file only {size}: save it again, whole")


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name the first of its tensor: two may have one, as a head that is tied."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride()
        found[name] = first.setdefault((*memory, tensor.shape, tensor.dtype), name)
    return found


def distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, by its first name."""
    return {name: tensors[name] for name, first in first_names(tensors).items() if name == first}


def check_names(found: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse missing and unexpected tensors, naming some."""
    there, wanted = dict.fromkeys(found), dict.fromkeys(expected)
    missing = [name for name in wanted if name not in there]
    surplus = [name for name in there if name not in wanted]
    faults = [f"{len(missing)} missing: {listed(missing)}"] if missing else []
    faults += [f"{len(surplus)} unexpected: {listed(surplus)}"] if surplus else []
    if faults:
        raise InputError(f"not the tensors of its architecture; {'; '.join(faults)}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        found = short(tuple(tensor.shape))
        raise InputError(f"{short(name)} has shape {found}; its architecture asks for {shape}")


def check_unquantised(name: str, tensor: Tensor) -> None:
    """Refuse what is sure to be of quantised weights; masks and ids may be integers, and are let through."""
    if QUANTISED.search(name):
        raise InputError(f"{short(name)} is of quantised weights: {REAL}")
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool and (tensor.is_floating_point() or tensor.ndim == 2):
        raise _not_real(name, tensor)


def check_float(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise _not_real(name, tensor)


def _not_real(name: str, tensor: Tensor) -> InputError:
    return InputError(f"{short(name)} holds {str(tensor.dtype).removeprefix('torch.')} values: {REAL}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity, saying how many there are."""
    wrong = tensor.numel() - int(tensor.isfinite().sum())
    if wrong:
        places = f"{wrong} of {tensor.numel()} places"
        raise InputError(f"{short(name)} is NaN or infinite in {places}: no curvature there")


def listed(keys: Iterable[object], most: int = 4) -> str:
    """The first few keys, and how many more there are; ``none`` if there are none."""
    names = list(keys)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    shown = [short(name) if isinstance(name, str) else f"<{type(name).__name__}>" for name in names[:most]]
    return (", ".join(shown) or "none") + rest
