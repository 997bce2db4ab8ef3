"""Folders: which files hold the weights, and one clear line where none does, or not all of them."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from hesscore.checkpoints.jsonfiles import MOST_BYTES
from hesscore.checkpoints.reading import read
from tests.checkpoints import refusal
from tests.test_statedicts import OPTIMIZER

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4), "c.weight": torch.zeros(2, 2)}
MERGE = "merge_and_unload it into that, and save the result"
DEEPSPEED = "a part of a DeepSpeed checkpoint: put it together with the zero_to_fp32.py beside it, and name the result"
DISTRIBUTED = (
    "a part of a distributed checkpoint: put it together with "
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER model.pt, and name the result"
)
SAVE = "save the model with torch.save or safetensors"
NAME = "name one with model.safetensors or the like, or a file"


def save(state, path):
    """In the format that its name asks for."""
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)


def sharded(folder, kind, weight_map=None):
    """``STATE`` in two files, with their index."""
    stem, suffix = kind.rsplit(".", 1)
    first, second = (f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2))
    save({name: STATE[name] for name in ("a.weight", "b.weight")}, folder / first)
    save({"c.weight": STATE["c.weight"]}, folder / second)
    weight_map = weight_map or {"a.weight": first, "b.weight": first, "c.weight": second}
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {"total_size": 56}, "weight_map": weight_map}))
    return first, second


def assert_state(tensors, state=STATE):
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


# --- what is read ---


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "any.safetensors", "any.pt", "any.pth"])
def test_a_folder_with_one_file(tmp_path, name):
    save(STATE, tmp_path / name)
    (tmp_path / "config.json").write_text('{"model_type": "any", "eps": 1e-5}')
    (tmp_path / "tokenizer.json").write_text("{}")
    stored = read(tmp_path)
    assert_state(stored.tensors)
    assert (stored.config, stored.folder) == ({"model_type": "any", "eps": 1e-5}, tmp_path)
    content = (tmp_path / name).read_bytes()
    assert (stored.size, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_the_config_beside_a_file_is_read(tmp_path):
    save(STATE, tmp_path / "any.pt")
    assert read(tmp_path / "any.pt").config is None
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read(tmp_path / "any.pt").config == {"a": 1}


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_shards(tmp_path, kind):
    shards = sharded(tmp_path, kind)
    save({"a.weight": torch.ones(1)}, tmp_path / "model-00003-of-00002.safetensors")  # a stray one
    stored = read(tmp_path)
    assert_state(stored.tensors)
    assert [file.path.name for file in stored.files] == list(shards)
    assert stored.size == sum((tmp_path / name).stat().st_size for name in shards)
    lines = "".join(f"{name} {hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}\n" for name in shards)
    assert stored.sha256 == hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize("shards", [False, True])
def test_what_transformers_saves(tmp_path, shards):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path, max_shard_size="4KB" if shards else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is shards
    stored = read(tmp_path)
    assert_state(stored.tensors, {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    assert stored.config is not None and stored.config["n_embd"] == 8


def test_files_are_looked_for_in_the_order_of_transformers(tmp_path):
    other = {"other": torch.ones(2)}
    for name in "model.bin", "zzz.pt":
        save(other, tmp_path / name)
    sharded(tmp_path, "pytorch_model.bin")
    assert_state(read(tmp_path).tensors)
    save(other, tmp_path / "pytorch_model.bin")
    assert_state(read(tmp_path).tensors, other)
    sharded(tmp_path, "model.safetensors")
    assert_state(read(tmp_path).tensors)
    save(other, tmp_path / "model.safetensors")
    assert_state(read(tmp_path).tensors, other)


def test_what_scripts_save_beside_the_weights_is_no_weight(tmp_path):
    """Tokens of nanoGPT have the suffix of weights."""
    save(STATE, tmp_path / "ckpt.bin")
    for name in "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state_0.pth":
        torch.save({"a": torch.ones(2)}, tmp_path / name)
    (tmp_path / "train.bin").write_bytes(bytes(range(100)))
    (tmp_path / "folder.pt").mkdir()
    save({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    torch.save(OPTIMIZER, tmp_path / "mp_rank_00_model_states.pt")
    assert_state(read(tmp_path).tensors)
    save(STATE, tmp_path / "a.pt")
    (tmp_path / "c.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refusal(tmp_path) == "a folder with several files of weights, a.pt, c.bin, ckpt.bin: name one of them"


def test_the_format_goes_by_content(tmp_path):
    save_file(STATE, tmp_path / "pytorch_model.bin")
    assert_state(read(tmp_path).tensors)
    torch.save(STATE, tmp_path / "model.safetensors")
    assert_state(read(tmp_path).tensors)


def test_links_to_files_elsewhere_are_followed(tmp_path):
    """The cache of the Hugging Face hub is made of them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save(STATE, tmp_path / "blobs" / "model.safetensors")
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to(tmp_path / "blobs" / "model.safetensors")
    assert_state(read(tmp_path / "snapshot").tensors)
    (tmp_path / "blobs" / "model.safetensors").unlink()
    assert refusal(tmp_path / "snapshot") == "model.safetensors: no such file"


# --- shards and their index ---


def test_what_is_wrong_with_a_file_names_it(tmp_path):
    _, second = sharded(tmp_path, "model.safetensors")
    (tmp_path / second).write_bytes(b"")
    assert refusal(tmp_path) == f"{second}: empty"
    (tmp_path / second).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refusal(tmp_path) == f"{second}: a Git LFS pointer, not the file that it stands for: run git lfs pull"
    save({"c.weight": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / second)
    assert refusal(tmp_path) == f"{second}: c.weight holds int8 values: save it in float32, as weights are real numbers"
    (tmp_path / second).unlink()
    (tmp_path / second).mkdir()
    assert refusal(tmp_path) == f"{second}: a folder with nothing in it"
    (tmp_path / second).rmdir()
    os.mkfifo(tmp_path / second)
    assert refusal(tmp_path) == f"{second}: not a regular file"


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_missing_shards_are_named(tmp_path, kind):
    first, second = sharded(tmp_path, kind)
    (tmp_path / second).unlink()
    said = f"{kind}.index.json: 1 of its 2 files missing: {second}; copy them as well"
    assert refusal(tmp_path) == said
    (tmp_path / first).unlink()
    assert refusal(tmp_path) == f"{kind}.index.json: 2 of its 2 files missing: {first}, {second}; copy them as well"


def test_tensors_that_the_index_promises_are_there(tmp_path):
    first, second = sharded(tmp_path, "model.safetensors")
    sharded(tmp_path, "model.safetensors", {"a.weight": first, "d.weight": second})
    assert refusal(tmp_path) == f"{second}: lacks d.weight, which is there by the index; copy it again"
    sharded(tmp_path, "model.safetensors", {"a.weight": second, "b.weight": first})  # it is there, but in the other
    assert refusal(tmp_path) == f"{second}: lacks a.weight, which is there by the index; copy it again"


def test_a_name_in_two_shards(tmp_path):
    first, second = sharded(tmp_path, "model.safetensors")
    save({"c.weight": torch.zeros(2, 2), "b.weight": torch.ones(4)}, tmp_path / second)
    assert refusal(tmp_path) == f"b.weight is in {first} and in {second}: keep one"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "a/"])
def test_an_index_leads_to_no_other_folder(tmp_path, name):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for target in tmp_path, folder, folder / "sub":
        save(STATE, target / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "aside.bin")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    said = f"model.safetensors.index.json: names {name}: only files of its own folder are read"
    assert refusal(folder) == said


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    said = "model.safetensors.index.json: has no weight_map, which says the file of each tensor"
    assert refusal(tmp_path) == said


def test_an_index_may_name_what_no_file_can_be(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for name in "\0", "a\nb", "n" * 1000, "\ud800", "":
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert refusal(tmp_path).startswith("model.safetensors.index.json: 1 of its 1 files missing: ")


# --- config.json ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"[1]", "its JSON is of type list, not an object with named fields"),
        (b"3", "its JSON is of type int, not an object with named fields"),
        (b"{'a': 1}", "not sound JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"a": 1', "not sound JSON: Expecting ',' delimiter: line 1 column 8 (char 7)"),
        (b'{"a": NaN}', "not sound JSON: NaN is no number of JSON"),
        (b'{"a": [-Infinity]}', "not sound JSON: -Infinity is no number of JSON"),
        (b'{"a": 1e999}', "not sound JSON: 1e999 is beyond all floats"),
        (b'{"a": 1, "a": 2}', "not sound JSON: a is there twice"),
        (
            b'{"a": ' + b"9" * 5000 + b"}",
            "not sound JSON: Exceeds the limit (4300 digits) for integer string conversion",
        ),
        (b'{"a": "\xff"}', "not UTF-8 text: byte 7 is 0xff"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 text: byte 0 is 0xff"),
        (b'{"a":' * 10**5, "not sound: its JSON is nested too deeply"),
        (b'{"a":' + b"[" * 10**6, "not sound: its JSON is nested too deeply"),
    ],
)
def test_a_config_that_is_no_object_of_json(tmp_path, content, message):
    save(STATE, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(content)
    for path in tmp_path, tmp_path / "model.safetensors":
        assert refusal(path).startswith(f"config.json: {message}")


def test_a_config_that_is_too_large(tmp_path):
    save(STATE, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(b'{"a": 1}' + b" " * MOST_BYTES)
    assert refusal(tmp_path) == f"config.json: {MOST_BYTES + 8} bytes of JSON: no more than {MOST_BYTES} are read"


def test_a_config_of_quantised_weights(tmp_path):
    save(STATE, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    said = "config.json: has a quantization_config, so the weights are quantised"
    assert refusal(tmp_path) == f"{said}: save it in float32, as weights are real numbers"
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    assert_state(read(tmp_path).tensors)


# --- folders without weights ---


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "a folder with nothing in it"),
        (
            ["tokenizer.json", "tokenizer_config.json"],
            f"a folder without weights, only tokenizer.json, tokenizer_config.json: {NAME}",
        ),
        (["train.bin", "val.bin"], f"a folder without weights, only train.bin, val.bin: {NAME}"),
        (
            ["tf_model.h5", "config.json"],
            f"a folder without whole weights; tf_model.h5 is a file of Keras or TensorFlow: {SAVE}",
        ),
        (["saved_model.pb"], f"a folder without whole weights; saved_model.pb is a file of TensorFlow: {SAVE}"),
        (["flax_model.msgpack"], f"a folder without whole weights; flax_model.msgpack is a file of Flax: {SAVE}"),
        (["latest", "global_step9"], f"a folder without whole weights; global_step9 is {DEEPSPEED}"),
        (
            ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"],
            f"a folder without whole weights; mp_rank_00_model_states.pt is {DEEPSPEED}",
        ),
        ([".metadata", "__0_0.distcp"], f"a folder without whole weights; __0_0.distcp is {DISTRIBUTED}"),
    ],
)
def test_folders_without_weights(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_text("{}")
    assert refusal(tmp_path) == message


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ({"base_model_name_or_path": "some/llama"}, "its base model, some/llama"),
        ({"base_model_name_or_path": None}, "its base model"),
        ({}, "its base model"),
    ],
)
def test_a_folder_of_an_adapter_names_its_base(tmp_path, config, base):
    save({"q.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert refusal(tmp_path) == f"a folder of an adapter, which is no model without {base}: {MERGE}"
    save(STATE, tmp_path / "model.safetensors")
    assert_state(read(tmp_path).tensors)
