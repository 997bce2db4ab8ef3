"""Data as transformers takes them: ``input_ids``, ``attention_mask``, ``labels`` and so on, all ``(B, ...)``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hesscore.errors import InputError
from hesscore.inputs.data import UNSCORED, Data
from hesscore.spec import Spec


def of_arrays(spec: Spec, arrays: Mapping[str, Tensor]) -> Data:
    """The data whose loss is what transformers computes for these arrays.

    Of a causal model the labels are shifted, and default to ``input_ids``; padding is not scored.
    """
    data = (
        patches(spec, arrays["pixel_values"])
        if spec.image_size
        else arrays["input_ids" if spec.vocab else "inputs_embeds"]
    )
    keep = arrays["attention_mask"].bool() if "attention_mask" in arrays else None
    labels = arrays.get("labels")
    if spec.objective == "causal_lm":
        given = data if labels is None else labels
        target = torch.full_like(data, UNSCORED)
        target[:, :-1] = given[:, 1:]
        if labels is None and keep is not None:
            target[:, :-1][~keep[:, 1:]] = UNSCORED
    elif labels is None:
        raise InputError(f"no labels, which a loss of {spec.objective} needs")
    elif spec.objective == "regression":
        target = labels.double().reshape(len(labels), 1, -1)
    else:
        target = labels[:, None] if spec.objective == "sequence" else labels
    return Data(data, target, keep, arrays.get("token_type_ids"))


def patches(spec: Spec, pixels: Tensor) -> Tensor:
    """``(B, channels, H, W)`` as ``(B, patches, channels patch_size^2)``, row by row."""
    size = spec.patch_size or 1
    rows = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
