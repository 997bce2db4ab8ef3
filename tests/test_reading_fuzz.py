"""Files of every format that are damaged at random: read, or refused in one line, and nothing is written."""

import json
import pickle
import time
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hesscore.checkpoints.meta import read_meta
from hesscore.checkpoints.reading import read
from hesscore.checkpoints.tensors import distinct
from hesscore.errors import InputError
from hesscore.files import naming
from tests.checkpoints import zipped as rezipped
from tests.test_folders import STATE, sharded
from tests.test_meta import ABC
from tests.test_statedicts import OPTIMIZER

BESIDE = {"optimizer": OPTIMIZER, "model_args": {"n_layer": 2, "bias": True, "dropout": 0.1}, "loss": np.float64(2)}


def zipped(folder):
    torch.save({"model": STATE, **BESIDE}, folder / "ckpt.pt")
    return "ckpt.pt"


def legacy(folder):
    torch.save({"model": STATE, **BESIDE}, folder / "ckpt.pt", _use_new_zipfile_serialization=False)
    return "ckpt.pt"


def safetensors(folder):
    save_file(STATE | {"ids": torch.arange(9), "mask": torch.ones(1, 1, 3, 3).bool()}, folder / "model.safetensors")
    return "model.safetensors"


def shards(kind, damaged):
    def write(folder):
        return {"index": f"{kind}.index.json", "shard": sharded(folder, kind)[0]}[damaged]

    write.__name__ = f"{damaged} of {kind}"
    return write


def config(folder):
    safetensors(folder)
    fields = {"model_type": "gpt2", "n_layer": 2, "eps": 1e-5, "labels": {"0": "a"}, "torch_dtype": None, "tied": True}
    (folder / "config.json").write_text(json.dumps(fields))
    return "config.json"


def adapter(folder):
    save_file({"q.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/llama", "r": 2}')
    return "adapter_config.json"


FORMATS = [
    zipped,
    legacy,
    safetensors,
    *(shards(kind, damaged) for kind in ("model.safetensors", "pytorch_model.bin") for damaged in ("index", "shard")),
    config,
    adapter,
]


def damages(whole, rng):
    """Bytes changed, inserted, left out, repeated and cut off; the head is as likely as all the rest."""
    for _ in range(40):
        start = int(rng.integers(len(whole)) if rng.random() < 0.5 else rng.integers(min(len(whole), 100)))
        count = int(rng.choice([1, 1, 2, 8, 50]))
        yield whole[:start] + rng.bytes(count) + whole[start + count :]
        yield whole[:start] + bytes([whole[start] ^ 1 << int(rng.integers(8))]) + whole[start + 1 :]
        yield whole[:start] + whole[start + count :]
        yield whole[:start] + whole[start : start + count] * 2 + whole[start + count :]
        yield whole[:start]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_readable(stored):
    """Each number of each tensor can be read, and all of them lie in the files."""
    tensors = distinct(stored.tensors).values()
    assert sum(len(tensor.contiguous().view(-1).tolist()) * tensor.itemsize for tensor in tensors) <= stored.size
    assert len(stored.sha256) == 64


@contextmanager
def whole_or_refused(folder):
    before, start = contents(folder), time.perf_counter()
    try:
        yield
    except InputError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 500, said
    assert time.perf_counter() - start < 5
    assert contents(folder) == before


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_damaged_files_are_read_or_refused(tmp_path, write):
    damaged = tmp_path / write(tmp_path)
    source = tmp_path if len(contents(tmp_path)) > 1 else damaged
    whole = damaged.read_bytes()
    outcomes = set()
    for content in damages(whole, np.random.default_rng(0)):
        damaged.write_bytes(content)
        with whole_or_refused(tmp_path), naming(source):
            try:
                stored = read(source)
            except InputError:
                outcomes.add("refused")
                raise
            assert_readable(stored)
    assert outcomes == {"refused"}


def test_damaged_pickles_under_a_sound_checksum_are_read_or_refused(tmp_path):
    path = tmp_path / zipped(tmp_path)
    with zipfile.ZipFile(path) as archive:
        entries = {name.removeprefix("ckpt/"): archive.read(name) for name in archive.namelist()}
    pickled = entries.pop("data.pkl")
    del entries["version"]
    read(rezipped(path, pickled, **entries))
    for content in damages(pickled, np.random.default_rng(1)):
        rezipped(path, content, **entries)
        with whole_or_refused(tmp_path), naming(path):
            assert_readable(read(path))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_damaged_table_of_characters_is_read_or_refused(tmp_path, protocol):
    path = tmp_path / "meta.pkl"
    for content in damages(pickle.dumps(ABC, protocol), np.random.default_rng(protocol)):
        path.write_bytes(content)
        with whole_or_refused(tmp_path):
            found = read_meta(path)
            assert {key: character for character, key in found["stoi"].items()} == found["itos"]


@pytest.mark.parametrize(
    "magic", [b"", b"PK\3\4", b"\x80\2", b"\x80\4\x95", b"GGUF", bytes(8) + b"{", b"\x20" + bytes(7) + b"{"]
)
def test_random_bytes_are_refused(tmp_path, magic):
    rng = np.random.default_rng(0)
    for name in "model.safetensors", "pytorch_model.bin":
        for _ in range(20):
            (tmp_path / name).write_bytes(magic + rng.bytes(200))
            with pytest.raises(InputError):
                read(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("write", [zipped, legacy, safetensors], ids=lambda write: write.__name__)
def test_what_keys_are_left_out_does_not_matter_here(tmp_path, write, monkeypatch):
    """A family says what a model lacks; a reader knows no names."""
    for left in [{}, *({name: STATE[name]} for name in STATE)]:
        monkeypatch.setattr("tests.test_reading_fuzz.STATE", left)
        name = write(tmp_path)
        if left or write is safetensors:
            assert left.keys() <= read(tmp_path / name).tensors.keys()
        else:
            with pytest.raises(InputError, match="holds no dictionary of tensors"):
                read(tmp_path / name)
