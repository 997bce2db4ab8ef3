"""ALBERT as transformers saves it: BERT with narrow embeddings, and one set of weights for many layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from hesscore.checkpoints.bert import WORDS, BertConfig, merge_biases
from hesscore.checkpoints.config import Activation, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, linear
from hesscore.checkpoints.reading import Stored
from hesscore.spec import Size, Spec
from hesscore.wiring.names import Named

AROUND = {
    "embed.token": "embeddings.word_embeddings",
    "embed.position": "embeddings.position_embeddings",
    "embed.segment": "embeddings.token_type_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "embed.project": "encoder.embedding_hidden_mapping_in",
    "pooler": "pooler",
    "head": "classifier",
}
WORD_HEAD = {
    "head.transform": "predictions.dense",
    "head.norm": "predictions.LayerNorm",
    "head": "predictions.decoder",
}
BLOCK = {
    "attn.q": "attention.query",
    "attn.k": "attention.key",
    "attn.v": "attention.value",
    "attn.o": "attention.dense",
    "norm1": "attention.LayerNorm",
    "mlp.up": "ffn",
    "mlp.down": "ffn_output",
    "norm2": "full_layer_layer_norm",
}


class AlbertConfig(BertConfig):
    embedding_size: Size = 128
    num_hidden_groups: Size = 1
    inner_group_num: Literal[1] = 1
    hidden_act: Activation = "gelu_tanh"
    is_decoder: Literal[False] = False


class Albert(Family):
    """A norm after each part, tables of few features, and blocks that share their weights."""

    name = "ALBERT"
    bases = ("albert.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return numbered(names, r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.0\.ffn\.weight") > 0

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, AlbertConfig, ("albert",))
        content.leave_out(
            r"embeddings\.(position|token_type)_ids", "a buffer: numbers of positions, no parameter", trained=False
        )
        content.leave_out(r"sop_classifier\..*", "of the head for the order of sentences, which is not scored")
        content.leave_out(r"qa_outputs\..*", "of a head for spans, which is not scored")
        if config.of("MultipleChoice"):
            content.leave_out(r"classifier\..*", "of a head for multiple choice, which is not scored")
        tied = content.tied("predictions.decoder.weight", WORDS, config.tie_word_embeddings)
        merge_biases(content, "predictions.decoder", tied)
        pooled = "pooler.weight" in content.tensors and not config.of("TokenClassification")
        heads = [
            Head("masked_lm", "predictions.dense.weight", r"predictions\..*"),
            Head("sequence" if pooled else "token", "classifier.weight", r"classifier\..*"),
        ]
        loss, labels = content.head(heads, config.classifies)
        if loss not in ("sequence", "regression"):
            content.leave_out(r"pooler\..*", "the pooler, which only a head of sequences uses")
        return architecture(
            d_model=config.hidden_size,
            d_ff=config.intermediate_size,
            layers=config.num_hidden_layers,
            weight_sets=config.num_hidden_groups,
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            placement="post",
            norm_eps=config.layer_norm_eps,
            causal=False,
            activation=config.hidden_act,
            positions="learned",
            segments=config.type_vocab_size,
            d_embed=config.embedding_size,
            embed_norm=True,
            loss=loss,
            labels=labels,
            pooler=loss in ("sequence", "regression"),
            head_transform=loss == "masked_lm",
            head_bias=loss != "hidden",
            tied=tied and loss == "masked_lm",
            seq_len=config.max_position_embeddings,
        )

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.6.mlp.up.weight``, of the second set, is ``albert_layer_groups.1.albert_layers.0.ffn.weight``."""
        layer, part, kind = at
        if layer is not None:
            group = layer * (spec.weight_sets or spec.layers) // spec.layers
            return linear(f"encoder.albert_layer_groups.{group}.albert_layers.0.{BLOCK[part]}.{kind}", part, leaf)
        if spec.head_transform and part.startswith("head"):
            name = (
                "predictions.bias" if spec.tied and part == "head" and kind == "bias" else f"{WORD_HEAD[part]}.{kind}"
            )
            return linear(name, part, leaf)
        return linear(f"{AROUND[part]}.{kind}", part, leaf)
