"""A GPT-NeoX of transformers means to us what it means to transformers."""

from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    GPTNeoXForTokenClassification,
)

from hesscore.checkpoints import load
from tests.checkpoints import refusal
from tests.oracle import assert_same, changed, made, saved

FIELDS: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.tensor([[1, 4, 4, 0, 9, 10], [7, 2, 3, 12, 12, 12]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_parallel_residual": False},
        {"attention_bias": False},
        {"tie_word_embeddings": True},
        {"hidden_act": "gelu_fast"},
        {"layer_norm_eps": 0.1},
        {"rotary_pct": 1.0, "rotary_emb_base": 50.0},
        {"rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_gpt_neox(tmp_path, options):
    model = made(GPTNeoXForCausalLM, GPTNeoXConfig(**FIELDS | options))
    assert_same(model, saved(model, tmp_path), BATCH)


@pytest.mark.parametrize("kept", [True, False])
def test_the_older_names_of_the_rotation_and_their_defaults(tmp_path, kept):
    model = made(GPTNeoXForCausalLM, GPTNeoXConfig(**FIELDS))
    older = {"rotary_pct": 0.25, "rotary_emb_base": 10000} if kept else {}
    assert_same(model, changed(saved(model, tmp_path), rope_parameters=..., **older), BATCH)


def test_classes_of_sequences_and_of_tokens(tmp_path):
    config = GPTNeoXConfig(**FIELDS, num_labels=4, pad_token_id=12)
    model = made(GPTNeoXForSequenceClassification, config)
    assert_same(model, saved(model, tmp_path / "sequence"), BATCH | {"labels": torch.tensor([3, 0])})
    model = made(GPTNeoXForTokenClassification, config)
    labels = (IDS % 4).masked_fill(MASK == 0, -100)
    assert_same(model, saved(model, tmp_path / "token"), BATCH | {"labels": labels})


def test_buffers_of_older_files_are_left_out(tmp_path):
    model = made(GPTNeoXForCausalLM, GPTNeoXConfig(**FIELDS))

    def with_buffers(state):
        state["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 64, 64).tril().bool()
        state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
        state["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(1)

    path = changed(saved(model, tmp_path), with_buffers)
    assert len(load(path).left_out) == 3
    assert_same(model, path, BATCH)


def test_the_place_of_an_interleaved_part_is_said(tmp_path):
    path = saved(made(GPTNeoXForCausalLM, GPTNeoXConfig(**FIELDS)), tmp_path)
    key = "gpt_neox.layers.1.attention.query_key_value.weight[1 of 3 for each head]"
    assert load(path).tensors["blocks.1.attn.k.weight"] == key
    assert refusal(changed(path, model_type="gpt_neox_japanese")).startswith(
        "config.json: model_type gpt_neox_japanese is not supported; with such tensors gpt_neox is"
    )
