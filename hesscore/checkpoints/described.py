"""Files of any kind, of which a ``--spec`` file says what their tensors are."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from hesscore.checkpoints.family import Checkpoint, Content, checked, same_values
from hesscore.checkpoints.patterns import LAYER, Pattern, general, globs
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.specfiles import Said, own
from hesscore.checkpoints.tensors import listed
from hesscore.checkpoints.told import Lying, choices, sizes, untold
from hesscore.checkpoints.torch_encoder import NAME, prefixes
from hesscore.errors import InputError, UsageError
from hesscore.fields import instead, validated
from hesscore.files import short
from hesscore.spec import MAX_LAYERS, Loss, Spec
from hesscore.wiring.model import model

OUT, TABLE, HEAD = "blocks.{i}.attn.o.weight", "embed.token.weight", "head.weight"

OF_HEADS = ("head.", "pooler.")
OF_HEADED = ("labels", "pool", "pooler", "pooled_norm", "head_transform", "head_bias", "tied")
"""Leaves, and fields of a spec, that are there for a head alone."""


class Matched(NamedTuple):
    """The patterns for which there are tensors, and the numbers of the layers in the file."""

    patterns: list[Pattern]
    layers: range

    def tensors(self, pattern: Pattern) -> list[str]:
        """Those of a pattern, by layers if it has any."""
        if LAYER not in pattern.tensor:
            return [pattern.tensor]
        return [pattern.tensor.replace(LAYER, str(number)) for number in self.layers]


def described(stored: Stored, said: Said, loss: Loss | None = None) -> Checkpoint:
    """The model that a ``--spec`` file makes of the tensors of another.

    Every tensor is named there, or ignored, and every leaf has one; else a ``UsageError`` says which has not.
    """
    content = Content.of(stored, own, loss)
    _ignore(said, content)
    matched = _match(said, content.tensors)
    spec = _spec(said, content, matched)
    leaves = model(spec).parameters
    lying = _leaves(said, content, matched, spec)
    if unnamed := dict.fromkeys(general(leaf) for leaf in leaves if leaf not in lying):
        raise said.error(f"no tensor is named for {listed(unnamed)}", "names")
    used = {tensor for _, tensor in lying.values()}
    if rest := [name for name in content.tensors if name not in used]:
        advice = f"if they are not to be analysed, add ignore: [{', '.join(globs(rest, used))}]"
        raise said.error(f"{len(rest)} tensors are neither named nor ignored: {listed(rest)}; {advice}")
    places = {}
    for leaf in leaves:
        pattern, tensor = lying[leaf]
        if "paired" in pattern.words and not spec.rotated:
            raise said.error(f"{pattern.key}: paired needs positions: rotary", "names", pattern.key)
        places[leaf] = pattern.place(leaf, tensor, tuple(content.tensors[tensor].shape), leaves, spec)
    return checked(said.family, content, spec, places)


def _ignore(said: Said, content: Content) -> None:
    for number, glob in enumerate(said.ignore):
        rule = re.compile(fnmatch.translate(glob))
        hit = [name for name, key in content.stored_as.items() if rule.match(name) or rule.match(key)]
        if not hit:
            starts = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in content.stored_as)
            near = instead(glob, [*content.stored_as.values(), *starts])
            raise said.error(f"ignore: no tensor is named like {short(glob)}{near}", "ignore", number)
        for name in hit:
            content.tensors.pop(name, None)
            content.left_out[content.stored_as[name]] = f"ignored by {said.path.name}"


def _match(said: Said, tensors: Mapping[str, Tensor]) -> Matched:
    found, numbers, literal = [], set[int](), set[str]()
    for pattern in said.patterns:
        layers = pattern.layers(tensors) if LAYER in pattern.tensor else set()
        if layers or pattern.tensor in tensors:
            found.append(pattern)
            numbers |= layers
            literal.update(leaf.split(".")[1] for leaf in pattern.leaves if not layers and leaf.startswith("blocks."))
        elif not pattern.optional:
            raise said.error(_no_tensor(pattern, tensors), "names", pattern.key)
    first = min(numbers, default=0)
    if numbers and max(numbers) - first >= len(numbers):
        hole = next(number for number in count(first) if number not in numbers)
        raise InputError(f"has tensors of layers {first} and {max(numbers)}, but none of layer {hole}")
    matched = Matched(found, range(first, first + max(len(numbers), len(literal))))
    if lacking := [name for pattern in found for name in matched.tensors(pattern) if name not in tensors]:
        raise InputError(f"lacks {listed(lacking)}, which other layers have")
    return matched


def _no_tensor(pattern: Pattern, tensors: Mapping[str, Tensor]) -> str:
    """That there is none of its name, and what may have been meant: a name, or a module if that was given."""
    ending = "" if pattern.key.endswith((".weight", ".bias")) else ".weight"
    names = dict.fromkeys(re.sub(r"(?<=\.)[0-9]+(?=\.)", LAYER, name) for name in tensors)
    known = [name.removesuffix(ending) for name in names if name.endswith(ending)]
    near = instead(pattern.tensor.removesuffix(ending), known)
    return f"{pattern.key}: no tensor is named {short(pattern.tensor)}{near}"


def _spec(said: Said, content: Content, matched: Matched) -> Spec:
    """What is said, and what the tensors tell."""
    lying: dict[str, Lying] = {}
    for pattern in matched.patterns:
        first = content.tensors[matched.tensors(pattern)[0]]
        for leaf in pattern.leaves:
            lying.setdefault(general(leaf), Lying(pattern, tuple(first.shape)))
    if OUT not in lying:
        found = prefixes(content.tensors) if said.family == NAME else []
        raise said.error(f"no tensor is named for {OUT}{''.join(f'; prefix: {prefix} has layers' for prefix in found)}")
    given = _with_loss(said, lying, content.loss)
    if given.get("loss") == "hidden":
        lying = {leaf: where for leaf, where in lying.items() if not leaf.startswith(OF_HEADS)}
    shapes = sizes(lying, len(matched.layers), given)
    for field, size in shapes.items():
        if given.get(field, size) != size:
            raise said.error(f"{field}: {short(given[field])} is not what the tensors have: {size}", field)
    fields = {**said.defaults, **shapes, **choices(lying), **given}
    if fields.get("loss") in ("causal_lm", "masked_lm") and TABLE in lying and "tied" not in given:
        fields["tied"] = HEAD not in lying or _tie(content, lying, matched)
    if missing := untold(lying, fields):
        raise said.error(f"the tensors do not tell everything: add {'; '.join(missing)}")
    try:
        spec = validated(Spec, fields, said.lines)
    except UsageError as error:
        raise said.error(str(error)) from error
    if spec.layers > MAX_LAYERS:
        raise said.error(f"layers: {spec.layers} are more than {MAX_LAYERS}", "layers")
    return spec


def _with_loss(said: Said, lying: Mapping[str, Lying], asked: Loss | None) -> dict[str, Any]:
    """The fields that are said, with the loss that is asked for, or none where there is no head."""
    given = dict(said.fields)
    if asked is not None and given.get("loss", asked) != asked != "hidden":
        here = f"loss: {short(given['loss'])} is what the head is scored by"
        raise said.error(f"{here}; --loss can be that or hidden, not {asked}", "loss")
    if asked == "hidden":
        given = {field: value for field, value in given.items() if field not in OF_HEADED}
    if asked or (HEAD not in lying and not given.get("tied")):
        given["loss"] = asked or given.get("loss", "hidden")
    return given


def _tie(content: Content, lying: dict[str, Lying], matched: Matched) -> bool:
    """Whether the head is the token table, as many files have it twice: it is left out then."""
    head, table = lying[HEAD].pattern, lying[TABLE].pattern
    if head.words != table.words or not same_values(content.tensors[head.tensor], content.tensors[table.tensor]):
        return False
    content.leave_out(re.escape(head.tensor), f"tied: it is {content.stored_as[table.tensor]}", trained=False)
    matched.patterns.remove(head)
    del lying[HEAD]
    return True


def _leaves(said: Said, content: Content, matched: Matched, spec: Spec) -> dict[str, tuple[Pattern, str]]:
    """The pattern and the tensor of every leaf that is named; those of heads that are not scored are left out."""
    known = model(spec).parameters
    together = spec.layers // (spec.weight_sets or spec.layers)
    found: dict[str, tuple[Pattern, str]] = {}
    keys: dict[str, str] = {}
    for pattern in matched.patterns:
        for layer, tensor in enumerate(matched.tensors(pattern)):
            leaves = [leaf.replace(LAYER, str(layer * together)) for leaf in pattern.leaves]
            if spec.objective == "hidden" and leaves[0].startswith(OF_HEADS):
                content.leave_out(re.escape(tensor), "of a head, which is not scored")
                continue
            if keys.setdefault(tensor, pattern.key) != pattern.key:
                raise said.error(f"{tensor} is named for {keys[tensor]} and {pattern.key}", "names", pattern.key)
            for leaf in leaves:
                if leaf in found or leaf not in known:
                    what = "is named twice" if leaf in found else "is no part of this architecture"
                    raise said.error(f"{leaf} {what}", "names", pattern.key)
                found[leaf] = pattern, tensor
    return found
