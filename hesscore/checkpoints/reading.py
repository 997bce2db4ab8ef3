"""From the bytes of a checkpoint to dictionaries and tensors, running nothing that the file brings."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from torch import Tensor

from hesscore.checkpoints.pickles import RESAVE, Made, scan
from hesscore.checkpoints.tensors import check_memory, distinct, plain, tensors_in
from hesscore.errors import InputError
from hesscore.files import File, examine, short

_SCALAR = np.float64(0).__reduce__()[0]
_DTYPES = (np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_)
SAFE: list[Any] = [
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in _DTYPES),
]
"""What a numpy scalar is pickled with; a loss or a size is often one."""

LEGACY = b"".join(
    pickle.dumps(number, protocol=2)
    for number in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION)
)
"""How files of torch.save began before they were zip archives: with five pickles, these the first two."""


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, before anything is made of it."""

    tensors: dict[str, Tensor]
    """By their keys in the file."""
    config: dict[str, Any] | None
    """``config.json`` of the folder, or beside the file."""
    beside: dict[Any, Any]
    """What stood beside the tensors in a file of torch.save."""
    folder: Path
    size: int
    """Bytes of the weights' files."""
    file: File
    notes: list[str]


def read(path: str | Path) -> Stored:
    """All that a checkpoint holds."""
    path = Path(path)
    if path.is_dir():
        from safetensors.torch import load_file

        file = examine(path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        return Stored(load_file(file.path), config, {}, path, file.size, file, [])
    file = examine(path)
    content = content_of(file)
    state = content.get("model") if "model_args" in content else content.pop("model", content)
    if not isinstance(state, dict):
        raise InputError("has no dictionary of tensors under model: put model.state_dict() there")
    if state is content:
        state = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    tensors = tensors_in(state)
    check_memory(distinct(tensors), file.size)
    return Stored(tensors, None, content, file.path.parent, file.size, file, [])


def content_of(file: File) -> dict[Any, Any]:
    """The dictionary that ``torch.save`` put into a file, on the CPU; ``InputError`` for anything else.

    Time and memory are linear in the size of the file, whatever it holds.
    """
    try:
        with _open(file) as stream:
            content = _load(stream)
    except InputError:
        raise
    except BadZipFile:
        raise InputError("cut short or damaged: a zip archive without a sound end; copy it again") from None
    except Exception as error:  # of every kind there is, as nobody vouches for these bytes
        raise InputError(f"damaged, or not a checkpoint: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"holds a {type(content).__name__}, not a dictionary; {RESAVE}")
    return plain(content)


def _open(file: File) -> IO[bytes]:
    """Tell the formats apart, and refuse what could do harm or take forever while it is loaded."""
    head = file.head
    if head.startswith(b"PK\x03\x04"):
        _inspect_zip(file)
        return file.path.open("rb")
    if head.startswith(LEGACY):
        # In memory: in an open file, torch would look for the tar archives of its first year as well.
        stream = BytesIO(file.path.read_bytes())
        *_, keys = [scan(stream) for _ in range(5)]
        if not isinstance(keys, Made) or keys.kind != "list" or set(keys.contents) - {"str"}:
            raise ValueError("its storages have no names")
        stream.seek(0)
        return stream
    if head.startswith(b"\x80"):
        raise InputError(f"a pickle, but not by torch.save; {RESAVE}")
    if head.startswith(b"GGUF"):
        raise InputError("a GGUF file: not supported, its weights are quantised")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file.size:
        raise InputError("a safetensors file: not supported yet, only nanoGPT's ckpt.pt is")
    raise InputError(f"not a checkpoint: no file of torch.save begins with {head[:8]!r}")


def _inspect_zip(file: File) -> None:
    with ZipFile(file.path) as archive:
        entries = archive.infolist()
        # torch looks names up without regard to case.
        names = [entry.filename.lower() for entry in entries]
        pickles = [entry for entry, name in zip(entries, names, strict=True) if name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") for name in names):
            raise InputError(f"a TorchScript archive, which holds code: torch.jit.load it, and {RESAVE}")
        if not pickles:
            raise InputError("a zip archive, but not a checkpoint: no data.pkl in it")
        # torch.save stores tensors as they are, so what is unpacked is never more than the file.
        packed = any(entry.compress_type != ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > file.size:
            raise InputError("a compressed archive, which torch.save never writes: unpack and torch.save it")
        for entry in entries:
            _verify(archive, entry)
        for entry in pickles:
            scan(BytesIO(archive.read(entry)))


def _verify(archive: ZipFile, entry: ZipInfo) -> None:
    """Read an entry to its end, where its checksum is compared, which torch does not."""
    if not entry.CRC:
        del entry.CRC  # torch.save was told not to compute it
    try:
        with archive.open(entry) as stream:
            while stream.read(1 << 20):
                pass
    except BadZipFile:
        raise InputError(f"damaged: {short(entry.filename)} is not what was saved; copy it again") from None


def _load(stream: IO[bytes]) -> object:
    # A stream, as torch would go by the ending of a path.
    with warnings.catch_warnings(), torch.serialization.safe_globals(SAFE):
        warnings.simplefilter("ignore")
        return torch.load(stream, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """What torch says first, without its advice to load the file unsafely."""
    text = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).strip()
    return short((text.splitlines() or [type(error).__name__])[0], 120)
