"""Token ids from files, and the windows in which a causal model is scored on them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hesscore import memory
from hesscore.errors import InputError, UsageError
from hesscore.files import File, examine, naming, short
from hesscore.inputs.data import UNSCORED, Data

BYTES_PER_TOKEN = 100
"""At most, of memory: int64 ids, and what cuts them into windows, which are up to half padding."""

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""By the version of a .npy file; there is a third one, for names of fields."""

Stored = npt.NDArray[Any]


class Layout(NamedTuple):
    """How an array lies in a file, from byte ``start`` on."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    start: int


def read_data(path: str | Path, vocab: int, length: int, max_tokens: int | None = None) -> Data:
    """Read a token file in windows of ``length``, scoring the first ``max_tokens`` next tokens."""
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}: at least one token must be scored")
    with naming(path):
        file = examine(path)
        stored = _open(file)
        total = stored.size // stored.shape[-1] * (stored.shape[-1] - 1)
        scored = total if max_tokens is None else min(total, max_tokens)
        ids = _ids(_enough(stored, scored))
        check_vocabulary(ids, vocab)
        tokens, targets = cut(*windows(ids, length), scored)
        notes = (f"only the first {scored} of {total} tokens are scored",) if scored < total else ()
        return Data(tokens, targets, sha256=file.sha256(), notes=notes)


def read_tokens(path: str | Path) -> Tensor:
    """The ids in a file, int64: ``(T,)`` of nanoGPT's ``.bin`` (uint16), ``(T,)`` or ``(B, T)`` of ``.npy``.

    ``InputError`` unless they are integers, none negative, and two or more in a row.
    """
    with naming(path):
        return _ids(_open(examine(path)))


def check_vocabulary(ids: Tensor, vocab: int) -> None:
    """Refuse ids that the table of ``vocab`` rows does not have, naming the first and where it is."""
    if int(ids.max()) >= vocab:
        raise InputError(f"{_first(ids, ids >= vocab)} is beyond the vocabulary of {vocab}: another model's?")


def windows(ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and next-token targets, ``(W, L)`` each: ids ``(T,)`` or ``(B, T)`` in windows without overlap.

    ``L`` is ``length``, or ``T - 1`` where that is less.  Each of the ``T - 1`` next tokens of a row is a
    target exactly once.  A row's last window is filled up with token 0 and target -100, which the tokens
    before do not see.
    """
    rows = ids[None] if ids.ndim == 1 else ids
    batch, scored = rows.shape[0], rows.shape[1] - 1
    length = min(length, scored)
    padded = -(-scored // length) * length
    tokens = rows.new_zeros(batch, padded)
    targets = rows.new_full((batch, padded), UNSCORED)
    tokens[:, :scored], targets[:, :scored] = rows[:, :-1], rows[:, 1:]
    return tokens.view(-1, length), targets.view(-1, length)


def cut(tokens: Tensor, targets: Tensor, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Score the first ``max_tokens`` targets only, and drop the windows that are left with none."""
    scored = targets != UNSCORED
    scored &= scored.flatten().cumsum(0).view_as(targets) <= max_tokens
    some = scored.any(1)
    return tokens[some], torch.where(scored, targets, UNSCORED)[some]


def _open(file: File) -> Stored:
    """The ids as they are stored, mapped rather than read: a training set may be larger than memory."""
    if file.path.suffix == ".bin":
        if file.head.startswith(np.lib.format.MAGIC_PREFIX):
            raise InputError("a .npy file by its content: rename it")
        if file.size % 2:
            raise InputError(f"{file.size} bytes, an odd number, are not uint16 ids: cut short?")
        layout = Layout((file.size // 2,), False, np.dtype("<u2"), 0)
    elif file.path.suffix == ".npy":
        layout = _npy_layout(file)
    else:
        raise InputError("not a token file: .bin (uint16, as nanoGPT writes it) and .npy are read")
    shape, fortran_order, dtype, start = layout
    if dtype.kind not in "iu":
        raise InputError(f"holds {short(dtype)} values, not integer token ids")
    sizes = all(type(size) is int and size > 0 for size in shape)  # True is 1 to numpy
    if not sizes or len(shape) not in (1, 2) or shape[-1] < 2:
        raise InputError(f"has shape {short(shape)}: (T,) or (B, T) is read, with T of 2 or more")
    if start + math.prod(shape) * dtype.itemsize > file.size:
        raise InputError(f"cut short: {file.size} bytes do not hold {dtype} values of shape {short(shape)}")
    return np.memmap(file.path, dtype, "r", start, shape, "F" if fortran_order else "C")


def _npy_layout(file: File) -> Layout:
    try:
        with file.path.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers by Python 2, which are read all the same
            version = np.lib.format.read_magic(stream)
            if version not in HEADERS:
                raise ValueError(f"version {version}")
            layout = Layout(*HEADERS[version](stream), stream.tell())
            if max(layout.shape, default=0) >= 2**63:
                raise ValueError("a size in its shape is beyond all memory")
            return layout
    except Exception as error:  # of every kind there is, as nobody vouches for these bytes
        raise InputError(f"not a sound .npy file: {short(' '.join(str(error).split()), 120)}") from error


def _enough(stored: Stored, scored: int) -> Stored:
    """The part that holds the first ``scored`` next tokens, in whole rows if there are rows."""
    return stored[: scored + 1] if stored.ndim == 1 else stored[: -(-scored // (stored.shape[1] - 1))]


def _ids(stored: Stored) -> Tensor:
    if said := memory.excess(stored.size * BYTES_PER_TOKEN):
        raise InputError(f"{stored.size} tokens {said}: score fewer, with --max-tokens")
    ids = torch.from_numpy(stored.astype(np.int64))
    flat = ids.flatten()
    if stored.dtype == np.uint16 and len(flat) > 3 and not flat[1::2].any():
        raise InputError("every second id is 0, as of ids in int32 read as uint16: save them as uint16, or as .npy")
    if int(ids.min()) < 0:
        raise InputError(f"{_first(ids, ids < 0)} is not an id: negative, or too large for int64")
    return ids


def _first(ids: Tensor, wrong: Tensor) -> str:
    *row, position = wrong.nonzero()[0].tolist()
    where = f"row {row[0]}, position {position}" if row else f"position {position}"
    return f"token {int(ids[wrong][0])} at {where}"
