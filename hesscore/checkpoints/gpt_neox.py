"""GPT-NeoX and Pythia as transformers saves them: q, k and v interleaved head by head, and a parallel residual."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field

from hesscore.checkpoints.config import Activation, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, interleaved, linear
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.rotary import RotaryConfig
from hesscore.spec import Size, Spec
from hesscore.wiring.names import Named

NAMES = {
    "embed.token": "embed_in",
    "final_norm": "final_layer_norm",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
FUSED = ("attn.q", "attn.k", "attn.v")
HEADS = {"causal_lm": "embed_out", "token": "classifier", "sequence": "score", "regression": "score"}


class GPTNeoXConfig(RotaryConfig):
    partial: ClassVar[bool] = True

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    hidden_act: Activation = "gelu"
    layer_norm_eps: float = Field(default=1e-5, ge=0)
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    rope_theta: float | None = Field(default=10_000.0, validation_alias="rotary_emb_base")
    partial_rotary_factor: float | None = Field(default=0.25, validation_alias="rotary_pct")


class GPTNeoX(Family):
    """LayerNorm before each part, both at once or in turn, and rotary positions for some of a head's features."""

    name = "GPT-NeoX"
    bases = ("gpt_neox.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return numbered(names, r"layers\.(\d+)\.attention\.query_key_value\.weight") > 0

    def own(self, key: str) -> str:
        return re.sub(r"^lm_head\.", "embed_out.", super().own(key))  # as transformers calls it in memory

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, GPTNeoXConfig, ("gpt_neox",))
        masks = r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
        content.leave_out(masks, "a buffer: the causal mask or the rotary frequencies, no parameter", trained=False)
        content.leave_out(r"qa_outputs\..*", "of a head for spans, which is not scored")
        tied = content.tied("embed_out.weight", "embed_in.weight", config.tie_word_embeddings)
        heads = [
            Head("sequence", "score.weight", r"score\..*"),
            Head("token", "classifier.weight", r"classifier\..*"),
            Head("causal_lm", "embed_in.weight" if tied else "embed_out.weight", r"embed_out\..*"),
        ]
        loss, labels = content.head(heads, config.classifies)
        return architecture(
            d_model=config.hidden_size,
            d_ff=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            placement="parallel" if config.use_parallel_residual else "pre",
            norm_eps=config.layer_norm_eps,
            activation=config.hidden_act,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            positions="rotary",
            seq_len=config.max_position_embeddings,
            loss=loss,
            labels=labels,
            **config.last(loss),
            head_bias=loss == "token",
            tied=tied and loss == "causal_lm",
            **config.rotary(config.hidden_size // config.num_attention_heads)._asdict(),
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.0.attn.k.bias`` is the second part of each head in ``layers.0.attention.query_key_value.bias``."""
        layer, part, kind = at
        block = "" if layer is None else f"layers.{layer}."
        if part in FUSED:
            name = f"{block}attention.query_key_value.{kind}"
            return interleaved(name, leaf, FUSED.index(part), len(FUSED), spec.heads)
        return linear(f"{block}{HEADS[spec.objective] if part == 'head' else NAMES[part]}.{kind}", part, leaf)
