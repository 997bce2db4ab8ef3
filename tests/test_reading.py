"""Files that are checkpoints, whole, damaged and of other kinds: read, or refused in one clear line."""

import hashlib
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from hesscore.checkpoints import load
from hesscore.checkpoints.reading import LEGACY
from hesscore.errors import InputError
from hesscore.files import File
from tests.checkpoints import ARGS, NO_CONFIG, RESAVE, UNKNOWN, assert_same_model, refusal, saved, zipped
from tests.reference_nanogpt import state_dict

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SAFETENSORS = (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32"' + b" " * 64
NO_MODEL = "has no dictionary of tensors under model: put model.state_dict() there"


def test_the_sha256_is_the_files(tmp_path):
    path = saved(tmp_path, state_dict(ARGS))
    assert load(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_refused_is_not_hashed(tmp_path, monkeypatch):
    state = state_dict(ARGS)
    state["transformer.ln_f.weight"][0] = torch.nan
    monkeypatch.delattr(File, "sha256")
    assert refusal(saved(tmp_path, state)).startswith("transformer.ln_f.weight is NaN")


def test_the_legacy_format_is_read(tmp_path):
    path = tmp_path / "ckpt.pt"
    content = {"model": state_dict(ARGS), "model_args": ARGS}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert_same_model(path, content["model"], ARGS)


def test_no_file_and_folders(tmp_path):
    assert refusal(tmp_path / "none.pt") == "no such file"
    assert refusal(tmp_path) == "a folder with nothing in it"
    (tmp_path / "a.txt").touch()
    (tmp_path / "z.pt").touch()
    assert refusal(tmp_path) == "a folder: name a file in it, such as z.pt"
    assert refusal(f"{tmp_path}/\0") == "cannot be read: embedded null byte"
    assert refusal(tmp_path / ("n" * 300)) == "cannot be read: File name too long"
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path / "loop") == "cannot be read: Too many levels of symbolic links"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    assert refusal(tmp_path / "pipe") == refusal(tmp_path / "device") == "not a regular file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (LFS, "a Git LFS pointer, not the file that it stands for: run git lfs pull"),
        (b"GGUF\x03\0\0\0", "a GGUF file: not supported, its weights are quantised"),
        (SAFETENSORS, "a safetensors file: not supported yet, only nanoGPT's ckpt.pt is"),
        (b"some text", "not a checkpoint: no file of torch.save begins with b'some tex'"),
        (b"\x89PNG\r\n\x1a\n\0", r"not a checkpoint: no file of torch.save begins with b'\x89PNG\r\n\x1a\n'"),
        (b"x", "not a checkpoint: no file of torch.save begins with b'x'"),
        (pickle.dumps({"model": {}}), f"a pickle, but not by torch.save; {RESAVE}"),
        (b"PK\x03\x04", "cut short or damaged: a zip archive without a sound end; copy it again"),
        (b"\x80\x02}", f"a pickle, but not by torch.save; {RESAVE}"),
        (
            b"PK\x05\x06" + bytes(18),
            r"not a checkpoint: no file of torch.save begins with b'PK\x05\x06\x00\x00\x00\x00'",
        ),
        (LEGACY, "damaged, or not a checkpoint: pickle exhausted before seeing STOP"),
        (LEGACY + b"N.N.N.", "damaged, or not a checkpoint: its storages have no names"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, content, message):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(content)
    assert refusal(path) == message


def test_random_bytes_are_refused_whatever_they_are(tmp_path):
    path = tmp_path / "ckpt.pt"
    rng = np.random.default_rng(0)
    for magic in (b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04", LEGACY):
        for _ in range(20):
            path.write_bytes(magic + rng.bytes(200))
            refusal(path)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint(tmp_path, share):
    path = saved(tmp_path, state_dict(ARGS))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert refusal(path) == "cut short or damaged: a zip archive without a sound end; copy it again"


def test_a_damaged_checkpoint_is_refused_or_reads_as_a_checkpoint(tmp_path):
    path = saved(tmp_path, state_dict(ARGS))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for start in rng.integers(0, len(whole) - 8, 150):
        path.write_bytes(whole[:start] + rng.bytes(8) + whole[start + 8 :])
        try:
            load(path)
        except InputError:
            continue


def test_a_flipped_bit_in_a_weight_is_noticed(tmp_path):
    path = saved(tmp_path, state_dict(ARGS))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        weights = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        content = [archive.read(entry) for entry in weights]
    assert len(weights) == 28
    for entry, numbers in zip(weights, content, strict=True):
        start = whole.index(numbers, entry.header_offset)
        damaged = bytearray(whole)
        damaged[start + len(numbers) // 2] ^= 1
        path.write_bytes(damaged)
        assert refusal(path) == f"damaged: {entry.filename} is not what was saved; copy it again"


def test_archives_that_are_no_checkpoint(tmp_path):
    path = tmp_path / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    assert refusal(path) == "a zip archive, but not a checkpoint: no data.pkl in it"
    zipped(path, pickle.dumps({}, 2), zipfile.ZIP_DEFLATED, zeros=bytes(10**6))
    assert refusal(path) == "a compressed archive, which torch.save never writes: unpack and torch.save it"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert refusal(path) == f"a TorchScript archive, which holds code: torch.jit.load it, and {RESAVE}"


def test_an_archive_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, state_dict(ARGS))
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_model(path, state_dict(ARGS), ARGS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], f"holds a list, not a dictionary; {RESAVE}"),
        ((ARGS, state_dict(ARGS)), f"holds a tuple, not a dictionary; {RESAVE}"),
        (torch.zeros(3), f"holds a Tensor, not a dictionary; {RESAVE}"),
        ({}, f"{UNKNOWN} none"),
        ({"model": state_dict(ARGS), 3: 4}, NO_CONFIG),
        (state_dict(ARGS), NO_CONFIG),
        ({"model_args": ARGS}, NO_MODEL),
        ({"model_args": ARGS, "model": [torch.zeros(2)]}, NO_MODEL),
    ],
)
def test_the_wrong_content(tmp_path, content, message):
    path = tmp_path / "ckpt.pt"
    torch.save(content, path)
    assert refusal(path) == message
