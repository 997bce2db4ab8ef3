"""Data as transformers takes them: ``input_ids``, ``attention_mask``, ``labels`` and so on, all ``(B, ...)``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import Generator, Tensor

from hesscore import memory
from hesscore.errors import InputError
from hesscore.files import short
from hesscore.inputs.data import UNSCORED, Data
from hesscore.spec import Spec

MASK, SEGMENTS, LABELS = "attention_mask", "token_type_ids", "labels"

AXES = {
    1: ("row",),
    2: ("row", "position"),
    3: ("row", "position", "feature"),
    4: ("row", "channel", "height", "width"),
}

Shape = tuple[int | str, ...]
"""A letter stands for any size."""


def of_arrays(spec: Spec, arrays: Mapping[str, Tensor], seed: int = 0) -> Data:
    """The data whose loss is what transformers computes for these arrays; ``InputError`` that names the one at fault.

    ``input_ids`` and the ``token_type_ids`` beside them are ``(B, L)``, ``inputs_embeds`` of a stack without a
    vocabulary ``(B, L, d)``, ``pixel_values`` ``(B, channels, H, W)``.  ``attention_mask (B, L)`` is 0 on padding.

    ``labels (B, L)`` are tokens or classes, and -100 where nothing is scored, as on padding; those of a causal model
    are shifted here, and default to ``input_ids``.  They are ``(B,)`` for a class of each sequence, ``(B, labels)`` for
    numbers, and ``(B, L, d)`` for what the output of a stack is compared with, by default drawn from ``seed``.
    """
    name = input_name(spec)
    _check_names(spec, arrays)
    if name not in arrays:
        raise InputError(f"no {name}, which the model sees")
    data = _input(spec, name, arrays[name])
    tokens = data.shape[0], data.shape[1] + spec.class_token
    keep = _seen(arrays[MASK], tokens) if MASK in arrays else None
    segments = None
    if SEGMENTS in arrays:
        segments = _whole(SEGMENTS, arrays[SEGMENTS], tokens)
        _check_range(SEGMENTS, segments, spec.segments or 0, "segments")
    labels = arrays.get(LABELS)
    notes: tuple[str, ...] = ()
    if labels is None and spec.objective == "hidden":
        labels, notes = _drawn(spec, tokens, keep, seed)
    found = Data(data, _target(spec, data, labels, tokens, keep), keep, segments, notes=notes)
    if not found.scored:
        raise InputError(f"nothing is scored: no {LABELS} but {UNSCORED}")
    return found


def input_name(spec: Spec) -> str:
    """The array that a model sees."""
    return "pixel_values" if spec.image_size else "input_ids" if spec.vocab else "inputs_embeds"


def patches(spec: Spec, pixels: Tensor) -> Tensor:
    """``(B, channels, H, W)`` as ``(B, patches, channels patch_size^2)``, row by row."""
    size = spec.patch_size or 1
    rows = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def place(wrong: Tensor, axes: Sequence[str] | None = None) -> str:
    """Where the first is that is true."""
    return ", ".join(
        f"{axis} {at}" for axis, at in zip(axes or AXES[wrong.ndim], wrong.nonzero()[0].tolist(), strict=True)
    )


def _check_names(spec: Spec, names: Iterable[str]) -> None:
    known = [input_name(spec), LABELS]
    known += [] if spec.image_size else [MASK]
    known += [SEGMENTS] if spec.segments else []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise InputError(f"{short(name)} is nothing that the model takes: {advice}")


def _input(spec: Spec, name: str, array: Tensor) -> Tensor:
    """Ids ``(B, L)``, patches ``(B, N, channels patch_size^2)`` or activations ``(B, L, d)``."""
    if spec.image_size:
        return patches(spec, _numbers(name, array, ("B", spec.channels, spec.image_size, spec.image_size)))
    if not spec.vocab:
        return _numbers(name, array, ("B", "L", spec.d_model))
    ids = _whole(name, array, ("B", "L"))
    _check_range(name, ids, spec.vocab, "tokens of the vocabulary")
    if spec.positions != "none":  # beyond them, some rotary ones are scaled by the length
        longest = ids.shape[1]
        if spec.position_offset:  # padding has no position
            longest = int((ids != spec.position_offset - 1).sum(1).max())
        if longest > spec.length:
            raise InputError(
                f"{name}: sequences of {longest} tokens, but the model has {spec.length} positions: cut them"
            )
    return ids


def _seen(mask: Tensor, tokens: tuple[int, int]) -> Tensor | None:
    """Where there is no padding; ``None`` if that is everywhere."""
    _check_shape(MASK, mask, tokens)
    keep = mask != 0
    if not torch.equal(keep.to(mask.dtype), mask):
        wrong = keep.to(mask.dtype) != mask
        raise InputError(f"{MASK}: {mask[wrong][0].item()} at {place(wrong)} is neither 1 nor, for padding, 0")
    empty = ~keep.any(1)
    if empty.any():
        raise InputError(f"{MASK}: row {int(empty.nonzero()[0])} is all padding: leave it out")
    return None if keep.all() else keep


def _target(spec: Spec, data: Tensor, labels: Tensor | None, tokens: tuple[int, int], keep: Tensor | None) -> Tensor:
    """What ``hesscore.wiring.inputs.inputs`` calls so."""
    if spec.objective == "causal_lm":
        return _next(spec, data, labels, tokens, keep)
    if labels is None:
        raise InputError(f"no {LABELS}, which a loss of {spec.objective} needs")
    if spec.objective == "hidden":
        return _numbers(LABELS, labels, (*tokens, spec.d_model))
    sequences = tokens[0]
    if spec.objective == "regression":
        shape = (sequences,) if spec.labels == 1 and labels.ndim == 1 else (sequences, spec.labels or 1)
        return _numbers(LABELS, labels, shape).reshape(sequences, 1, -1)
    if spec.objective == "sequence":
        labels = labels[:, 0] if labels.shape[1:] == (1,) else labels
        return _classes(spec, labels, (sequences,))[:, None]
    return _classes(spec, labels, tokens, keep)


def _next(spec: Spec, ids: Tensor, labels: Tensor | None, tokens: tuple[int, int], keep: Tensor | None) -> Tensor:
    """The labels of a causal model where they are predicted, a token before; by default, all that can be."""
    if tokens[1] < 2:
        raise InputError("sequences of 1 token have no next one to score")
    after = torch.ones(tokens, dtype=torch.bool)
    """Whether what comes before is a token, of which there need be none before the first, whose label has no use."""
    if keep is not None:
        after[:, 1:] = keep[:, :-1]
    if labels is None:
        labels = ids if keep is None else ids.where(keep & after, UNSCORED)
    labels = _classes(spec, labels, tokens, keep)
    lost = (labels != UNSCORED) & ~after
    if lost.any():
        raise InputError(
            f"{LABELS}: {labels[lost][0].item()} at {place(lost)} follows padding, so it must be {UNSCORED}"
        )
    target = torch.full_like(labels, UNSCORED)
    target[:, :-1] = labels[:, 1:]
    return target


def _classes(spec: Spec, labels: Tensor, shape: Shape, keep: Tensor | None = None) -> Tensor:
    labels = _whole(LABELS, labels, shape)
    scored = labels != UNSCORED
    of = "tokens of the vocabulary" if spec.labels is None else "classes"
    _check_range(LABELS, labels.where(scored, 0), spec.outputs or 0, of)
    if keep is not None and (scored & ~keep).any():
        wrong = scored & ~keep
        raise InputError(
            f"{LABELS}: {labels[wrong][0].item()} at {place(wrong)} is on padding, so it must be {UNSCORED}"
        )
    return labels


def _drawn(spec: Spec, tokens: tuple[int, int], keep: Tensor | None, seed: int) -> tuple[Tensor, tuple[str, ...]]:
    """A standard normal target, whose numbers do not depend on where there is padding."""
    seen = torch.ones(tokens, dtype=torch.bool) if keep is None else keep
    if said := memory.excess(3 * 8 * seen.numel() * spec.d_model):
        raise InputError(f"a target for {seen.numel()} tokens {said}: give fewer")
    rng = Generator().manual_seed(seed ^ crc32(b"target"))
    target = torch.zeros(*tokens, spec.d_model, dtype=torch.float64)
    target[seen] = torch.randn(int(seen.sum()), spec.d_model, generator=rng, dtype=torch.float64)
    return target, (f"scored by the squared error to a target drawn from seed {seed}",)


def _whole(name: str, array: Tensor, shape: Shape) -> Tensor:
    if array.is_floating_point() or array.dtype == torch.bool:
        raise InputError(f"{name} holds {_kind(array)} values: whole numbers are read")
    _check_shape(name, array, shape)
    return array.long()


def _numbers(name: str, array: Tensor, shape: Shape) -> Tensor:
    if not array.is_floating_point():
        raise InputError(f"{name} holds {_kind(array)} values: floats are read")
    _check_shape(name, array, shape)
    if not array.isfinite().all():
        wrong = ~array.isfinite()
        raise InputError(f"{name}: {array[wrong][0].item()} at {place(wrong)} is not finite")
    return array.double()


def _check_shape(name: str, array: Tensor, shape: Shape) -> None:
    found = tuple(array.shape)
    fits = len(found) == len(shape) and all(size in (found[i], str(size)) for i, size in enumerate(shape))
    if not fits or not array.numel():
        wanted = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        raise InputError(f"{name} has shape {short(found)}, not ({wanted})")


def _check_range(name: str, values: Tensor, below: int, what: str) -> None:
    wrong = (values < 0) | (values >= below)
    if wrong.any():
        raise InputError(f"{name}: {values[wrong][0].item()} at {place(wrong)} is none of the {below} {what}")


def _kind(array: Tensor) -> str:
    return str(array.dtype).removeprefix("torch.")
