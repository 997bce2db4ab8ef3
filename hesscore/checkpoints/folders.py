"""Which files of a folder hold the weights, as transformers lays folders out."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from hesscore.checkpoints.formats import foreign, is_checkpoint, shard
from hesscore.checkpoints.jsonfiles import read_object
from hesscore.checkpoints.tensors import listed
from hesscore.errors import InputError
from hesscore.files import File, examine, naming, short

INDEX = ".index.json"
STANDARD = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
"""In the order in which transformers looks for them."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
NO_WEIGHTS = ("training_args.*", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*.pth", "adapter_model.*")
"""What else scripts write with torch.save."""

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """The files that hold the weights; ``promised`` is the file of each tensor, where an index says so."""

    folder: Path
    files: list[File]
    promised: dict[str, str] = field(default_factory=dict)


def locate(path: Path) -> Source:
    """The weights' files in a folder, or the one that is named; ``InputError`` if there are none, or too many."""
    if not path.is_dir():
        return Source(path.parent, [examine(path)])
    names = sorted(child.name for child in path.iterdir())
    standard = next((name for name in STANDARD if name in names), None)
    if standard and standard.endswith(INDEX):
        return _indexed(path, standard, names)
    found = [standard] if standard else [name for name in names if _holds_weights(path / name)]
    if len(found) > 1:
        raise InputError(f"a folder with several files of weights, {listed(found)}: name one of them")
    if not found:
        raise InputError(_lacking(path, names))
    return Source(path, _examined(path, found))


def adapter(folder: Path) -> str:
    """What is said of an adapter's weights."""
    path = folder / ADAPTER
    base = read_object(path).get("base_model_name_or_path") if path.exists() else None
    named = f"its base model, {short(base)}" if isinstance(base, str) else "its base model"
    return f"an adapter, which is no model without {named}: merge_and_unload it into that, and save the result"


def _indexed(folder: Path, index: str, names: list[str]) -> Source:
    promised = read_object(folder / index).get("weight_map")
    with naming(index):
        if not isinstance(promised, dict) or not promised or not all(type(name) is str for name in promised.values()):
            raise InputError("has no weight_map, which says the file of each tensor")
        shards = sorted(set(promised.values()))
        if outside := [name for name in shards if name == ".." or name != Path(name).name]:
            raise InputError(f"names {listed(outside)}: only files of its own folder are read")
        if missing := sorted({*shards} - {*names}):
            raise InputError(f"{len(missing)} of its {len(shards)} files missing: {listed(missing)}; copy them as well")
    return Source(folder, _examined(folder, shards), promised)


def _examined(folder: Path, names: list[str]) -> list[File]:
    files = []
    for name in names:
        with naming(name):
            files.append(examine(folder / name))
    return files


def _holds_weights(path: Path) -> bool:
    """Whether a file is meant to hold weights.  One of nanoGPT's tokens has their suffix, too: .bin."""
    if path.suffix not in SUFFIXES or path.is_dir() or shard(path.name):
        return False
    if any(fnmatchcase(path.name, pattern) for pattern in NO_WEIGHTS):
        return False
    return path.suffix != ".bin" or _begins_like_weights(path)


def _begins_like_weights(path: Path) -> bool:
    try:
        return is_checkpoint(examine(path).head)
    except (InputError, OSError):  # said in full where it is the only file
        return True


def _lacking(folder: Path, names: list[str]) -> str:
    """What to say of a folder without weights, from what is there instead."""
    if not names:
        return "a folder with nothing in it"
    for says in shard, foreign:
        if name := next(filter(says, names), None):
            return f"a folder without whole weights; {short(name)} is {says(name)}"
    if ADAPTER in names:
        return f"a folder of {adapter(folder)}"
    return f"a folder without weights, only {listed(names)}: name one with model.safetensors or the like, or a file"
