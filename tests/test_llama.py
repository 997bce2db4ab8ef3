"""A Llama, Mistral or Qwen2 of transformers means to us what it means to transformers."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hesscore.errors import InputError
from hesscore.problem import open_problem
from tests.checkpoints import refusal
from tests.oracle import assert_same, changed, in_double, made, saved

FIELDS: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.tensor([[1, 4, 4, 0, 9, 10, 5], [7, 2, 3, 12, 12, 12, 12]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 50.0,
}
LLAMA3_8K = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
"""Fast features are kept, slow ones scaled, and some lie between."""
YARN_4K = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": 3},
        {"head_dim": 6},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 50.0}},
        {"head_dim": 16, "rope_parameters": LLAMA3},
        {"head_dim": 16, "rope_parameters": YARN},
        {"head_dim": 64, "max_position_embeddings": 65536, "rope_parameters": LLAMA3_8K},
        {"head_dim": 64, "max_position_embeddings": 16384, "rope_parameters": YARN_4K},
        {"head_dim": 64, "max_position_embeddings": 16384, "rope_parameters": {**YARN_4K, "truncate": False}},
        {"head_dim": 16, "rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 2.0, "truncate": False}},
        {"head_dim": 16, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}},
        {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.3}},
    ],
    ids=str,
)
def test_llama(tmp_path, options):
    model = made(LlamaForCausalLM, LlamaConfig(**FIELDS | options))
    assert_same(model, saved(model, tmp_path), BATCH)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_mistral_sees_no_further_than_its_window(tmp_path, window):
    model = made(MistralForCausalLM, MistralConfig(**FIELDS, sliding_window=window))
    assert_same(model, saved(model, tmp_path), BATCH)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 28},
    ],
    ids=str,
)
def test_qwen2(tmp_path, options):
    model = made(Qwen2ForCausalLM, Qwen2Config(**FIELDS | options))
    assert_same(model, saved(model, tmp_path), BATCH)


def test_classes_of_sequences_and_of_tokens(tmp_path):
    config = LlamaConfig(**FIELDS, num_labels=4, pad_token_id=12)
    model = made(LlamaForSequenceClassification, config)
    assert_same(model, saved(model, tmp_path / "sequence"), BATCH | {"labels": torch.tensor([3, 0])})
    model = made(LlamaForTokenClassification, config)
    labels = (IDS % 4).masked_fill(MASK == 0, -100)
    assert_same(model, saved(model, tmp_path / "token"), BATCH | {"labels": labels})


def test_the_older_way_to_say_the_rotation(tmp_path):
    model = made(LlamaForCausalLM, LlamaConfig(**FIELDS, head_dim=16, rope_parameters=dict(LLAMA3)))
    path = saved(model, tmp_path)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    (path / "config.json").write_text(json.dumps(config))
    assert_same(model, path, BATCH)


@pytest.fixture
def small(tmp_path):
    return saved(made(LlamaForCausalLM, LlamaConfig(**FIELDS)), tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"model_type": "gemma2"},
            "config.json: model_type gemma2 is not supported; with such tensors llama, mistral, ",
        ),
        (
            {"model_type": ...},
            "config.json has no model_type, so it is not clear which of llama, ",
        ),
        ({"pretraining_tp": 2}, "config.json: pretraining_tp: input should be 1"),
        ({"hidden_act": "quick_gelu"}, "config.json: hidden_act: quick_gelu is not one of gelu, "),
        ({"num_attention_heads": ...}, "config.json: num_attention_heads: field required"),
        ({"num_attention_heads": 5, "head_dim": ...}, "no such architecture: d_model: 12 is not divisible by heads: 5"),
        ({"num_attention_heads": 6}, "layers.0.self_attn.q_proj.weight has shape (12, 12); its architecture asks for "),
        ({"head_dim": 3, "num_attention_heads": 4}, "no such architecture: positions: rotary needs an even head width"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "config.json: partial_rotary_factor is not 1, which ",
        ),
        ({"rope_parameters": {"rope_theta": 1.0}}, "config.json: rope_parameters: rope_theta: input should be greater"),
        ({"auto_map": {"AutoModel": "x.y"}}, "config.json: auto_map names code of its own, so what the model computes"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "config.json: rope_parameters: rope_type: input should be "),
        ({"rope_parameters": {"rope_type": "linear"}}, "config.json: rope_parameters: linear needs a factor"),
        ({"rope_parameters": {"mrope_section": [1]}}, "config.json: rope_parameters: unknown field mrope_section"),
        (
            {"rope_parameters": dict(LLAMA3), "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "config.json: rope_parameters: rope_type is linear in one place and llama3 in another: keep one",
        ),
        (
            {"rope_parameters": dict(LLAMA3), "original_max_position_embeddings": 4},
            "config.json: rope_parameters: original_max_position_embeddings is 4 in one place and ",
        ),
        (
            {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 10000.0},
            "config.json: rope_parameters: rope_theta is 10000.0 in one place and 500.0 in another: keep one",
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(small, fields, said):
    assert refusal(changed(small, **fields)).removeprefix("model.").startswith(said)


def test_missing_surplus_and_bad_tensors(small):
    name = "model.layers.1.self_attn.k_proj.weight"

    def with_bias(state):
        state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(12)

    assert "1 unexpected: layers.0.self_attn.q_proj.bias" in refusal(changed(small, with_bias))
    assert f"1 missing: {name.removeprefix('model.')}" in refusal(
        changed(small, lambda state: (state.pop(name), state.pop("model.layers.0.self_attn.q_proj.bias")))
    )


def test_sequences_beyond_the_positions_are_refused(tmp_path):
    """Where the scaling is dynamic, transformers turns them otherwise."""
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 50.0}
    model = made(LlamaForCausalLM, LlamaConfig(**FIELDS, rope_parameters=rope))
    path = saved(model, tmp_path)
    np.savez(tmp_path / "long.npz", input_ids=np.arange(65)[None] % 13)
    with pytest.raises(InputError, match="sequences of 65 tokens, but the model has 64 positions: cut them"):
        open_problem(path, tmp_path / "long.npz")
    np.savez(tmp_path / "whole.npz", input_ids=np.arange(64)[None] % 13)
    ids = torch.arange(64)[None] % 13
    with in_double():
        right = float(model(input_ids=ids, labels=ids).loss)
    assert float(open_problem(path, tmp_path / "whole.npz").curvature().loss) == pytest.approx(right, rel=1e-12)


def test_as_many_layers_as_there_are_kinds_of_them(tmp_path):
    """Refused before anything of that size is made."""
    model = made(Qwen2ForCausalLM, Qwen2Config(**FIELDS, use_sliding_window=True, sliding_window=3))
    path = changed(saved(model, tmp_path), num_hidden_layers=10**12)
    assert refusal(path).startswith("config.json: layer_types: only windows in all layers from one on are supported")
