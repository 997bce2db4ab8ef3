"""Every field of every config of transformers, set to other values: honoured, refused in one line, or of no account."""

from typing import Any

import pytest
import torch
import transformers as hf

from hesscore.chain import Point
from hesscore.checkpoints import load
from hesscore.errors import InputError
from hesscore.inputs.arrays import of_arrays
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model as wired
from tests import test_albert, test_bert, test_gpt2, test_gpt_neox, test_llama, test_vit
from tests.oracle import in_double, made, outputs, saved

IDS, MASK = test_bert.IDS, test_bert.MASK
TEXT = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
CLASSES = TEXT | {"labels": torch.tensor([0, 1])}
IMAGES = {"pixel_values": test_vit.PIXELS, "labels": torch.tensor([0, 1, 1])}

GPT2, BERT, ALBERT = test_gpt2.FIELDS | {"n_positions": 12}, test_bert.FIELDS, test_albert.NARROW
LLAMA, NEOX, VIT = test_llama.FIELDS, test_gpt_neox.FIELDS, test_vit.FIELDS
MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, torch.Tensor]]] = {
    "GPT2LMHeadModel": (hf.GPT2Config, GPT2, TEXT),
    "GPT2ForSequenceClassification": (hf.GPT2Config, GPT2, CLASSES),
    "BertForMaskedLM": (hf.BertConfig, BERT, TEXT),
    "BertForSequenceClassification": (hf.BertConfig, BERT, CLASSES),
    "RobertaForMaskedLM": (hf.RobertaConfig, BERT, TEXT),
    "RobertaForSequenceClassification": (hf.RobertaConfig, BERT, CLASSES),
    "AlbertForMaskedLM": (hf.AlbertConfig, ALBERT, TEXT),
    "AlbertForSequenceClassification": (hf.AlbertConfig, ALBERT, CLASSES),
    "LlamaForCausalLM": (hf.LlamaConfig, LLAMA, TEXT),
    "LlamaForSequenceClassification": (hf.LlamaConfig, LLAMA, CLASSES),
    "MistralForCausalLM": (hf.MistralConfig, LLAMA, TEXT),
    "Qwen2ForCausalLM": (hf.Qwen2Config, LLAMA, TEXT),
    "GPTNeoXForCausalLM": (hf.GPTNeoXConfig, NEOX, TEXT),
    "ViTForImageClassification": (hf.ViTConfig, VIT, IMAGES),
    "Dinov2ForImageClassification": (hf.Dinov2Config, VIT, IMAGES),
}
ACTIVATIONS = ("relu", "gelu_new", "silu", "quick_gelu", "tanh", "gelu_pytorch_tanh", "laplace", "mish")
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


def others(name: str, value: object) -> list[Any]:
    """Other values of a field."""
    named: dict[str, list[Any]] = {
        "return_dict": [],  # the form of what transformers returns
        "hidden_act": list(ACTIVATIONS),
        "activation_function": list(ACTIVATIONS),
        "problem_type": ["multi_label_classification"],
        "layer_types": [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]],
        "rope_parameters": [rope | {"rope_theta": 10.0} for rope in ROPES],
    }
    if name in named:
        return named[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({value + 1, 2 * value, 1, 3} - {value})
    if isinstance(value, float):
        return [3 * value + 0.1, 0.0]
    return [2] if value is None else []


@pytest.mark.parametrize("name", MODELS)
def test_no_field_is_passed_over(name, tmp_path):
    config, fields, batch = MODELS[name]
    fields = fields | {"pad_token_id": 1}
    same = refused = 0
    for field, value in sorted(config(**fields).to_dict().items()):
        for other in others(field, value):
            folder = tmp_path / str(same + refused)
            try:
                model = made(getattr(hf, name), config(**fields | {field: other}))
                with in_double():
                    model(**batch)
                saved(model, folder)
            except Exception:  # of every kind there is: transformers has no such model, or it takes no such data
                continue
            try:
                checkpoint = load(folder)
                data = of_arrays(checkpoint.spec, batch)
            except InputError as error:
                assert str(error).isprintable()
                refused += 1
                continue
            same += 1
            if checkpoint.spec.objective == "hidden":  # several labels at once: its head is left out
                assert other == "multi_label_classification"
                continue
            constants = inputs(checkpoint.spec, data.data, data.target, data.keep, segments=data.segments)
            weights = {leaf: weight.double() for leaf, weight in checkpoint.parameters.items()}
            ours = float(Point(wired(checkpoint.spec), weights | constants).output)
            theirs = outputs(model, checkpoint.spec, batch)[1].item()
            assert ours == pytest.approx(theirs, rel=1e-9), (field, other)
    assert same > 10
    assert refused > 2
