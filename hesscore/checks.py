"""What is asked of the tensors that a library user hands over: nothing is broadcast, cast or guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hesscore.errors import InputError, UsageError
from hesscore.graph import Graph


def check_parameters(graph: Graph, leaves: Mapping[str, Tensor]) -> None:
    """Each is there, finite, of its shape, and in the one dtype of all."""
    dtypes = {leaves[name].dtype for name in graph.parameters if name in leaves}
    for name, shape in graph.parameters.items():
        if name not in leaves:
            raise InputError(f"no value for the parameter {name}")
        if leaves[name].shape != shape:
            raise InputError(f"{name} has shape {tuple(leaves[name].shape)}, not {shape}")
        if len(dtypes) > 1 or leaves[name].dtype not in (torch.float64, torch.float32):
            raise InputError(f"{name} is in {leaves[name].dtype}: all parameters are in float64, or all in float32")
        check_finite(name, leaves[name])


def check_constants(graph: Graph, leaves: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Each is there and finite, in ``leaves`` or in every part of the data, and no parameter is among them."""
    if not parts:
        raise UsageError("no parts of the data: give one Batch or more")
    for constants in parts:
        for name in graph.constants:
            if name not in constants and name not in leaves:
                raise InputError(f"no value for the constant {name}")
            check_finite(name, constants[name] if name in constants else leaves[name])
        for name in graph.parameters.keys() & constants.keys():
            raise InputError(f"{name} is a parameter, and the same for every part of the data")


def check_finite(name: str, leaf: Tensor) -> None:
    if not leaf.isfinite().all():
        wrong = leaf.numel() - int(leaf.isfinite().sum())
        raise InputError(f"{name} is NaN or infinite in {wrong} of {leaf.numel()} places")


def check_tensor(v: object, what: str) -> None:
    if not isinstance(v, Tensor) or v.layout != torch.strided or v.is_meta:
        raise UsageError(f"{what} is not a dense tensor in memory")
