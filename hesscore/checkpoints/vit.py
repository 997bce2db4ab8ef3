"""ViT as transformers saves it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hesscore.checkpoints.config import Activation, Config, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, linear, patched, reshaped
from hesscore.checkpoints.reading import Stored
from hesscore.spec import Size, Spec
from hesscore.wiring.names import Named

BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.q": "attention.attention.query",
    "attn.k": "attention.attention.key",
    "attn.v": "attention.attention.value",
    "attn.o": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}


def _side(size: object) -> object:
    """The side of a square."""
    return size[0] if isinstance(size, list) and len(size) == 2 and size[0] == size[1] else size


Square = Annotated[Size, BeforeValidator(_side)]
"""A side, which may be given twice: only squares are supported."""


class ViTConfig(Config):
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    hidden_act: Activation = "gelu"
    layer_norm_eps: float = Field(default=1e-12, ge=0)
    image_size: Square
    patch_size: Square
    num_channels: Size = 3
    qkv_bias: bool = True


class ViT(Family):
    """LayerNorm before each part, a class token before the patches, and learned positions."""

    name = "ViT"
    bases = ("vit.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return numbered(names, r"encoder\.layer\.(\d+)\.layernorm_before\.weight") > 0

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, ViTConfig, ("vit",))
        loss, labels = headed(content, config)
        return architecture(
            d_model=config.hidden_size,
            d_ff=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            norm_eps=config.layer_norm_eps,
            causal=False,
            activation=config.hidden_act,
            qkv_bias=config.qkv_bias,
            positions="learned",
            image_size=config.image_size,
            patch_size=config.patch_size,
            channels=config.num_channels,
            class_token=True,
            loss=loss,
            labels=labels,
            head_bias=labels is not None,
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        return place_of(at, leaf, spec, BLOCK)


def headed(content: Content, config: Config) -> tuple[Literal["sequence", "regression", "hidden"], int | None]:
    """The loss and the number of labels, after what no head for images uses has been left out."""
    content.leave_out(r"embeddings\.mask_token", "only used to train by masked patches")
    content.leave_out(r"pooler\..*", "the pooler, which no head here uses")
    content.leave_out(r"decoder\..*", "of a head for masked pixels, which is not scored")
    loss, labels = content.head([Head("sequence", "classifier.weight", r"classifier\..*")], config.classifies)
    assert loss in ("sequence", "regression", "hidden")
    return loss, labels


def place_of(at: Named, leaf: Shape, spec: Spec, block: dict[str, str]) -> Place:
    """``blocks.0.attn.q.weight``, say, lies in ``encoder.layer.0.attention.attention.query.weight``."""
    layer, part, kind = at
    if layer is not None:
        name = f"encoder.layer.{layer}.{block[part]}"
        return linear(name if part.startswith("scale") else f"{name}.{kind}", part, leaf)
    if part == "embed.patch" and kind == "weight":
        return patched("embeddings.patch_embeddings.projection.weight", leaf, spec.channels)
    if part in ("embed.class", "embed.position"):
        name = {"embed.class": "cls_token", "embed.position": "position_embeddings"}[part]
        return reshaped(f"embeddings.{name}", leaf, (1, *leaf))
    around = {"embed.patch": "embeddings.patch_embeddings.projection", "final_norm": "layernorm", "head": "classifier"}
    return linear(f"{around[part]}.{kind}", part, leaf)
