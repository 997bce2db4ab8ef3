"""ALBERT as transformers saves it: BERT with narrow embeddings, and one set of weights for many layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from hesscore.checkpoints.bert import WORDS, BertConfig, merge_biases
from hesscore.checkpoints.config import Activation, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, turned, whole
from hesscore.checkpoints.reading import Stored
from hesscore.spec import Size, Spec
from hesscore.wiring.model import model

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
    "head.transform.weight": "predictions.dense.weight",
    "head.transform.bias": "predictions.dense.bias",
    "head.norm.weight": "predictions.LayerNorm.weight",
    "head.norm.bias": "predictions.LayerNorm.bias",
    "head.weight": "predictions.decoder.weight",
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
    marks = "encoder.albert_layer_groups.0.albert_layers.0.ffn.weight and config.json"
    bases = ("albert.",)

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return numbered(names, r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.0\.ffn\.weight") > 0

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, AlbertConfig, ("albert",))
        content.leave_out(r"embeddings\.(position|token_type)_ids", "a buffer: numbers of positions, no parameter")
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

    def places(self, spec: Spec) -> dict[str, Place]:
        sets = {str(spec.owner(layer)) for layer in range(spec.layers)}
        number = {layer: i for i, layer in enumerate(sorted(sets, key=int))}
        words = WORD_HEAD if spec.head_transform else {}
        if words:
            words = words | {"head.bias": "predictions.bias" if spec.tied else "predictions.decoder.bias"}
        return {leaf: place(leaf, shape, words, number) for leaf, shape in model(spec).parameters.items()}


def place(leaf: str, shape: tuple[int, ...], words: dict[str, str], number: dict[str, int]) -> Place:
    """``blocks.6.mlp.up.weight``, of the second set, lies in ``albert_layer_groups.1.albert_layers.0.ffn.weight``."""
    module, _, kind = leaf.rpartition(".")
    if leaf in words:
        name = words[leaf]
    elif module.startswith("blocks."):
        _, layer, part = module.split(".", 2)
        name = f"encoder.albert_layer_groups.{number[layer]}.albert_layers.0.{BLOCK[part]}.{kind}"
    else:
        name = f"{AROUND[module]}.{kind}"
    table = module in ("embed.token", "embed.position", "embed.segment", "head")
    return whole(name, shape) if table or len(shape) == 1 else turned(name, shape)
