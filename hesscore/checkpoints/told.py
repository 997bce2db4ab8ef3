"""The fields of a ``Spec`` that the names and the shapes of a file's tensors tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, get_args

from hesscore.checkpoints.patterns import Pattern
from hesscore.checkpoints.places import Shape
from hesscore.spec import Spec

OPTIONS = {
    "gated": "blocks.{i}.mlp.gate.weight",
    "layer_scale": "blocks.{i}.scale1.weight",
    "embed_norm": "embed.norm.weight",
    "class_token": "embed.class.weight",
    "final_norm": "final_norm.weight",
    "pooler": "pooler.weight",
    "head_transform": "head.transform.weight",
    "head_bias": "head.bias",
}
"""Fields that are true where there is such a leaf."""

OF_BLOCKS = {"qkv_bias": "blocks.{i}.attn.q", "out_bias": "blocks.{i}.attn.o", "mlp_bias": "blocks.{i}.mlp.up"}
"""Fields that are true where these components have a bias."""

WITHIN_BLOCKS = ("blocks.{i}.attn.", "blocks.{i}.mlp.")


class Lying(NamedTuple):
    """A leaf, of the first layer if of any, in a tensor of the file."""

    pattern: Pattern
    shape: Shape

    @property
    def outputs(self) -> int:
        """Of a linear map.  Axes of length 1 say nothing."""
        axes = [size for size in self.shape if size != 1] or [1]
        return axes[-1 if "transposed" in self.pattern.words else 0]

    def size(self, *others: int) -> int:
        """One of the sizes of a leaf, whose other sizes are given."""
        return prod(self.shape) // max(1, prod(others))


def sizes(leaves: Mapping[str, Lying], layers: int, given: Mapping[str, Any]) -> dict[str, int]:
    """What shapes tell, of a file with tensors for so many ``layers``."""
    found = {"weight_sets" if given.get("weight_sets") else "layers": layers}
    d_model = width = found["d_model"] = leaves["blocks.{i}.attn.o.weight"].outputs
    found["d_ff"] = 0
    if down := leaves.get("blocks.{i}.mlp.down.weight"):
        found["d_ff"] = down.size(d_model)
    if project := leaves.get("embed.project.weight"):
        width = found["d_embed"] = project.size(d_model)
    if token := leaves.get("embed.token.weight"):
        found["vocab"] = token.size(width)
    if segment := leaves.get("embed.segment.weight"):
        found["segments"] = segment.size(width)
    if (position := leaves.get("embed.position.weight")) and token:
        found["seq_len"] = position.size(width) - (given.get("position_offset") or 0)
    if (patch := leaves.get("embed.patch.weight")) and isinstance(side := given.get("patch_size"), int):
        found["channels"] = patch.size(d_model, side, side)
    if (head := leaves.get("head.weight")) and given.get("loss") in ("token", "sequence", "regression"):
        joined = given.get("pool") == "first_mean" and "pooler.weight" not in leaves
        found["labels"] = head.size(width if "head.transform.weight" in leaves else d_model * (1 + joined))
    return found


def choices(leaves: Mapping[str, Lying]) -> dict[str, Any]:
    """What is told by which leaves there are."""
    biased = {leaf.removesuffix(".bias") for leaf in leaves if leaf.endswith(".bias")} - {"head"}
    found: dict[str, Any] = {field: leaf in leaves for field, leaf in OPTIONS.items()}
    found |= {field: component in biased for field, component in OF_BLOCKS.items()}
    found["bias"] = any(not component.startswith(WITHIN_BLOCKS) for component in biased)
    if "embed.position.weight" in leaves:
        found["positions"] = "learned"
    if "blocks.{i}.norm1.weight" not in leaves:
        found["norm"] = "none"
    return found


def untold(leaves: Mapping[str, Lying], fields: Mapping[str, Any]) -> list[str]:
    """What somebody must say, with what it can be, and has not."""
    return [f"{field}: {options(field)}" for field in _needed(leaves, fields) if field not in fields]


def _needed(leaves: Mapping[str, Lying], fields: Mapping[str, Any]) -> Iterator[str]:
    """Fields without which nobody knows what the model computes: their defaults would be guesses."""
    yield from ("heads", "placement", "causal", "positions", "norm")
    if fields.get("norm") != "none":
        yield "norm_eps"
    if fields.get("d_ff") or fields.get("head_transform"):
        yield "activation"
    if fields.get("positions") == "rotary" and "rotary_frequencies" not in fields:
        yield "rotary_base"
    if "embed.patch.weight" in leaves:
        yield from ("image_size", "patch_size")
    if "head.weight" in leaves or fields.get("tied"):
        yield "loss"
    if fields.get("loss") in ("sequence", "regression"):
        yield "pool"


def options(field: str) -> str:
    """What a field can be, in words."""
    annotation = Spec.model_fields[field].annotation
    if annotation is bool:
        return "true or false"
    names = [name for name in _flat(annotation) if isinstance(name, str)]
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "NUMBER"


def _flat(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    for one in inner:
        yield from _flat(one)
    if not inner:
        yield annotation
