"""A ViT of timm means to us what it means to timm."""

import json
import sys
from types import ModuleType

import pytest
import torch

from hesscore.checkpoints import load
from tests.checkpoints import refusal
from tests.oracle import assert_same, randomised
from tests.test_vit import CLASSES, normal

SIZES = {"img_size": 6, "patch_size": 3, "in_chans": 2, "embed_dim": 8, "depth": 2, "num_heads": 2, "mlp_ratio": 1.5}


class Words(type):
    """The type of a class that has any attribute: its own name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Anything(ModuleType):
    """A module with a class of any name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Words(name, (), {})


@pytest.fixture(scope="module")
def vision_transformer():
    """timm imports torchvision, of which its models use nothing."""
    parts = [
        "",
        ".transforms",
        ".transforms.functional",
        ".datasets",
        ".datasets.folder",
        ".models",
        ".ops",
        ".ops.misc",
    ]
    stubs = {f"torchvision{part}": Anything(f"torchvision{part}") for part in parts}
    stubs["torchvision"].transforms = stubs["torchvision.transforms"]  # type: ignore[attr-defined]
    stubs["torchvision.transforms"].functional = stubs["torchvision.transforms.functional"]  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        from timm.layers import set_fused_attn
        from timm.models.vision_transformer import VisionTransformer

        set_fused_attn(False)
        yield VisionTransformer


def saved(model, folder, **config):
    torch.save(model.state_dict(), folder / "model.pth")
    (folder / "config.json").write_text(json.dumps({"model_args": {"num_heads": 2}} | config))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": False},
        {"init_values": 0.5},
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "avg", "fc_norm": False, "class_token": False},
    ],
    ids=str,
)
def test_classes_of_images(tmp_path, vision_transformer, options):
    model = randomised(vision_transformer(**SIZES | options, num_classes=3))
    assert_same(model, saved(model, tmp_path), CLASSES, save=saved)


def test_a_mean_of_the_patches_after_the_norm_is_told_by_the_config(tmp_path, vision_transformer):
    model = randomised(vision_transformer(**SIZES, num_classes=3, global_pool="avg", fc_norm=False))

    def save(model, folder):
        return saved(model, folder, global_pool="avg")

    assert_same(model, save(model, tmp_path), CLASSES, save=save)


def test_a_bare_encoder(tmp_path, vision_transformer):
    model = randomised(vision_transformer(**SIZES, num_classes=0))
    assert_same(model, saved(model, tmp_path), CLASSES | {"labels": normal(3, 5, 8)}, save=saved)


@pytest.mark.parametrize(
    ("architecture", "heads"),
    [("vit_tiny_patch16_224", 3), ("deit_small_patch16_224", 6), ("vit_base_patch32_384", 12)],
)
def test_heads_of_standard_models(tmp_path, vision_transformer, architecture, heads):
    model = vision_transformer(**SIZES | {"embed_dim": 24, "num_heads": heads}, num_classes=3)
    torch.save(model.state_dict(), tmp_path / "model.pth")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture, "num_classes": 3}))
    assert load(tmp_path).spec.heads == heads


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ({}, {"model_args": {}}, "shapes alone do not tell its heads: put a config.json beside it with "),
        ({}, {"model_args": {"num_heads": 3}}, "no such architecture: d_model: 8 is not divisible by heads: 3"),
        ({}, {"model_args": {"num_heads": 2, "act_layer": "relu"}}, "config.json: model_args: unknown field act_layer"),
        ({}, {"global_pool": "map"}, "config.json: global_pool map is not supported, only token and avg are"),
        (
            {},
            {"architecture": "vit_base_patch16_quickgelu"},
            "config.json: architecture vit_base_patch16_quickgelu: ",
        ),
        ({"reg_tokens": 2}, {}, "pos_embed has 7 positions, which are no square of patches and a class token"),
        ({"no_embed_class": True}, {}, "pos_embed has 4 positions, which are no square of patches and a class token"),
        ({"qk_norm": True}, {}, "not the tensors of its architecture; 8 unexpected: blocks.0.attn.q_norm.weight, "),
        (
            {"pre_norm": True},
            {},
            "not the tensors of its architecture; 1 missing: patch_embed.proj.bias; 2 ",
        ),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, vision_transformer, options, config, said):
    model = vision_transformer(**SIZES | options, num_classes=3)
    assert refusal(saved(model, tmp_path, **config)).startswith(said)
