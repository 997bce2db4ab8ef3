"""The constants of a model: what its data are to the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from hesscore.spec import Spec

SAME_FOR_ALL = ("rotary.cos", "rotary.sin")
"""Constants without an axis of sequences.  Of the others it is the first, of length 1 where all are alike."""


def inputs(
    spec: Spec,
    data: Tensor,
    target: Tensor,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
) -> dict[str, Tensor]:
    """The constants of ``model(spec)``.

    ``data`` are token ids ``(B, L)``, the pixels of patches ``(B, N, channels patch_size^2)``, or activations
    ``(B, L, d)``.  ``target`` are ids of tokens or classes, with -100 where nothing is scored, or numbers where these
    are compared: one for each token, or for each sequence ``(B, 1)``.  ``keep (B, L)`` is false on padding, which no
    token attends to; ``weights`` weigh tokens or sequences in the loss (by default 1, and 0 on padding); ``segments``
    are ids ``(B, L)``, 0 by default.
    """
    batch, length = data.shape[0], data.shape[1] + spec.class_token
    seen = torch.ones(1, length, dtype=torch.bool) if keep is None else keep
    if weights is None:
        weights = torch.ones(batch, 1 if spec.pools else length, dtype=torch.float64)
        weights = weights if keep is None or spec.pools else keep.double()
    constants = {
        "tokens" if spec.vocab else "input": data,
        "targets" if spec.classifies else "target": target,
        "weights": weights,
    }
    constants |= _masks(spec, seen) | _positions(spec, data, length)
    if spec.segments:
        constants["segments"] = torch.zeros_like(data) if segments is None else segments
    if spec.pools:
        constants["pool"] = _pool(spec, data, seen.expand(batch, length))
    return constants


def _masks(spec: Spec, seen: Tensor) -> dict[str, Tensor]:
    """Pairs of queries and keys, ``(B, 1, 1, L, L)``, by the name that ``hesscore.wiring.model.mask`` gives."""
    length = seen.shape[1]
    pairs = seen[:, None, None, None, :]
    if not spec.causal:
        return {"mask": pairs}
    back = torch.arange(length)[:, None] - torch.arange(length)
    masks = {"mask": pairs & (back >= 0)}
    if spec.window:
        masks["mask.window"] = masks["mask"] & (back < spec.window)
    return masks


def _positions(spec: Spec, data: Tensor, length: int) -> dict[str, Tensor]:
    if spec.positions == "learned":
        if not spec.position_offset:
            return {"positions": torch.arange(length)[None]}
        padding = spec.position_offset - 1
        there = data != padding
        return {"positions": there.cumsum(1) * there + padding}
    if spec.positions == "rotary":
        half = spec.rotated // 2
        frequency = spec.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        if spec.rotary_frequencies is not None:
            frequency = torch.tensor(spec.rotary_frequencies, dtype=torch.float64)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        return {"rotary.cos": spec.rotary_scale * angle.cos(), "rotary.sin": spec.rotary_scale * angle.sin()}
    return {}


def _pool(spec: Spec, data: Tensor, seen: Tensor) -> Tensor:
    """The share of each token in what a sequence is scored by, ``(B, 1 or 2, L)``."""
    at = torch.arange(seen.shape[1])
    first, there = at == 0, seen if spec.pad_token is None else data != spec.pad_token
    last = at == (at * there).amax(1, keepdim=True)
    own = (seen & (at >= spec.class_token)).double()
    shares = {"first": first.expand_as(seen), "last": last, "mean": own / own.sum(1, keepdim=True)}
    return torch.stack([shares[part].double() for part in spec.pool.split("_")], 1)
