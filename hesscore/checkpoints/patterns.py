"""Names of tensors as somebody gives them: which leaves lie in each tensor, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch import Tensor

from hesscore.checkpoints.places import Place, Shape
from hesscore.errors import UsageError
from hesscore.fields import instead
from hesscore.files import short
from hesscore.spec import Spec
from hesscore.wiring.model import model

LAYER = "{i}"
"""Stands for the number of a layer, in our names and in the file's."""

NUMBER = r"(0|[1-9][0-9]{0,8})"

WORDS = ("transposed", "interleaved", "paired")
"""What may be said of how a tensor lies; without a word, as ``nn.Linear`` keeps it, ``(out, in)``."""

QKV, QK = {"attn.q", "attn.k", "attn.v"}, {"attn.q", "attn.k"}

FUSED = (QKV, {"mlp.up", "mlp.gate"})
"""Components whose output features may lie side by side in one tensor."""

GLOBS_SHOWN = 8

TABLES = ("embed.token.weight", "embed.segment.weight", "embed.position.weight", "embed.class.weight", "head.weight")
"""Matrices that are no linear weights of ours: they lie ``(rows, width)``, here and in files."""

_TEXT = Spec(
    d_model=2,
    d_ff=1,
    vocab=1,
    positions="learned",
    segments=1,
    d_embed=1,
    embed_norm=True,
    gated=True,
    layer_scale=True,
    head_transform=True,
    head_bias=True,
)
_IMAGES = Spec(
    d_model=2,
    d_ff=1,
    causal=False,
    image_size=1,
    patch_size=1,
    class_token=True,
    loss="sequence",
    labels=1,
    pooler=True,
)


def general(leaf: str) -> str:
    """The name of a leaf with ``{i}`` for the number of its layer."""
    return re.sub(rf"^blocks\.{NUMBER}\.", f"blocks.{LAYER}.", leaf)


LEAVES = tuple(dict.fromkeys(general(leaf) for spec in (_TEXT, _IMAGES) for leaf in model(spec).parameters))
"""Every one that a model may have."""


@dataclass(frozen=True)
class Pattern:
    """Leaves that lie side by side in one tensor, or, where their names and its have ``{i}``, in one of every layer."""

    leaves: tuple[str, ...]
    tensor: str
    words: frozenset[str]
    optional: bool
    """Whether a file may lack it."""
    key: str
    """The item that says so."""

    def layers(self, names: Iterable[str]) -> set[int]:
        """The numbers of the layers that have such a tensor."""
        rule = re.compile(re.escape(self.tensor).replace(re.escape(LAYER), NUMBER))
        return {int(found[1]) for name in names if (found := rule.fullmatch(name))}

    def place(self, leaf: str, tensor: str, stored: Shape, leaves: Mapping[str, Shape], spec: Spec) -> Place:
        """Where a leaf lies in a tensor of the shape ``stored``, given the shapes of all leaves.

        Axes of ours may be several in the file, as in the kernel of a convolution.
        """
        layer = leaf.split(".")[1]
        parts = [part.replace(LAYER, layer) for part in self.leaves]
        widths = [leaves[part][-1] for part in parts]
        groups = spec.groups if "interleaved" in self.words else 1
        start = sum(widths[: parts.index(leaf)]) // groups
        stop, step = start + leaves[leaf][-1] // groups, sum(widths) // groups
        laid = (*leaves[leaf][:-1], sum(widths))
        turned = len(laid) > 1 and (leaf in TABLES) == ("transposed" in self.words)
        wanted = laid[::-1] if turned else laid
        paired = "paired" in self.words and ".attn.v." not in leaf

        def take(tensor: Tensor) -> Tensor:
            whole = tensor.reshape(wanted)
            whole = whole.T if turned else whole
            part = whole.unflatten(-1, (groups, step))[..., start:stop].flatten(-2) if step > stop - start else whole
            return part.unflatten(-1, (-1, spec.head_width))[..., _halves(spec)].flatten(-2) if paired else part

        every = f" of every {step}" if groups > 1 else ""
        part = f"[{start}:{stop}{every}]" if step > stop - start else ""
        return Place(tensor, stored if merges(stored, wanted) else wanted, take, part)


def patterns(key: str, value: str, optional: bool = False) -> list[Pattern]:
    """What one item of a mapping of names says: ``blocks.{i}.attn.q+k+v: layers.{i}.qkv interleaved``, say.

    A name of ours without ``.weight`` or ``.bias`` stands for both, with these endings in the file, and it may lack
    the bias.  ``UsageError`` if the item says nothing.
    """
    tensor, *words = value.split() or [""]
    if not tensor or tensor.count(LAYER) != key.count(LAYER):
        raise UsageError(
            f"{short(key)}: {short(value) or 'nothing'} is not a name in the file, with {LAYER} where ours has it"
        )
    found = []
    for ending in [""] if key.endswith((".weight", ".bias")) else [".weight", ".bias"]:
        leaves = _leaves(key + ending)
        unknown = next((leaf for leaf in leaves if general(leaf) not in LEAVES), None)
        if unknown is None:
            _check_words(key, words, leaves)
            found.append(Pattern(leaves, tensor + ending, frozenset(words), optional or ending == ".bias", key))
        elif not found:
            known = [leaf.removesuffix(ending) for leaf in LEAVES]
            name = unknown.removesuffix(ending)
            raise UsageError(f"no part of a model is {short(name)}{instead(general(name), known)}")
    return found


def _leaves(name: str) -> tuple[str, ...]:
    """``blocks.0.attn.k.bias`` and ``blocks.0.attn.v.bias``, of ``blocks.0.attn.k+v.bias``."""
    module, _, kind = name.rpartition(".")
    before, dot, parts = module.rpartition(".")
    return tuple(f"{before}{dot}{part}.{kind}" for part in parts.split("+"))


def _check_words(key: str, words: list[str], leaves: tuple[str, ...]) -> None:
    components = {leaf.split(".", 2)[-1].rpartition(".")[0] for leaf in leaves}
    if len(leaves) > 1 and (len(components) < len(leaves) or not any(components <= fused for fused in FUSED)):
        raise UsageError(f"{short(key)}: only q, k and v, or up and gate, lie side by side in a tensor")
    fit = {"interleaved": len(leaves) > 1 and components <= QKV, "paired": bool(components & QK), "transposed": True}
    for word in words:
        if word not in WORDS:
            raise UsageError(f"{short(key)}: {short(word)} is not one of {', '.join(WORDS)}{instead(word, WORDS)}")
        if not fit[word]:
            raise UsageError(f"{short(key)}: {word} is for {'q+k+v' if word == 'interleaved' else 'q and k'}")


def merges(stored: Shape, wanted: Shape) -> bool:
    """Whether axes that lie beside each other in ``stored``, taken together, are ``wanted``."""
    return prod(stored) == prod(wanted) and set(accumulate(wanted, mul)) <= {1, *accumulate(stored, mul)}


def _halves(spec: Spec) -> Tensor:
    """Of a head whose features are rotated in pairs of neighbours: those of one half of ours, then of the other."""
    rotated = torch.arange(spec.rotated)
    return torch.cat([rotated[::2], rotated[1::2], torch.arange(spec.rotated, spec.head_width)])


def globs(names: Iterable[str], used: Iterable[str]) -> list[str]:
    """The shortest patterns that match ``names`` and none that is ``used``; a few of them if there are many."""
    taken = {".".join(parts[:n]) for parts in (name.split(".") for name in used) for n in range(1, len(parts))}
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        starts = (".".join(parts[:n]) for n in range(1, len(parts)))
        start = next((start for start in starts if start not in taken), None)
        found[f"{start}.*" if start else name] = None
    shown = list(found)
    return [*shown[:GLOBS_SHOWN], "..."] if len(shown) > GLOBS_SHOWN else shown
