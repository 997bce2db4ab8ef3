"""From the bytes of a checkpoint to dictionaries and tensors, running nothing that the file brings."""

from __future__ import annotations

import pickle
import re
import warnings
from io import BytesIO
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import torch

from hesscore.checkpoints.pickles import RESAVE, globals_in, wants_code
from hesscore.checkpoints.tensors import plain
from hesscore.errors import InputError
from hesscore.files import File

_SCALAR = np.float64(0).__reduce__()[0]
_DTYPES = (np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_)
SAFE: list[Any] = [
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in _DTYPES),
]
"""What a numpy scalar is pickled with; a loss or a size is often one."""

LEGACY = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
"""How files of torch.save began before they were zip archives: with five pickles, this the first."""


def read(file: File) -> dict[Any, Any]:
    """The dictionary that ``torch.save`` put into a file, on the CPU; ``InputError`` for anything else."""
    try:
        _inspect(file)
        content = _load(file)
    except InputError:
        raise
    except BadZipFile:
        raise InputError("cut short or damaged: a zip archive without a sound end; copy it again") from None
    except Exception as error:  # of every kind there is, as nobody vouches for these bytes
        blocked = re.search(r"GLOBAL (\S+)", str(error))
        if blocked:
            raise wants_code([blocked[1]]) from error
        raise InputError(f"damaged, or not a checkpoint: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"holds a {type(content).__name__}, not a dictionary; {RESAVE}")
    return plain(content)


def _inspect(file: File) -> None:
    """Tell the formats apart, and refuse what could do harm or take forever while it is loaded."""
    head = file.head
    if head.startswith(b"PK"):
        _inspect_zip(file)
    elif head.startswith(LEGACY):
        with file.path.open("rb") as stream:
            for _ in range(5):
                globals_in(stream)
    elif head.startswith(b"\x80"):
        with file.path.open("rb") as stream:
            named = globals_in(stream)
        raise wants_code(named) if named else InputError(f"a pickle, but not by torch.save; {RESAVE}")
    elif head.startswith(b"GGUF"):
        raise InputError("a GGUF file: not supported, its weights are quantised")
    elif head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.size:
        raise InputError("a safetensors file: not supported yet, only nanoGPT's ckpt.pt is")
    else:
        raise InputError(f"not a checkpoint: no file of torch.save begins with {head[:8]!r}")


def _inspect_zip(file: File) -> None:
    with ZipFile(file.path) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in names):
            raise InputError(f"a TorchScript archive, which holds code: torch.jit.load it, and {RESAVE}")
        if not pickles:
            raise InputError("a zip archive, but not a checkpoint: no data.pkl in it")
        # torch.save stores tensors as they are, so what is unpacked is never more than the file.
        packed = any(entry.compress_type != ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > file.size:
            raise InputError("a compressed archive, which torch.save never writes: unpack and torch.save it")
        for entry in pickles:
            del entry.CRC  # torch.save may have been told not to compute it
            globals_in(BytesIO(archive.read(entry)))


def _load(file: File) -> object:
    # An open file, as torch would go by the ending of a path.
    with file.path.open("rb") as stream, warnings.catch_warnings(), torch.serialization.safe_globals(SAFE):
        warnings.simplefilter("ignore")
        return torch.load(stream, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """What torch says first, without its advice to load the file unsafely."""
    text = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).strip()
    if text.startswith("Unsupported operand"):
        return "its pickle protocol is not torch.save's own; torch.save it without pickle_protocol"
    return (text.splitlines() or [type(error).__name__])[0][:120]
