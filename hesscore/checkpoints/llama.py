"""Llama and what is built like it (Mistral, Qwen2, SmolLM), as transformers saves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from hesscore.checkpoints.config import Activation, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, linear
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.rotary import RotaryConfig
from hesscore.errors import InputError
from hesscore.spec import Count, Size, Spec
from hesscore.wiring.names import Named

NAMES = {
    "embed.token": "embed_tokens",
    "final_norm": "norm",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


class LlamaConfig(RotaryConfig):
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size
    hidden_act: Activation = "silu"
    rms_norm_eps: float = Field(default=1e-6, ge=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: Literal[1] | None = 1

    @property
    def window(self) -> tuple[int | None, int]:
        """How many tokens one sees, if not all, and from which layer on."""
        return None, 0


class MistralConfig(LlamaConfig):
    num_key_value_heads: Size | None = 8
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    sliding_window: Size | None = 4096
    layer_types: None = None

    @property
    def window(self) -> tuple[int | None, int]:
        return self.sliding_window, 0


class Qwen2Config(LlamaConfig):
    mlp_bias: Literal[False] = False
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Count = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    @property
    def window(self) -> tuple[int | None, int]:
        if not self.use_sliding_window or self.sliding_window is None:
            return None, 0
        kinds = self.layer_types
        first = self.max_window_layers
        if kinds is not None:
            first = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
            if len(kinds) != self.num_hidden_layers or "full_attention" in kinds[first:]:
                raise InputError("config.json: layer_types: only windows in all layers from one on are supported")
        return (None, 0) if first >= self.num_hidden_layers else (self.sliding_window, first)


TYPES: dict[str, type[LlamaConfig]] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}


class Llama(Family):
    """RMSNorm before each part, rotary positions, gated SiLU, and heads that share keys and values."""

    name = "Llama"
    bases = ("transformer.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return numbered(names, r"layers\.(\d+)\.self_attn\.q_proj\.weight") > 0

    def spec(self, content: Content) -> Spec:
        kind = (content.stored.config or {}).get("model_type")
        if content.stored.config is not None and kind is None:
            raise InputError(f"config.json has no model_type, so it is not clear which of {', '.join(TYPES)} this is")
        config = config_of(content.stored, TYPES.get(str(kind), LlamaConfig), tuple(TYPES))
        content.leave_out(
            r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "a buffer: the rotary frequencies", trained=False
        )
        content.leave_out(r"qa_outputs\..*", "of a head for spans, which is not scored")
        tied = content.tied("lm_head.weight", "embed_tokens.weight", config.tie_word_embeddings)
        of_tokens = "score.bias" in content.tensors
        heads = [
            Head("token" if of_tokens else "sequence", "score.weight", r"score\..*"),
            Head("causal_lm", "embed_tokens.weight" if tied else "lm_head.weight", r"lm_head\..*"),
        ]
        loss, labels = content.head(heads, config.classifies)
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        rotary = config.rotary(head_dim)
        window, window_from = config.window
        return architecture(
            d_model=config.hidden_size,
            d_ff=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            norm="rmsnorm",
            norm_eps=config.rms_norm_eps,
            window=window,
            window_from=window_from,
            activation=config.hidden_act,
            gated=True,
            bias=False,
            qkv_bias=True if kind == "qwen2" else config.attention_bias,
            out_bias=False if kind == "qwen2" else config.attention_bias,
            mlp_bias=config.mlp_bias,
            positions="rotary",
            seq_len=config.max_position_embeddings,
            loss=loss,
            labels=labels,
            **config.last(loss),
            head_bias=loss == "token",
            tied=tied and loss == "causal_lm",
            **rotary._asdict(),
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.0.attn.q.weight``, say, lies in ``layers.0.self_attn.q_proj.weight``."""
        layer, part, kind = at
        block = "" if layer is None else f"layers.{layer}."
        head = "lm_head" if spec.objective == "causal_lm" else "score"
        return linear(f"{block}{head if part == 'head' else NAMES[part]}.{kind}", part, leaf)
