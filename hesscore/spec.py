"""The description of a Transformer: what ``configs/*.yaml`` holds and what every checkpoint resolves to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

from hesscore.errors import UsageError
from hesscore.fields import read_fields, validated

SPEC_SUFFIXES = (".yaml", ".yml")

LARGEST = 10**12
"""Of a size: beyond any machine, and small enough for products of sizes to be floats."""

MAX_LAYERS = 10_000
"""Of what is computed: a graph of that many takes half a minute; the deepest Transformers so far have 1,000."""

Size = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]


Activation = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "silu", "tanh"]
Loss = Literal["causal_lm", "masked_lm", "token", "sequence", "regression", "hidden"]


class Spec(BaseModel):
    """A stack of Transformer blocks, with embedding and head if it has a ``vocab`` or sees images.

    Without either, it is a stack on its own: the input is a tensor of activations.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    d_model: Size
    d_ff: Count
    """Hidden width of the feed-forward part; 0 leaves that out."""
    layers: Size = 1
    weight_sets: Size | None = None
    """Blocks with weights of their own, each shared by as many consecutive layers; ``layers`` by default."""
    heads: Size = 1
    kv_heads: Size | None = None
    """Heads that share keys and values in groups; ``heads`` by default."""
    head_dim: Size | None = None
    """Width of a head; ``d_model / heads`` by default."""
    vocab: Size | None = None

    placement: Literal["pre", "post", "parallel"] = "pre"
    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"
    norm_eps: float = Field(default=1e-5, ge=0)
    causal: bool = True
    window: Size | None = None
    """A token sees so many at most, itself and those before it, in the layers from ``window_from`` on."""
    window_from: Count = 0
    activation: Activation = "gelu"
    gated: bool = False
    layer_scale: bool = False
    """A gain for what the attention adds, and one for what the feed-forward part adds."""
    bias: bool = True
    """Biases of the linear maps and the shift of LayerNorm (RMSNorm has none)."""
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    """Of these linear maps of a block alone; ``bias`` by default."""

    positions: Literal["none", "learned", "rotary"] = "none"
    position_offset: Count = 0
    """Rows of the table of learned positions before that of the first token.  The token of the number before this one
    is padding, which has no position."""
    rotary_base: PositiveFloat = 10_000.0
    rotary_dim: Size | None = None
    """Features of a head that are rotated; all by default."""
    rotary_frequencies: tuple[float, ...] | None = None
    """Angles from one position to the next, for each two features; powers of ``rotary_base`` by default."""
    rotary_scale: PositiveFloat = 1.0
    """Factor of every feature that is rotated."""
    segments: Size | None = None
    """Rows of a table of segments (token types)."""
    d_embed: Size | None = None
    """Width of the tables, where a linear map leads from there to ``d_model``."""
    embed_norm: bool = False
    image_size: Size | None = None
    """Height and width in pixels.  The tokens are square patches."""
    patch_size: Size | None = None
    channels: Size = 3
    class_token: bool = False
    """A learned token before the patches."""

    loss: Loss | None = None
    """What is scored: the next token, masked ones, a class of each token, a class or numbers for each sequence or
    image, or the output of the stack, by its squared error to a target.  ``causal_lm`` with a ``vocab``, else
    ``hidden`` by default."""
    labels: Size | None = None
    """Outputs of a head whose outputs are not tokens."""
    pool: Literal["first", "last", "mean", "first_mean"] = "first"
    """The token from which a sequence is scored, their mean without the class token, or both side by side."""
    pad_token: Count | None = None
    """The token that is never the last of a sequence; without one the padding of the data tells."""
    pooler: bool = False
    """A linear map and tanh after that."""
    final_norm: bool | None = None
    """After the last block; by default behind embeddings and blocks that do not end in a norm."""
    pooled_norm: bool = False
    """The final norm stands after the pooling."""
    head_transform: bool = False
    """A linear map, the activation and a norm before the head."""
    head_bias: bool = False
    tied: bool = False
    """The head is the token embedding."""

    seq_len: Size = 64
    """Length of the seeded input, and of the table of learned positions."""
    batch: Size = 1
    init_std: PositiveFloat | None = None
    """Standard deviation of seeded weights; ``1/sqrt(fan in)`` by default."""

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def groups(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.heads

    @property
    def rotated(self) -> int:
        """Features of a head that are rotated."""
        return (self.rotary_dim or self.head_width) if self.positions == "rotary" else 0

    @property
    def embeds(self) -> bool:
        """Whether the input is tokens or images, not activations."""
        return self.vocab is not None or self.image_size is not None

    @property
    def length(self) -> int:
        """Tokens of a sequence at most, or of an image."""
        if not (self.image_size and self.patch_size):
            return self.seq_len
        return (self.image_size // self.patch_size) ** 2 + self.class_token

    @property
    def objective(self) -> Loss:
        """``loss``, whether given or not."""
        return self.loss or ("causal_lm" if self.vocab else "hidden")

    @property
    def outputs(self) -> int | None:
        """Of the head, if there is one."""
        return self.vocab if self.objective in ("causal_lm", "masked_lm") else self.labels

    @property
    def pools(self) -> bool:
        """Whether sequences are scored, not tokens."""
        return self.objective in ("sequence", "regression")

    @property
    def classifies(self) -> bool:
        """Whether the loss is the cross entropy of classes, not the squared error of numbers."""
        return self.objective not in ("hidden", "regression")

    @property
    def ends_normed(self) -> bool:
        """Whether there is a final norm."""
        given = self.embeds and self.placement != "post" if self.final_norm is None else self.final_norm
        return given and self.norm != "none"

    @property
    def alone(self) -> Spec:
        """One block of the stack, on its own."""
        around: dict[str, object] = {name: Spec.model_fields[name].default for name in AROUND}
        positions = self.positions if self.positions == "rotary" else "none"
        return self.model_copy(update=around | {"positions": positions, "seq_len": self.length})

    def biased(self, component: str) -> bool:
        """Whether a linear map of a block, such as ``attn.q``, has a bias."""
        of_qkv = component in ("attn.q", "attn.k", "attn.v")
        own = self.qkv_bias if of_qkv else self.out_bias if component == "attn.o" else self.mlp_bias
        return self.bias if own is None else own

    def owner(self, layer: int) -> int:
        """The layer whose name the weights of this one have."""
        together = self.layers // (self.weight_sets or self.layers)
        return layer - layer % together

    def hidden_at(self, width: float) -> int:
        """``d_ff`` in proportion, at another ``d_model``; none where there is none."""
        return max(1, round(width * self.d_ff / self.d_model)) if self.d_ff else 0

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        if self.head_dim is None and self.d_model % self.heads:
            raise ValueError(f"d_model: {self.d_model} is not divisible by heads: {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads: {self.heads} is not divisible by kv_heads: {self.groups}")
        if self.layers % (self.weight_sets or 1):
            raise ValueError(f"layers: {self.layers} is not divisible by weight_sets: {self.weight_sets}")
        if self.rotated % 2:
            what = "head width" if self.rotary_dim is None else "rotary_dim"
            raise ValueError(f"positions: rotary needs an even {what}, not {self.rotated}")
        if self.rotated > self.head_width:
            raise ValueError(f"rotary_dim: {self.rotated} is more than a head has: {self.head_width}")
        if self.rotary_frequencies is not None and 2 * len(self.rotary_frequencies) != self.rotated:
            raise ValueError(f"rotary_frequencies: {len(self.rotary_frequencies)} are not one for two features")
        if self.image_size and (self.patch_size is None or self.image_size % self.patch_size):
            raise ValueError(f"image_size: {self.image_size} is not divisible by patch_size: {self.patch_size}")
        for field, given, needed, what in self._needs():
            if given and not needed:
                raise ValueError(f"{field}: {getattr(self, field)} needs {what}")
        return self

    def _needs(self) -> list[tuple[str, bool, bool, str]]:
        """Fields, whether they ask for something, whether that is there, and what it is."""
        words, images, headed = self.vocab is not None, self.image_size is not None, self.outputs is not None
        speaks = self.objective in ("causal_lm", "masked_lm")
        return [
            ("loss", speaks, words, "a vocab"),
            ("loss", not speaks and self.objective != "hidden", self.labels is not None, "labels"),
            ("labels", self.labels is not None, not speaks and self.objective != "hidden", "a loss that has them"),
            ("image_size", images, not words, "no vocab beside it"),
            ("image_size", images, not self.causal, "causal: false"),
            ("patch_size", self.patch_size is not None, images, "an image_size"),
            ("class_token", self.class_token, images, "an image_size"),
            ("tied", self.tied, speaks and words, "a vocab"),
            ("tied", self.tied and self.d_embed is not None, self.head_transform, "head_transform to d_embed"),
            ("positions", self.positions == "learned", self.embeds, "a vocab"),
            ("position_offset", self.position_offset > 0, words and self.positions == "learned", "learned positions"),
            ("rotary_dim", self.rotary_dim is not None, self.positions == "rotary", "positions: rotary"),
            ("rotary_frequencies", self.rotary_frequencies is not None, self.positions == "rotary", "rotary positions"),
            ("rotary_scale", self.rotary_scale != 1, self.positions == "rotary", "positions: rotary"),
            ("segments", self.segments is not None, words, "a vocab"),
            ("d_embed", self.d_embed is not None, words, "a vocab"),
            ("embed_norm", self.embed_norm, self.embeds, "a vocab"),
            ("window", self.window is not None, self.causal, "causal: true"),
            ("pad_token", self.pad_token is not None, words and self.pools and self.pool == "last", "pool: last"),
            ("pooler", self.pooler, self.pools, "a loss of sequences"),
            ("pooled_norm", self.pooled_norm, self.pools, "a loss of sequences"),
            ("head_transform", self.head_transform, headed, "a head"),
            ("head_bias", self.head_bias, headed, "a head"),
        ]


AROUND = (
    "layers weight_sets vocab window window_from position_offset segments d_embed embed_norm image_size patch_size "  # noqa: SIM905
    "channels class_token loss labels pool pad_token pooler final_norm pooled_norm head_transform head_bias "
    "tied".split()
)
"""The fields of a spec that are not of a block."""


def read_spec(path: str | Path) -> Spec:
    """Read a YAML file: ``InputError`` where there is no text to read, ``UsageError`` that names the field at fault."""
    try:
        return validated(Spec, *read_fields(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def make_spec(fields: Mapping[str, object]) -> Spec:
    """``UsageError`` that names the fields at fault."""
    return validated(Spec, fields)
