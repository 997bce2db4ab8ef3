"""BERT and RoBERTa as transformers saves them: a norm after each part, segments, and heads for masked tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field

from hesscore.checkpoints.config import Activation, Config, architecture, config_of
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, linear
from hesscore.checkpoints.reading import Stored
from hesscore.errors import InputError
from hesscore.spec import Loss, Size, Spec
from hesscore.wiring.names import Named

BODY = {
    "embed.token": "embeddings.word_embeddings",
    "embed.position": "embeddings.position_embeddings",
    "embed.segment": "embeddings.token_type_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "attn.q": "attention.self.query",
    "attn.k": "attention.self.key",
    "attn.v": "attention.self.value",
    "attn.o": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm2": "output.LayerNorm",
}
WORDS = "embeddings.word_embeddings.weight"


class BertConfig(Config):
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    vocab_size: Size
    type_vocab_size: Size = 2
    hidden_act: Activation = "gelu"
    layer_norm_eps: float = Field(default=1e-12, ge=0)
    is_decoder: bool = False
    tie_word_embeddings: bool = True
    position_embedding_type: Literal["absolute"] = "absolute"
    add_cross_attention: Literal[False] = False

    def of(self, kind: str) -> bool:
        """Whether a head of this kind was saved, as far as the architecture is said."""
        return any(kind in name for name in self.architectures or ())


class Bert(Family):
    """Learned positions and segments, a norm after the embeddings and after each part of a block."""

    name = "BERT"
    bases = ("bert.",)
    types: ClassVar[tuple[str, ...]] = ("bert",)
    config: ClassVar[type[BertConfig]] = BertConfig
    decoder: ClassVar[str] = "cls.predictions.decoder"
    words: ClassVar[tuple[str, str]] = ("cls.predictions.transform.dense.weight", r"cls\.predictions\..*")
    """The first weight of the head for words, and the names of all of them."""
    sequence: ClassVar[str] = "classifier.weight"

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return _is_of_bert(names) and not _is_roberta(stored)

    def own(self, key: str) -> str:
        name = super().own(key)
        return re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda old: {"gamma": "weight", "beta": "bias"}[old[0]], name)

    def spec(self, content: Content) -> Spec:
        config = config_of(content.stored, self.config, self.types)
        content.leave_out(
            r"embeddings\.(position|token_type)_ids", "a buffer: numbers of positions, no parameter", trained=False
        )
        content.leave_out(r"cls\.seq_relationship\..*", "of the head for the next sentence, which is not scored")
        content.leave_out(r"qa_outputs\..*", "of a head for spans, which is not scored")
        if config.of("MultipleChoice"):
            content.leave_out(r"classifier\..*", "of a head for multiple choice, which is not scored")
        tied = content.tied(f"{self.decoder}.weight", WORDS, config.tie_word_embeddings)
        merge_biases(content, self.decoder, tied)
        words: Loss = "causal_lm" if config.is_decoder and not config.of("MaskedLM") else "masked_lm"
        heads = [Head(words, *self.words), self.classifier(content, config)]
        loss, labels = content.head(heads, config.classifies)
        pooled = loss in ("sequence", "regression")
        if not (pooled and self.sequence == "classifier.weight"):
            content.leave_out(r"pooler\..*", "the pooler, which only a head of sequences uses")
        return architecture(
            d_model=config.hidden_size,
            d_ff=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            placement="post",
            norm_eps=config.layer_norm_eps,
            causal=config.is_decoder,
            activation=config.hidden_act,
            positions="learned",
            segments=config.type_vocab_size,
            embed_norm=True,
            loss=loss,
            labels=labels,
            pooler=pooled,
            head_transform=loss == words,
            head_bias=loss != "hidden",
            tied=tied and loss == words,
            **self.positions(config, loss),
        )

    def classifier(self, content: Content, config: BertConfig) -> Head:
        """The head of tokens or of sequences: both have one name, but only the latter has a pooler."""
        pooled = "pooler.dense.weight" in content.tensors and not config.of("TokenClassification")
        return Head("sequence" if pooled else "token", "classifier.weight", r"classifier\..*")

    def positions(self, config: BertConfig, loss: Loss) -> dict[str, Any]:
        return {"seq_len": config.max_position_embeddings}

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.0.attn.q.weight``, say, lies in ``encoder.layer.0.attention.self.query.weight``."""
        layer, part, kind = at
        around = self.around(spec)
        if (whole := f"{part}.{kind}") in around:
            return linear(around[whole], part, leaf)
        block = "" if layer is None else f"encoder.layer.{layer}."
        return linear(f"{block}{(around | BODY)[part]}.{kind}", part, leaf)

    def around(self, spec: Spec) -> dict[str, str]:
        """The names of the head."""
        predictions = "cls.predictions"
        words = {
            "head.transform": f"{predictions}.transform.dense",
            "head.norm": f"{predictions}.transform.LayerNorm",
            "head.weight": f"{predictions}.decoder.weight",
            "head.bias": f"{predictions}.bias" if spec.tied else f"{predictions}.decoder.bias",
        }
        return words if spec.head_transform else {"pooler": "pooler.dense", "head": "classifier"}


class RobertaConfig(BertConfig):
    pad_token_id: int | None = Field(default=1, ge=0)


class Roberta(Bert):
    """BERT whose positions are counted from the padding token on."""

    name = "RoBERTa"
    bases = ("roberta.",)
    types = ("roberta", "xlm-roberta", "camembert")
    config = RobertaConfig
    decoder = "lm_head.decoder"
    words = ("lm_head.dense.weight", r"lm_head\..*")
    sequence = "classifier.out_proj.weight"

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return _is_of_bert(names) and _is_roberta(stored)

    def classifier(self, content: Content, config: BertConfig) -> Head:
        if self.sequence in content.tensors:
            return Head("sequence", self.sequence, r"classifier\..*")
        return Head("token", "classifier.weight", r"classifier\..*")

    def positions(self, config: BertConfig, loss: Loss) -> dict[str, Any]:
        if loss in ("masked_lm", "causal_lm") and config.hidden_act != "gelu":
            raise InputError("config.json: hidden_act is not gelu, but the head for words has gelu: not supported")
        offset = (config.pad_token_id or 0) + 1
        return {"position_offset": offset, "seq_len": config.max_position_embeddings - offset}

    def around(self, spec: Spec) -> dict[str, str]:
        if spec.head_transform:
            return {
                "head.transform": "lm_head.dense",
                "head.norm": "lm_head.layer_norm",
                "head.weight": "lm_head.decoder.weight",
                "head.bias": "lm_head.bias" if spec.tied else "lm_head.decoder.bias",
            }
        return {"pooler": "classifier.dense", "head": "classifier.out_proj" if spec.pools else "classifier"}


def merge_biases(content: Content, decoder: str, tied: bool) -> None:
    """The bias of a head for words has two names, of which a head that is not tied uses the ``decoder``'s alone."""
    own, other = f"{decoder}.bias", f"{decoder.removesuffix('.decoder')}.bias"
    if tied:
        content.merge(own, other)
        return
    if own in content.tensors:
        content.leave_out(re.escape(other), f"not used beside {content.stored_as[own]}: the head is not tied")
    content.merge(other, own)


def _is_of_bert(names: Iterable[str]) -> bool:
    return numbered(names, r"(?:roberta\.|bert\.)?encoder\.layer\.(\d+)\.attention\.self\.query\.weight") > 0


def _is_roberta(stored: Stored) -> bool:
    """By its ``model_type``, or by the name that it has within a larger model."""
    kind = (stored.config or {}).get("model_type")
    named = any(re.search(r"(^|\.)roberta\.|(^|\.)lm_head\.", key) for key in stored.tensors)
    return kind in Roberta.types or (kind is None and named)
