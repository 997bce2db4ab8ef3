"""Files of safetensors: a length, a header in JSON, and the bytes of the tensors it names."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hesscore.checkpoints.jsonfiles import check_size, parsed
from hesscore.checkpoints.tensors import REAL
from hesscore.errors import InputError
from hesscore.files import File, naming, reason, short

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64")
"""Those that torch has, and that are not made for quantised weights."""

LENGTH = 8
"""Bytes of the header's length."""


def begins(head: bytes) -> bool:
    """Whether a file of safetensors begins so: with the length of a header, which no memory can hold if it is text."""
    return head[LENGTH - 2 : LENGTH + 1] == b"\0\0{"


def load(file: File) -> dict[str, Tensor]:
    """The tensors in a file, each with memory of its own; ``InputError`` if the file is not sound."""
    for name, entry in _header(file).items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if name != "__metadata__" and isinstance(dtype, str) and dtype not in DTYPES:
            raise InputError(f"{short(name)} holds {short(dtype)} values: {REAL}")
    try:
        with safe_open(file.path, "pt") as opened:
            # Copied, as they are the file itself, and that may change while they are used.
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        said = reason(ValueError(str(error).rpartition("deserializing header: ")[2]))
        raise InputError(f"cut short or damaged: {said}; copy it again") from error


def _header(file: File) -> dict[str, dict[str, object]]:
    with file.path.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH), "little")
        if length > file.size - LENGTH:
            raise InputError(
                f"cut short or damaged: its header takes {length} bytes, the file {file.size}; copy it again"
            )
        with naming("its header"):
            check_size(length)
            return parsed(stream.read(length))
