"""Token ids from files, and the windows in which a model is scored on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hesscore import memory
from hesscore.errors import InputError
from hesscore.files import File, examine, naming, short
from hesscore.inputs.arrays import place
from hesscore.inputs.data import UNSCORED
from hesscore.inputs.stored import Layout, Stored, mapped, npy_layout, tensor

BYTES_PER_TOKEN = 100
"""At most, of memory: int64 ids, and what cuts them into windows, which are up to half padding."""


def read_tokens(path: str | Path) -> Tensor:
    """The ids in a file, int64: ``(T,)`` of nanoGPT's ``.bin`` (uint16), ``(T,)`` or ``(B, T)`` of ``.npy``.

    ``InputError`` unless they are integers, none negative, and two or more in a row.
    """
    with naming(path):
        return ids_of(open_ids(examine(path)))


def open_ids(file: File) -> Stored:
    """The ids as they are stored, mapped and not read."""
    if file.path.suffix.lower() == ".bin":
        if file.head.startswith(np.lib.format.MAGIC_PREFIX):
            raise InputError("a .npy file by its content: rename it")
        if file.size % 2:
            raise InputError(f"{file.size} bytes, an odd number, are not uint16 ids: cut short?")
        layout = Layout((file.size // 2,), False, np.dtype("<u2"), 0)
    else:
        layout = npy_layout(file.path)
    if layout.dtype.kind not in "iu":
        raise InputError(f"holds {short(layout.dtype)} values, not integer token ids")
    if not layout.sized or len(layout.shape) not in (1, 2) or layout.shape[-1] < 2:
        raise InputError(f"has shape {short(layout.shape)}: (T,) or (B, T) is read, with T of 2 or more")
    return mapped(file, layout)


def ids_of(stored: Stored) -> Tensor:
    """Read what is mapped; ``InputError`` for what is no id."""
    if said := memory.excess(stored.size * BYTES_PER_TOKEN):
        raise InputError(f"{stored.size} tokens {said}: score fewer, with --max-tokens")
    ids = tensor(stored)
    flat = ids.flatten()
    if stored.dtype == np.uint16 and len(flat) > 3 and not flat[1::2].any():
        raise InputError("every second id is 0, as of ids in int32 read as uint16: save them as uint16, or as .npy")
    if int(ids.min()) < 0:
        raise InputError(f"{_first(ids, ids < 0)} is not an id: negative, or too large for int64")
    return ids


def check_vocabulary(ids: Tensor, vocab: int) -> None:
    """Refuse ids that the table of ``vocab`` rows does not have, naming the first and where it is."""
    if int(ids.max()) >= vocab:
        raise InputError(f"{_first(ids, ids >= vocab)} is beyond the vocabulary of {vocab}: another model's?")


def beginning(stored: Stored, wanted: int, targets: int = 0) -> Stored:
    """The part that holds the first ``wanted`` tokens, in whole rows if there are rows.

    The last ``targets`` of a row are not among those that are counted.
    """
    per_row = stored.shape[-1] - targets
    return stored[: wanted + targets] if stored.ndim == 1 else stored[: -(-wanted // per_row)]


def windows(ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and next-token targets, ``(W, L)`` each: ids ``(T,)`` or ``(B, T)`` in windows without overlap.

    ``L`` is ``length``, or ``T - 1`` where that is less.  Each of the ``T - 1`` next tokens of a row is a
    target exactly once.  A row's last window is filled up with token 0 and target -100, which the tokens
    before do not see.
    """
    return pieces(ids[..., :-1], length, 0), pieces(ids[..., 1:], length, UNSCORED)


def pieces(ids: Tensor, length: int, fill: int) -> Tensor:
    """Rows ``(T,)`` or ``(B, T)`` cut into ``(W, L)``, ``L`` being ``length`` or less; the last of each filled up."""
    rows = ids[None] if ids.ndim == 1 else ids
    length = min(length, rows.shape[1])
    padding = -rows.shape[1] % length
    return torch.nn.functional.pad(rows, (0, padding), value=fill).reshape(-1, length)


def _first(ids: Tensor, wrong: Tensor) -> str:
    return f"token {int(ids[wrong][0])} at {place(wrong, ('position',) if ids.ndim == 1 else None)}"
