"""Arrays of ``.npy`` and ``.npz`` files: in time and memory linear in what is there, and no object is unpickled."""

from __future__ import annotations

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hesscore import memory
from hesscore.errors import InputError
from hesscore.files import File, naming, reason, short

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""By the version of a .npy file; there is a third one, for names of fields."""

LONGEST_HEADER = 2**14
"""Bytes; numpy takes 10,000 to be too many, but reads them first."""

MOST_ARRAYS = 16
"""In a .npz file; a model takes four at most."""

BYTES_PER_NUMBER = 80
"""At most, of memory: as it is stored, in 64 bits, and what is made of it."""

Stored = npt.NDArray[Any]


class Layout(NamedTuple):
    """How an array lies in a file, from byte ``start`` on."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def sized(self) -> bool:
        """Whether there is a number at all, and no size is True, which is 1 to numpy."""
        return all(type(size) is int and size > 0 for size in self.shape)

    @property
    def order(self) -> Any:
        return "F" if self.fortran_order else "C"

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def check_size(self, size: int) -> None:
        """Refuse a file of too few bytes."""
        if self.end > size:
            what = f"{short(self.dtype)} values of shape {short(self.shape)}"
            raise InputError(f"cut short: {size} bytes do not hold {what}")


def npy_layout(path: Path) -> Layout:
    """What the header of a ``.npy`` file says."""
    try:
        with path.open("rb") as stream:
            return _layout(stream)
    except Exception as error:  # of every kind there is, as nobody vouches for these bytes
        raise InputError(f"not a sound .npy file: {reason(error)}") from error


def mapped(file: File, layout: Layout) -> Stored:
    """The array as it is stored, not read yet: a training set may be larger than memory."""
    layout.check_size(file.size)
    return np.memmap(file.path, layout.dtype, "r", layout.start, layout.shape, layout.order)


def read_npz(file: File) -> dict[str, Tensor]:
    """The arrays by name, whether compressed or not."""
    try:
        with ZipFile(file.path) as archive:
            return _arrays(archive)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"not a sound .npz file: {reason(error)}") from error


def tensor(array: Stored) -> Tensor:
    """Whole numbers in int64, others in float64; what is true or false as it is."""
    kind = {"b": np.bool_, "f": np.float64}.get(array.dtype.kind, np.int64)
    with np.errstate(all="ignore"):  # of wider floats
        return torch.from_numpy(array.astype(kind))


def _layout(stream: IO[bytes]) -> Layout:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers by Python 2, which are read all the same
        stream = BytesIO(stream.read(LONGEST_HEADER))
        version = np.lib.format.read_magic(stream)
        if version not in HEADERS:
            raise ValueError(f"version {version}")
        layout = Layout(*HEADERS[version](stream), stream.tell())
    if max(layout.shape, default=0) >= 2**63:
        raise ValueError("a size in its shape is beyond all memory")
    return layout


def _arrays(archive: ZipFile) -> dict[str, Tensor]:
    """All sizes are known before an array is read."""
    entries = archive.infolist()
    if len(entries) > MOST_ARRAYS:
        raise InputError(f"holds {len(entries)} arrays, more than a model takes")
    found: dict[str, tuple[ZipInfo, Layout]] = {}
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        if name in found:
            raise InputError(f"holds {short(name)} twice")
        if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise InputError(f"{short(name)} is compressed as numpy never does: save it with numpy.savez")
        with archive.open(entry) as stream:
            layout = _layout(stream)
        if layout.dtype.kind not in "biuf":
            raise InputError(f"{short(name)} holds {short(layout.dtype)} values, not numbers")
        if not layout.sized:
            raise InputError(f"{short(name)} has shape {short(layout.shape)}: there is nothing in it")
        with naming(short(name)):
            layout.check_size(entry.file_size)
        if layout.end < entry.file_size:
            raise InputError(f"{short(name)} has {entry.file_size - layout.end} bytes more than its shape says")
        found[name] = entry, layout
    numbers = sum(math.prod(layout.shape) for _, layout in found.values())
    if said := memory.excess(numbers * BYTES_PER_NUMBER):
        raise InputError(f"{numbers} numbers {said}: keep fewer of them")
    return {name: _read(archive, entry, layout) for name, (entry, layout) in found.items()}


def _read(archive: ZipFile, entry: ZipInfo, layout: Layout) -> Tensor:
    with archive.open(entry) as stream:
        stream.read(layout.start)
        content = stream.read(layout.end - layout.start)  # all there is, so that the checksum is compared
    array = np.frombuffer(content, layout.dtype).reshape(layout.shape, order=layout.order)
    return tensor(array)
