"""ViT as timm saves it: the sizes are in the shapes, the number of heads in none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import isqrt
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from hesscore.checkpoints.config import architecture
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, fused, linear, patched, reshaped
from hesscore.checkpoints.reading import Stored
from hesscore.errors import InputError, UsageError
from hesscore.fields import validated
from hesscore.files import short
from hesscore.spec import Size, Spec
from hesscore.wiring.names import Named

BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.o": "attn.proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
FUSED = ("attn.q", "attn.k", "attn.v")
HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}
"""Of timm's standard models, by the word in their names."""

WANTED = 'put a config.json beside it with {"model_args": {"num_heads": 12}}, say'


class _Args(BaseModel):
    """``model_args``: what may be given of a model.  All but the heads and the pooling is in the shapes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    num_heads: Size | None = None
    global_pool: Literal["token", "avg"] | None = None
    qk_norm: Literal[False] = False
    no_embed_class: Literal[False] = False
    reg_tokens: Literal[0] = 0
    pre_norm: Literal[False] = False
    pool_include_prefix: Literal[False] = False
    scale_attn_norm: Literal[False] = False
    scale_mlp_norm: Literal[False] = False
    pos_embed: Literal["learn"] = "learn"
    # What follows is in the shapes, or has no say in what is computed.
    img_size: Any = None
    patch_size: Any = None
    in_chans: Any = None
    num_classes: Any = None
    embed_dim: Any = None
    depth: Any = None
    mlp_ratio: Any = None
    qkv_bias: Any = None
    init_values: Any = None
    class_token: Any = None
    fc_norm: Any = None
    drop_rate: Any = None
    dynamic_img_size: Any = None


class TimmViT(Family):
    """LayerNorm (eps 1e-6) before each part, GELU by erf, and the class token or the mean of the patches."""

    name = "timm ViT"

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        names = set(names)
        return "patch_embed.proj.weight" in names and numbered(names, r"blocks\.(\d+)\.attn\.qkv\.weight") > 0

    def spec(self, content: Content) -> Spec:
        tensors = content.tensors
        args, named = _told(content.stored)
        positions, convolution, up = (
            _shape(content, name, dims)
            for name, dims in (("pos_embed", 3), ("patch_embed.proj.weight", 4), ("blocks.0.mlp.fc1.weight", 2))
        )
        d_model, class_token = convolution[0], "cls_token" in tensors
        side = isqrt(max(0, positions[1] - class_token))
        if side**2 != positions[1] - class_token:
            raise InputError(
                f"pos_embed has {positions[1]} positions, which are no square of patches and a class token"
            )
        loss, labels = content.head([Head("sequence", "head.weight", r"head\..*")])
        if loss == "hidden":
            content.leave_out(r"fc_norm\..*", "a norm after the pooling, which only a head uses")
        averaged = named == "avg" or "fc_norm.weight" in tensors or not class_token
        return architecture(
            d_model=d_model,
            d_ff=up[0],
            layers=numbered(tensors, r"blocks\.(\d+)\."),
            heads=args,
            norm_eps=1e-6,
            causal=False,
            layer_scale="blocks.0.ls1.gamma" in tensors,
            qkv_bias="blocks.0.attn.qkv.bias" in tensors,
            positions="learned",
            image_size=side * convolution[2],
            patch_size=convolution[2],
            channels=convolution[1],
            class_token=class_token,
            loss=loss,
            labels=labels,
            pool="mean" if averaged and labels else "first",
            final_norm=bool({"norm.weight", "fc_norm.weight"} & set(tensors)),
            pooled_norm="fc_norm.weight" in tensors,
            head_bias=labels is not None,
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.0.attn.k.bias``, say, lies in ``blocks.0.attn.qkv.bias[d:2d]``."""
        layer, part, kind = at
        if part in FUSED:
            return fused(f"blocks.{layer}.attn.qkv.{kind}", leaf, FUSED.index(part), len(FUSED))
        if layer is not None:
            name = f"ls{part[-1]}.gamma" if part.startswith("scale") else f"{BLOCK[part]}.{kind}"
            return linear(f"blocks.{layer}.{name}", part, leaf)
        if part == "embed.patch" and kind == "weight":
            return patched("patch_embed.proj.weight", leaf, spec.channels)
        if part in ("embed.class", "embed.position"):
            return reshaped("cls_token" if part == "embed.class" else "pos_embed", leaf, (1, *leaf))
        norm = "fc_norm" if spec.pooled_norm else "norm"
        around = {"embed.patch": "patch_embed.proj", "final_norm": norm, "head": "head"}
        return linear(f"{around[part]}.{kind}", part, leaf)


def _told(stored: Stored) -> tuple[int, str | None]:
    """The number of heads, and how tokens are pooled if that is said."""
    config = stored.config or {}
    given = config.get("model_args") or {}
    if not isinstance(given, dict):
        raise InputError("config.json: model_args is not a dictionary")
    try:
        args = validated(_Args, given)
    except UsageError as error:
        raise InputError(f"config.json: model_args: {error}") from error
    name = str(config.get("architecture", ""))
    if "quickgelu" in name:
        raise InputError(f"config.json: architecture {short(name)}: quick GELU is not supported")
    standard = re.match(rf"(?:vit|deit|deit3|flexivit)_({'|'.join(HEADS)})_", name)
    heads = args.num_heads or (HEADS[standard[1]] if standard else None)
    if heads is None:
        raise InputError(f"shapes alone do not tell its heads: {WANTED}")
    pool = args.global_pool or config.get("global_pool")
    if pool not in (None, "token", "avg"):
        raise InputError(f"config.json: global_pool {short(pool)} is not supported, only token and avg are")
    return heads, pool


def _shape(content: Content, name: str, dims: int) -> tuple[int, ...]:
    if name not in content.tensors:
        raise InputError(f"not the tensors of its architecture; 1 missing: {name}")
    shape = tuple(content.tensors[name].shape)
    if len(shape) != dims or not all(shape):
        raise InputError(f"{content.stored_as[name]} has shape {short(shape)}, not {dims} sizes above 0")
    return shape
