"""A GPT-2 of transformers means to us what it means to transformers."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2ForTokenClassification, GPT2LMHeadModel

from hesscore.checkpoints import load
from tests.checkpoints import refusal
from tests.oracle import assert_same, changed, made, saved

FIELDS: dict[str, Any] = {"vocab_size": 13, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2}
IDS = torch.tensor([[1, 4, 4, 0, 9, 10], [7, 2, 3, 12, 12, 12]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
def test_next_tokens(tmp_path, activation, tied):
    config = GPT2Config(**FIELDS, activation_function=activation, tie_word_embeddings=tied)
    model = made(GPT2LMHeadModel, config)
    labels = IDS.masked_fill(MASK == 0, -100)
    assert_same(model, saved(model, tmp_path), {"input_ids": IDS, "attention_mask": MASK, "labels": labels})


def test_classes_of_tokens(tmp_path):
    model = made(GPT2ForTokenClassification, GPT2Config(**FIELDS, num_labels=3))
    labels = torch.tensor([[0, 1, 2, 0, -100, 1], [2, 2, 1, -100, -100, -100]])
    assert_same(model, saved(model, tmp_path), {"input_ids": IDS, "attention_mask": MASK, "labels": labels})


@pytest.mark.parametrize("labels", [torch.tensor([2, 0]), torch.tensor([0.3, -1.2], dtype=torch.float64)])
def test_a_class_or_a_number_from_the_last_token(tmp_path, labels):
    outputs = 1 if labels.is_floating_point() else 3
    model = made(GPT2ForSequenceClassification, GPT2Config(**FIELDS, num_labels=outputs, pad_token_id=12))
    assert_same(model, saved(model, tmp_path), {"input_ids": IDS, "attention_mask": MASK, "labels": labels})


def test_the_last_token_is_the_rightmost_that_is_not_padding_by_its_number(tmp_path):
    """As transformers has it: whatever ``attention_mask`` says, and also where padding stands inside."""
    config = GPT2Config(**FIELDS, num_labels=3, pad_token_id=10)
    model = made(GPT2ForSequenceClassification, config)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([2, 0])}
    assert_same(model, saved(model, tmp_path), batch)
    assert "pad_token_id is -1" in refusal(changed(tmp_path, pad_token_id=-1))
    assert load(tmp_path, "hidden").spec.pad_token is None


@pytest.mark.parametrize(("alias", "other"), [("num_attention_heads", 4), ("num_hidden_layers", 1), ("hidden_size", 9)])
def test_two_names_of_one_field_may_not_differ(tmp_path, alias, other):
    """transformers takes the one that comes last."""
    path = saved(made(GPT2LMHeadModel, GPT2Config(**FIELDS)), tmp_path)
    assert refusal(changed(path, **{alias: other})).startswith(f"config.json: {alias} is {other}, and n_")


def test_either_name_of_a_field_will_do(tmp_path):
    model = made(GPT2LMHeadModel, GPT2Config(**FIELDS))
    path = changed(saved(model, tmp_path), n_head=..., num_attention_heads=2, n_layer=..., num_hidden_layers=2)
    assert_same(model, path, {"input_ids": IDS, "labels": IDS})
