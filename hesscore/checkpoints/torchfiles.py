"""Files of torch.save, as zip archives and as the pickles of its first years, running nothing that they bring."""

from __future__ import annotations

import pickle
import warnings
from io import BufferedReader, BytesIO, FileIO, UnsupportedOperation
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch

from hesscore.checkpoints.pickles import RESAVE, Made, scan
from hesscore.checkpoints.tensors import plain
from hesscore.errors import InputError
from hesscore.files import File, reason, short

_SCALAR = np.float64(0).__reduce__()[0]
_DTYPES = (np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_)
SAFE: list[Any] = [
    (_SCALAR, "numpy.core.multiarray.scalar"),
    (_SCALAR, "numpy._core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in _DTYPES),
]
"""What a numpy scalar is pickled with; a loss or a size is often one."""

ZIP = b"PK\x03\x04"

LEGACY = b"".join(
    pickle.dumps(number, protocol=2)
    for number in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION)
)
"""How files of torch.save began before they were zip archives: with five pickles, these the first two."""


def begins(head: bytes) -> bool:
    """Whether a file of torch.save begins so."""
    return head.startswith((ZIP, LEGACY))


def load(file: File) -> dict[Any, Any]:
    """The dictionary that torch.save put into a file, on the CPU; ``InputError`` for anything else.

    Time and memory are linear in the size of the file, whatever it holds.  Shapes and strides of tensors may state
    anything: see ``tensors.check_memory``.
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


class _Bytes(FileIO):
    """A file without a descriptor, in which torch looks for no tar archive, as its files were at first."""

    def fileno(self) -> int:
        raise UnsupportedOperation("fileno")


def _open(file: File) -> IO[bytes]:
    """The file, once it is sure that loading it does no harm and takes no longer than its size warrants."""
    if file.head.startswith(ZIP):
        _inspect_zip(file)
        return file.path.open("rb")
    stream = BufferedReader(_Bytes(file.path))
    try:
        *_, keys = [scan(stream) for _ in range(5)]
        if not isinstance(keys, Made) or keys.kind != "list" or set(keys.contents) - {"str"}:
            raise ValueError("its storages have no names")
        stream.seek(0)
    except BaseException:
        stream.close()
        raise
    return stream


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
    said = str(error).partition("WeightsUnpickler error: ")[2]
    return reason(ValueError(said) if said else error)
