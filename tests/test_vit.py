"""A ViT or a DINOv2 of transformers means to us what it means to transformers."""

from typing import Any

import pytest
import torch
import transformers as hf

from hesscore.checkpoints import load
from tests.checkpoints import refusal
from tests.oracle import assert_same, changed, made, saved

FIELDS: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 7,
    "image_size": 6,
    "patch_size": 3,
    "num_channels": 2,
}
KINDS = [(hf.ViTConfig, "ViT"), (hf.Dinov2Config, "Dinov2")]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


PIXELS = normal(3, 2, 6, 6)
CLASSES = {"pixel_values": PIXELS, "labels": torch.tensor([0, 2, 1])}


@pytest.mark.parametrize(("config", "name"), KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"qkv_bias": False}, {"layer_norm_eps": 0.1, "hidden_act": "relu"}, {"patch_size": 2, "num_channels": 1}],
    ids=str,
)
def test_classes_of_images(tmp_path, config, name, options):
    model = made(getattr(hf, f"{name}ForImageClassification"), config(**FIELDS | options, num_labels=3))
    pixels = PIXELS[:, : options.get("num_channels", 2)]
    assert_same(model, saved(model, tmp_path), CLASSES | {"pixel_values": pixels})


@pytest.mark.parametrize(("config", "name"), KINDS)
def test_a_number_for_each_image(tmp_path, config, name):
    model = made(getattr(hf, f"{name}ForImageClassification"), config(**FIELDS, num_labels=1))
    assert_same(model, saved(model, tmp_path), CLASSES | {"labels": normal(3)})


@pytest.mark.parametrize(("config", "name"), KINDS)
def test_a_bare_encoder_is_scored_by_its_output(tmp_path, config, name):
    model = made(getattr(hf, f"{name}Model"), config(**FIELDS))
    path = saved(model, tmp_path)
    reasons = {"ViT": "the pooler, which no head here uses", "Dinov2": "only used to train by masked patches"}
    assert set(load(path).left_out.values()) == {reasons[name]}
    assert_same(model, path, CLASSES | {"labels": normal(3, 5, 8)})


@pytest.mark.parametrize("labels", [3, 0])
def test_gated_feed_forward_parts(tmp_path, labels):
    config = hf.Dinov2Config(**FIELDS, use_swiglu_ffn=True, mlp_ratio=2, num_labels=3)
    model = made(hf.Dinov2ForImageClassification if labels else hf.Dinov2Model, config)
    path = saved(model, tmp_path)
    assert load(path).tensors["blocks.0.mlp.up.bias"].endswith("encoder.layer.0.mlp.weights_in.bias[16:32]")
    assert_same(model, path, CLASSES if labels else CLASSES | {"labels": normal(3, 5, 8)})


def test_a_head_for_masked_pixels_is_left_out(tmp_path):
    config = hf.ViTConfig(**FIELDS, encoder_stride=3)
    checkpoint = load(saved(made(hf.ViTForMaskedImageModeling, config), tmp_path))
    assert checkpoint.spec.objective == "hidden"
    assert {"decoder.0.weight", "decoder.0.bias", "vit.embeddings.mask_token"} <= set(checkpoint.left_out)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "model."])
def test_wrappers(tmp_path, prefix):
    model = made(hf.ViTForImageClassification, hf.ViTConfig(**FIELDS, num_labels=3))

    def wrapped(state):
        for name in list(state):
            state[prefix + name] = state.pop(name)

    assert_same(model, changed(saved(model, tmp_path), wrapped), CLASSES)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"image_size": [6, 9]}, "config.json: image_size: input should be a valid integer"),
        ({"patch_size": 4}, "no such architecture: image_size: 6 is not divisible by patch_size: 4"),
        ({"image_size": 9}, "vit.embeddings.position_embeddings has shape (1, 5, 8); its architecture asks for (1, 10"),
        ({"num_channels": 3}, "vit.embeddings.patch_embeddings.projection.weight has shape (8, 2, 3, 3); its archite"),
        ({"hidden_act": "quick_gelu"}, "config.json: hidden_act: quick_gelu is not one of "),
        ({"model_type": "deit"}, "config.json: model_type deit is not supported; with such tensors vit is"),
        ({"num_attention_heads": ...}, "config.json: num_attention_heads: field required"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, fields, said):
    path = saved(made(hf.ViTForImageClassification, hf.ViTConfig(**FIELDS, num_labels=3)), tmp_path)
    assert refusal(changed(path, **fields)).startswith(said)


def test_a_square_may_be_given_by_both_sides(tmp_path):
    model = made(hf.ViTForImageClassification, hf.ViTConfig(**FIELDS, num_labels=3))
    assert_same(model, changed(saved(model, tmp_path), image_size=[6, 6], patch_size=[3, 3]), CLASSES)


def test_tokens_that_are_not_supported_are_named(tmp_path):
    path = saved(made(hf.ViTForImageClassification, hf.ViTConfig(**FIELDS, num_labels=3)), tmp_path)
    changed(path, lambda state: state.update({"vit.embeddings.distillation_token": torch.zeros(1, 1, 8)}))
    assert refusal(path) == "not the tensors of its architecture; 1 unexpected: embeddings.distillation_token"
