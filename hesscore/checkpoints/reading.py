"""What a checkpoint holds, whatever wrote it: a file or a folder, read safely, before anything is made of it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from hesscore import memory
from hesscore.checkpoints import safetensorfiles, torchfiles
from hesscore.checkpoints.folders import Source, adapter, locate
from hesscore.checkpoints.formats import refused, shard
from hesscore.checkpoints.jsonfiles import read_object
from hesscore.checkpoints.statedicts import Found, find
from hesscore.checkpoints.tensors import REAL, check_memory, check_unquantised, distinct
from hesscore.errors import InputError
from hesscore.files import File, naming, short

CONFIG = "config.json"

ADAPTED = re.compile(r"\blora_(A|B|embedding_A|embedding_B|up|down)\b")
"""In the names of LoRA's weights."""


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, before anything is made of it."""

    tensors: dict[str, Tensor]
    """By their keys in the file, wrapper prefixes included; detached, on the CPU.

    Two names may have one tensor; all that differ take no more memory than the files have bytes.
    """
    config: dict[str, Any] | None
    """``config.json`` of the folder, or beside the file."""
    beside: dict[Any, Any]
    """What stood beside the state dict in a file of torch.save, as it was: tensors in it are not checked."""
    folder: Path
    """Where ``config.json`` and a tokenizer would lie."""
    files: list[File]
    """Those with the weights."""
    notes: list[str]

    @property
    def size(self) -> int:
        """Bytes of the weights' files."""
        return sum(file.size for file in self.files)

    @cached_property
    def sha256(self) -> str:
        """Of the file; of several, that of the lines ``name digest``, sorted by name."""
        if len(self.files) == 1:
            return self.files[0].sha256()
        lines = sorted(f"{file.path.name} {file.sha256()}\n" for file in self.files)
        return sha256("".join(lines).encode()).hexdigest()


def read(path: str | Path) -> Stored:
    """All that a checkpoint holds: a file of torch.save or of safetensors, or a folder with either, in shards or whole.

    Nothing in it is executed.  Time and memory are linear in its size.  ``InputError`` says what is wrong with it, and
    leaves it to the caller to name ``path``.
    """
    path = Path(path)
    source = locate(path)
    config = _config(source.folder)
    memory.check(sum(file.size for file in source.files), "loading the weights")
    found: dict[str, Found] = {}
    for file in source.files:
        with nullcontext() if file.path == path else naming(file.path.name):
            found[file.path.name] = _found(file)
    return Stored(
        tensors=_merged(source, found),
        config=config,
        beside={key: value for part in found.values() for key, value in part.beside.items()},
        folder=source.folder,
        files=source.files,
        notes=[note for part in found.values() for note in part.notes],
    )


def _config(folder: Path) -> dict[str, Any] | None:
    if not (folder / CONFIG).exists():
        return None
    config = read_object(folder / CONFIG)
    if config.get("quantization_config"):
        raise InputError(f"{CONFIG}: has a quantization_config, so the weights are quantised: {REAL}")
    return config


def _found(file: File) -> Found:
    """The tensors of one file."""
    if what := shard(file.path.name):
        raise InputError(what)
    if safetensorfiles.begins(file.head):
        found = find(safetensorfiles.load(file))
    elif torchfiles.begins(file.head):
        found = find(torchfiles.load(file))
    else:
        raise refused(file)
    for name, tensor in found.tensors.items():
        if ADAPTED.search(name):
            raise InputError(f"{short(name)} is of {adapter(file.path.parent)}")
        check_unquantised(name, tensor)
    check_memory(distinct(found.tensors), file.size)
    return found


def _merged(source: Source, found: dict[str, Found]) -> dict[str, Tensor]:
    """The tensors of all files: those that the index promises, each in one file."""
    for name, file in source.promised.items():
        if name not in found[file].tensors:
            raise InputError(f"{file}: lacks {short(name)}, which is there by the index; copy it again")
    tensors: dict[str, Tensor] = {}
    lies_in: dict[str, str] = {}
    for file, part in found.items():
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InputError(f"{short(name)} is in {lies_in[name]} and in {file}: keep one")
            tensors[name], lies_in[name] = tensor, file
    return tensors
