"""Files that are checkpoints, whole, damaged and of other kinds: read, or refused in one clear line."""

import hashlib
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from hesscore import memory
from hesscore.checkpoints import load
from hesscore.checkpoints.reading import read
from hesscore.checkpoints.torchfiles import LEGACY
from hesscore.errors import InputError
from hesscore.files import File
from tests.checkpoints import ARGS, NO_CONFIG, NO_TENSORS, RESAVE, UNKNOWN, assert_same_model, refusal, saved, zipped
from tests.reference_nanogpt import state_dict

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
REAL = "save it in float32, as weights are real numbers"
SAVE = "save the model with torch.save or safetensors"
STATE = ": save model.state_dict()"
GGUF = "a GGUF file, in which weights are quantised: name the safetensors that it was made from"
DEEPSPEED = "a part of a DeepSpeed checkpoint: put it together with the zero_to_fp32.py beside it, and name the result"
DISTRIBUTED = (
    "a part of a distributed checkpoint: put it together with "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt, and name the result"
)
NEITHER = "not a checkpoint: no file of torch.save or safetensors begins with"


def test_the_sha256_is_the_files(tmp_path):
    path = saved(tmp_path, state_dict(ARGS))
    assert load(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_read_of_a_file(tmp_path):
    state = state_dict(ARGS)
    path = saved(tmp_path, state)
    stored = read(path)
    assert list(stored.tensors) == list(state)
    assert all(torch.equal(stored.tensors[name], tensor) for name, tensor in state.items())
    assert (stored.config, stored.beside) == (None, {"model_args": ARGS, "iter_num": 7})
    assert (stored.folder, stored.size, stored.notes) == (tmp_path, path.stat().st_size, [])


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


def test_more_than_the_memory_that_is_free_is_not_loaded(tmp_path, monkeypatch):
    path = saved(tmp_path, state_dict(ARGS))
    monkeypatch.setattr(memory, "free", lambda: 10_000)
    monkeypatch.delattr(torch, "load")
    need = f"{path.stat().st_size / 2**30:.3g}"
    assert refusal(path) == f"loading the weights would take {need} GiB of memory; 9.31e-06 are free"


def test_storages_of_other_devices_are_read(tmp_path):
    """In both formats the pickle says where a tensor was."""
    path = tmp_path / "ckpt.pt"
    for modern in True, False:
        torch.save({"a": torch.arange(3.0)}, path, _use_new_zipfile_serialization=modern)
        content = path.read_bytes()
        assert content.count(b"X\3\0\0\0cpu") == 1
        if modern:
            with zipfile.ZipFile(path) as archive:
                pickled, numbers = archive.read("ckpt/data.pkl"), archive.read("ckpt/data/0")
            zipped(path, pickled.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:1"), **{"data/0": numbers})
        else:
            path.write_bytes(content.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:1"))
        tensor = read(path).tensors["a"]
        assert (tensor.tolist(), tensor.device.type) == ([0, 1, 2], "cpu")


def test_what_is_no_parameter_is_let_through(tmp_path):
    """Families tell whether a tensor is one; a causal mask is bytes or truth values."""
    ids, mask = torch.arange(6)[None], torch.ones(1, 1, 6, 6).tril()
    state = {"w": torch.ones(2, 2), "position_ids": ids, "bias": mask.bool(), "old.bias": mask.byte()}
    path = tmp_path / "ckpt.pt"
    torch.save(state, path)
    tensors = read(path).tensors
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: t.dtype for n, t in state.items()}


def test_a_tensor_with_two_names_is_let_through(tmp_path):
    """A tied head lies in a file once."""
    table = torch.randn(5, 3)
    path = tmp_path / "ckpt.pt"
    torch.save({"table": table, "head": table, "other": table.clone().requires_grad_()}, path)
    tensors = read(path).tensors
    assert tensors["head"].is_set_to(tensors["table"])
    assert not tensors["other"].requires_grad
    torch.save({"table": table, "head": table[1:]}, path)
    assert refusal(path) == "head shares its memory with other weights or itself: save a clone of it"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w", torch.zeros(2, 2, dtype=torch.uint8), "w holds uint8 values"),
        ("w", torch.zeros(2, 2, dtype=torch.int8), "w holds int8 values"),
        ("w", torch.zeros(2).to(torch.float8_e5m2), "w holds float8_e5m2 values"),
        ("h.0.qweight", torch.zeros(2, 2, dtype=torch.int32), "h.0.qweight is of quantised weights"),
        ("h.0.SCB", torch.zeros(2), "h.0.SCB is of quantised weights"),
        ("h.0.weight.absmax", torch.zeros(2), "h.0.weight.absmax is of quantised weights"),
    ],
)
def test_quantised_weights(tmp_path, name, tensor, message):
    path = tmp_path / "ckpt.pt"
    torch.save({"v": torch.ones(2), name: tensor}, path)
    assert refusal(path) == f"{message}: {REAL}"


def test_weights_of_an_adapter_name_their_base(tmp_path):
    path, name = tmp_path / "weights.bin", "base_model.model.q_proj.lora_A.weight"
    torch.save({name: torch.ones(2, 2)}, path)
    adapter, merge = f"{name} is of an adapter, which is no model without", "merge_and_unload it into that, and"
    assert refusal(path) == f"{adapter} its base model: {merge} save the result"
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/llama"}')
    assert refusal(path) == f"{adapter} its base model, some/llama: {merge} save the result"
    (tmp_path / "adapter_config.json").write_text("{")
    assert refusal(path).startswith("adapter_config.json: not sound JSON: Expecting property name")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"GGUF\3\0\0\0", GGUF),
        ("a.pt", b"\x89HDF\r\n\x1a\n\0", f"a file of Keras or TensorFlow: {SAVE}"),
        ("tf_model.h5", b"any", f"a file of Keras or TensorFlow: {SAVE}"),
        ("bert_model.ckpt.index", b"any", f"a file of TensorFlow: {SAVE}"),
        ("bert_model.ckpt.data-00000-of-00001", b"any", f"a file of TensorFlow: {SAVE}"),
        ("saved_model.pb", b"any", f"a file of TensorFlow: {SAVE}"),
        ("flax_model.msgpack", b"\x81any", f"a file of Flax: {SAVE}"),
        ("model.onnx", b"\x08\x07", f"a file of ONNX: {SAVE}"),
    ],
)
def test_files_of_other_libraries(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(path) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", DEEPSPEED),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", DEEPSPEED),
        ("mp_rank_00_model_states.pt", DEEPSPEED),
        ("__0_0.distcp", DISTRIBUTED),
    ],
)
def test_parts_of_distributed_checkpoints(tmp_path, name, message):
    """Though torch can read them: a part of the weights may look like the whole."""
    path = tmp_path / name
    torch.save({"module": state_dict(ARGS), "model_args": ARGS}, path)
    assert refusal(path) == message


def test_no_file_and_folders(tmp_path):
    assert refusal(tmp_path / "none.pt") == "no such file"
    assert refusal(tmp_path) == "a folder with nothing in it"
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
        (b"some text", f"{NEITHER} b'some tex'"),
        (b"\x89PNG\r\n\x1a\n\0", rf"{NEITHER} b'\x89PNG\r\n\x1a\n'"),
        (b"x", f"{NEITHER} b'x'"),
        (pickle.dumps({"model": {}}), f"a pickle, but not by torch.save; {RESAVE}"),
        (b"PK\x03\x04", "cut short or damaged: a zip archive without a sound end; copy it again"),
        (b"\x80\x02}", f"a pickle, but not by torch.save; {RESAVE}"),
        (b"PK\x05\x06" + bytes(18), rf"{NEITHER} b'PK\x05\x06\x00\x00\x00\x00'"),
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
        ({}, f"{NO_TENSORS} none{STATE}"),
        ({"w": torch.zeros(2)}, f"{UNKNOWN} w"),
        ({"model": state_dict(ARGS), 3: 4}, NO_CONFIG),
        (state_dict(ARGS), NO_CONFIG),
        ({"model_args": ARGS}, f"{NO_TENSORS} model_args{STATE}"),
        ({"model_args": ARGS, "model": [torch.zeros(2)]}, f"{NO_TENSORS} model_args, model{STATE}"),
    ],
)
def test_the_wrong_content(tmp_path, content, message):
    path = tmp_path / "ckpt.pt"
    torch.save(content, path)
    assert refusal(path) == message
