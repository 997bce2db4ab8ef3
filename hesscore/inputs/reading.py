"""Files that a model is scored on, by suffix: each is reduced to the arrays of transformers, as docs/data.md says."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from hesscore import memory
from hesscore.errors import InputError, UsageError
from hesscore.files import File, examine, naming, short
from hesscore.inputs.arrays import LABELS, MASK, input_name, of_arrays
from hesscore.inputs.data import MASKED, Data, cut, window
from hesscore.inputs.masking import masked, read_special
from hesscore.inputs.stored import BYTES_PER_NUMBER, Stored, mapped, npy_layout, read_npz, tensor
from hesscore.inputs.text import read_text
from hesscore.inputs.tokens import beginning, check_vocabulary, ids_of, open_ids, pieces, windows
from hesscore.spec import Spec

MOST_TOKENS = 2**40
"""More than any file has, and few enough to count with."""

SUFFIXES = ".npz", ".npy", ".bin", ".txt"


def read_data(
    path: str | Path, spec: Spec, max_tokens: int | None = None, seed: int = 0, folder: Path | None = None
) -> Data:
    """What a file gives a model of ``spec``, of which the first ``max_tokens`` are scored, or all.

    ``.npz`` holds the arrays of transformers, ``.npy`` ids, pixels or activations, ``.bin`` ids in uint16, and ``.txt``
    text for the tokenizer in ``folder``, where the checkpoint is.  What no label says is drawn from ``seed``: which
    tokens a masked model does not see, and the target of a loss of ``hidden``.  ``InputError`` names the file;
    ``UsageError`` says that so few tokens are none.
    """
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}: at least one token must be scored")
    max_tokens = None if max_tokens is None else min(max_tokens, MOST_TOKENS)
    with naming(path):
        file = examine(path)
        suffix = file.path.suffix.lower()
        if suffix not in SUFFIXES:
            raise InputError(f"no data by its name: {', '.join(SUFFIXES)} are read")
        return replace(_read(file, suffix, spec, max_tokens, seed, folder), sha256=file.sha256())


def _read(file: File, suffix: str, spec: Spec, max_tokens: int | None, seed: int, folder: Path | None) -> Data:
    name = input_name(spec)
    if suffix == ".npz":
        return cut(spec, of_arrays(spec, read_npz(file), seed), max_tokens)
    if spec.objective not in ("causal_lm", "masked_lm", "hidden"):
        raise InputError(f"a loss of {spec.objective} needs labels: give them and {name} in an .npz")
    if not spec.vocab:
        if suffix != ".npy":
            raise InputError(f"the model has no vocabulary: give {name}, in an .npy or .npz")
        return _of_numbers(spec, file, max_tokens, seed)
    stored = read_text(file, spec, folder) if suffix == ".txt" else open_ids(file)
    if spec.objective == "causal_lm":
        return _followed(spec, stored, max_tokens)
    return _seen_whole(spec, stored, max_tokens, seed, folder)


def _followed(spec: Spec, stored: Stored, max_tokens: int | None) -> Data:
    """Ids, each scored but the first of a row, where it is predicted."""
    total = stored.size // stored.shape[-1] * (stored.shape[-1] - 1)
    scored = total if max_tokens is None else min(total, max_tokens)
    tokens, targets = windows(_ids(spec, beginning(stored, scored, targets=1)), window(spec))
    return cut(spec, Data(tokens, targets), max_tokens, total)


def _seen_whole(spec: Spec, stored: Stored, max_tokens: int | None, seed: int, folder: Path | None) -> Data:
    """Ids in windows with all of their labels inside: a share of them that is masked, or the target of each token."""
    special = read_special(folder, spec.vocab or 0) if spec.objective == "masked_lm" else None
    length, total, wanted = window(spec), stored.size, max_tokens
    if special and max_tokens is not None:
        wanted = -(-ceil(max_tokens / MASKED) // length) * length
    ids = _ids(spec, stored if wanted is None else beginning(stored, wanted))
    tokens = pieces(ids, length, fill=max(0, spec.position_offset - 1))
    keep = pieces(torch.ones_like(ids), length, fill=0).bool()
    if not special:
        data = of_arrays(spec, {input_name(spec): tokens, MASK: keep}, seed)
        return cut(spec, data, max_tokens, total)
    tokens, labels, note = masked(tokens, keep, special, seed)
    data = of_arrays(spec, {input_name(spec): tokens, MASK: keep, LABELS: labels})
    read = (f"only the first {ids.numel()} of {total} tokens are read",) if ids.numel() < total else ()
    return cut(spec, replace(data, notes=(note, *read)), max_tokens)


def _ids(spec: Spec, stored: Stored) -> Tensor:
    ids = ids_of(stored)
    check_vocabulary(ids, spec.vocab or 0)
    return ids


def _of_numbers(spec: Spec, file: File, max_tokens: int | None, seed: int) -> Data:
    """Pixels or activations, whose target is drawn."""
    layout, name = npy_layout(file.path), input_name(spec)
    if layout.dtype.kind != "f":
        raise InputError(f"holds {short(layout.dtype)} values, not {name} in floats")
    wanted = "(B, C, H, W)" if spec.image_size else "(B, L, d)"
    if not layout.sized or len(layout.shape) != wanted.count(",") + 1:
        raise InputError(f"has shape {short(layout.shape)}: {wanted} is read")
    stored = mapped(file, layout)
    length = spec.length if spec.image_size else stored.shape[1]
    total = stored.shape[0] * length
    if max_tokens is not None:
        stored = stored[: ceil(max_tokens / length)]
    if said := memory.excess(stored.size * BYTES_PER_NUMBER):
        raise InputError(f"{stored.size} numbers {said}: score fewer tokens, with --max-tokens")
    return cut(spec, of_arrays(spec, {name: tensor(stored)}, seed), max_tokens, total)
