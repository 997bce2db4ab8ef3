"""Checkpoints of every family with something wrong in them: described, or refused in one line; nothing else ever."""

import json
import random
import shutil
from time import monotonic
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hesscore import describe
from hesscore.errors import InputError
from tests import test_albert, test_bert, test_gpt2, test_gpt_neox, test_llama, test_vit
from tests.oracle import made, saved

MODELS = {
    "gpt2": lambda: made(hf.GPT2LMHeadModel, hf.GPT2Config(**test_gpt2.FIELDS)),
    "bert": lambda: made(hf.BertForMaskedLM, hf.BertConfig(**test_bert.FIELDS)),
    "roberta": lambda: made(hf.RobertaForSequenceClassification, hf.RobertaConfig(**test_bert.FIELDS)),
    "albert": lambda: made(hf.AlbertForMaskedLM, hf.AlbertConfig(**test_albert.NARROW)),
    "llama": lambda: made(
        hf.LlamaForCausalLM, hf.LlamaConfig(**test_llama.FIELDS, head_dim=16, rope_parameters=dict(test_llama.YARN))
    ),
    "qwen2": lambda: made(hf.Qwen2ForCausalLM, hf.Qwen2Config(**test_llama.FIELDS, use_sliding_window=True)),
    "gpt_neox": lambda: made(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**test_gpt_neox.FIELDS)),
    "vit": lambda: made(hf.ViTForImageClassification, hf.ViTConfig(**test_vit.FIELDS)),
    "dinov2": lambda: made(hf.Dinov2Model, hf.Dinov2Config(**test_vit.FIELDS)),
}
VALUES: list[Any] = [0, 1, 2, 7, -1, 2.5, 1e308, 10**12, 10**30, True, None, "", "x", "gelu", [], [0], [1, 1], {}]
ROUNDS = 60


@pytest.fixture(scope="module", params=MODELS)
def sound(request, tmp_path_factory):
    return saved(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture
def copy(sound, tmp_path, monkeypatch):
    """One to spoil, and as often as one likes."""
    monkeypatch.setattr(describe, "_speed", lambda dtype: 1e9)

    def again():
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return shutil.copytree(sound, tmp_path / "copy")

    return again


def looked_at(folder):
    """Whether it was refused; in one line, quickly, with nothing written."""
    before, started = sorted(folder.iterdir()), monotonic()
    try:
        describe.describe(folder)
    except InputError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 1000
        return True
    finally:
        assert sorted(folder.iterdir()) == before
        assert monotonic() - started < 10
    return False


def test_it_is_sound(copy):
    assert not looked_at(copy())


def test_other_fields(copy):
    rng, refused = random.Random(0), 0
    for _ in range(ROUNDS):
        folder = copy()
        config = json.loads((folder / "config.json").read_text())
        for name in rng.sample(sorted(config), rng.choice([1, 1, 2])):
            config[name] = rng.choice(VALUES)
        if rng.random() < 0.1:
            del config[rng.choice(sorted(config))]
        (folder / "config.json").write_text(json.dumps(config))
        refused += looked_at(folder)
    assert refused > 5


def test_other_tensors(copy):
    rng, refused = random.Random(1), 0
    for _ in range(ROUNDS):
        folder = copy()
        state = load_file(folder / "model.safetensors")
        name = rng.choice(sorted(state))
        tensor = state.pop(name)
        state |= rng.choice(
            [
                {},
                {name: tensor.flatten()},
                {name: tensor[None]},
                {name: tensor[:0]},
                {name: tensor.flatten()[0].clone()},
                {name: torch.cat([tensor, tensor])},
                {name: tensor.flip(0).mT.contiguous() if tensor.ndim > 1 else tensor[1:]},
                {name: tensor.to(torch.int64)},
                {name: torch.full_like(tensor, torch.nan)},
                {name: tensor.bfloat16()},
                {name + "x": tensor},
                {name: tensor, name.replace("0", "999999999"): tensor.clone()},
                {name: tensor, "module." + name: tensor.clone()},
            ]
        )
        save_file(state, folder / "model.safetensors")
        refused += looked_at(folder)
    assert refused > 5


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_other_bytes(copy, file):
    rng = random.Random(2)
    for _ in range(ROUNDS // 2):
        folder = copy()
        content = bytearray((folder / file).read_bytes())
        for _ in range(rng.choice([1, 3])):
            content[rng.randrange(min(len(content), 3000))] = rng.randrange(256)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        (folder / file).write_bytes(content)
        looked_at(folder)
