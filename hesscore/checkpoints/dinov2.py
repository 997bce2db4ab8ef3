"""DINOv2 as transformers saves it: a ViT with a gain for what each part of a block adds."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from hesscore.checkpoints.config import Activation, Config, architecture, config_of
from hesscore.checkpoints.family import Content, Family, numbered
from hesscore.checkpoints.places import Place, Shape, fused
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.vit import Square, headed, place_of
from hesscore.spec import Size, Spec
from hesscore.wiring.names import Named

BLOCK = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.q": "attention.attention.query",
    "attn.k": "attention.attention.key",
    "attn.v": "attention.attention.value",
    "attn.o": "attention.output.dense",
    "scale1": "layer_scale1.lambda1",
    "scale2": "layer_scale2.lambda1",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
GATED = ("mlp.gate", "mlp.up")
"""In the order in which ``weights_in`` holds them."""


class Dinov2Config(Config):
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    mlp_ratio: float = Field(default=4, gt=0, le=1000)
    hidden_act: Activation = "gelu"
    layer_norm_eps: float = Field(default=1e-6, ge=0)
    image_size: Square
    patch_size: Square
    num_channels: Size = 3
    qkv_bias: bool = True
    use_swiglu_ffn: bool = False

    @property
    def hidden_features(self) -> int:
        """Of a gated feed-forward part two thirds, up to a multiple of 8."""
        features = int(self.hidden_size * self.mlp_ratio)
        return (int(features * 2 / 3) + 7) // 8 * 8 if self.use_swiglu_ffn else features


class Dinov2(Family):
    """Images are classified by the class token beside the mean of the patches."""

    name = "DINOv2"
    bases = ("dinov2.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return numbered(names, r"encoder\.layer\.(\d+)\.layer_scale1\.lambda1") > 0

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, Dinov2Config, ("dinov2",))
        loss, labels = headed(content, config)
        return architecture(
            d_model=config.hidden_size,
            d_ff=config.hidden_features,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            norm_eps=config.layer_norm_eps,
            causal=False,
            activation="silu" if config.use_swiglu_ffn else config.hidden_act,
            gated=config.use_swiglu_ffn,
            layer_scale=True,
            qkv_bias=config.qkv_bias,
            positions="learned",
            image_size=config.image_size,
            patch_size=config.patch_size,
            channels=config.num_channels,
            class_token=True,
            loss=loss,
            labels=labels,
            pool="first" if labels is None else "first_mean",
            head_bias=labels is not None,
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        if spec.gated and at.component in GATED:
            name = f"encoder.layer.{at.layer}.mlp.weights_in.{at.parameter}"
            return fused(name, leaf, GATED.index(at.component), len(GATED))
        block = BLOCK | {"mlp.down": "mlp.weights_out"} if spec.gated else BLOCK
        return place_of(at, leaf, spec, block)
