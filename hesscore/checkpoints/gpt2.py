"""GPT-2 as transformers saves it: fused q, k and v, and linear weights that lie ``(in, out)``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from hesscore.checkpoints.config import Activation, Config, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, fused, whole
from hesscore.checkpoints.reading import Stored
from hesscore.spec import Size, Spec
from hesscore.wiring.names import Named

BODY = {
    "embed.token": "wte",
    "embed.position": "wpe",
    "final_norm": "ln_f",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
HEADS = {"causal_lm": "lm_head", "sequence": "score", "regression": "score", "token": "classifier"}
FUSED = ("attn.q", "attn.k", "attn.v")


class GPT2Config(Config):
    aliases: ClassVar = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    n_embd: Size
    n_head: Size
    n_layer: Size
    n_positions: Size
    vocab_size: Size
    n_inner: Size | None = None
    activation_function: Activation = "gelu_tanh"
    layer_norm_epsilon: float = Field(default=1e-5, ge=0)
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


class GPT2(Family):
    """LayerNorm before each part, learned positions, GELU by tanh unless its config says otherwise."""

    name = "GPT-2"
    bases = ("transformer.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return "model_args" not in stored.beside and numbered(names, r"h\.(\d+)\.attn\.c_attn\.weight") > 0

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, GPT2Config, ("gpt2",))
        content.leave_out(r"h\.\d+\.attn\.(bias|masked_bias)", "a buffer: the causal mask, no parameter", trained=False)
        tied = content.tied("lm_head.weight", "wte.weight", config.tie_word_embeddings)
        heads = [
            Head("sequence", "score.weight", r"score\..*"),
            Head("token", "classifier.weight", r"classifier\..*"),
            Head("causal_lm", "wte.weight" if tied else "lm_head.weight", r"lm_head\..*"),
        ]
        loss, labels = content.head(heads, config.classifies)
        content.leave_out(r"multiple_choice_head\..*", "a head that is not scored")
        return architecture(
            d_model=config.n_embd,
            d_ff=config.n_inner or 4 * config.n_embd,
            layers=config.n_layer,
            heads=config.n_head,
            vocab=config.vocab_size,
            norm_eps=config.layer_norm_epsilon,
            activation=config.activation_function,
            positions="learned",
            seq_len=config.n_positions,
            loss=loss,
            labels=labels,
            **config.last(loss),
            head_bias=loss == "token",
            tied=tied and loss == "causal_lm",
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.0.attn.k.bias``, say, lies in ``h.0.attn.c_attn.bias[d:2d]``."""
        layer, part, kind = at
        block = "" if layer is None else f"h.{layer}."
        if part in FUSED:
            return fused(f"{block}attn.c_attn.{kind}", leaf, FUSED.index(part), len(FUSED), transposed=False)
        return whole(f"{block}{HEADS[spec.objective] if part == 'head' else BODY[part]}.{kind}", leaf)
