"""``nn.TransformerEncoder`` of PyTorch: its names, and what to say where a file has them and no more."""

from __future__ import annotations

import re
from collections.abc import Collection

from hesscore.checkpoints.patterns import globs

NAME = "nn.TransformerEncoder"

NAMES = {
    "blocks.{i}.norm1": "layers.{i}.norm1",
    "blocks.{i}.attn.q+k+v.weight": "layers.{i}.self_attn.in_proj_weight",
    "blocks.{i}.attn.q+k+v.bias": "layers.{i}.self_attn.in_proj_bias",
    "blocks.{i}.attn.o": "layers.{i}.self_attn.out_proj",
    "blocks.{i}.norm2": "layers.{i}.norm2",
    "blocks.{i}.mlp.up": "layers.{i}.linear1",
    "blocks.{i}.mlp.down": "layers.{i}.linear2",
    "final_norm": "norm",
}
"""The biases and the last norm may be missing."""

FIELDS = {"norm": "layernorm", "norm_eps": 1e-5, "causal": False, "positions": "none"}
"""Of a ``Spec``, by default."""

MARK = re.compile(r"(.*\.)?layers\.0\.self_attn\.in_proj_weight")


def prefixes(names: Collection[str]) -> list[str]:
    """What stands before the layers of each encoder.  A decoder's have one attention more."""
    starts = [match[1] or "" for name in names if (match := MARK.fullmatch(name))]
    return [start for start in starts if f"{start}layers.0.multihead_attn.in_proj_weight" not in names]


def advice(names: Collection[str]) -> str | None:
    """What to write into a ``--spec`` file for a file with these tensors; ``None`` if it holds no encoder."""
    found = prefixes(names)
    if not found:
        return None
    prefix = found[0]
    lines = [f"family: {NAME}"]
    lines += [f"prefix: {prefix}"] if prefix else []
    lines += ["heads: NHEAD", "placement: post (pre if norm_first)", "activation: relu or gelu"]
    own = f"{prefix}layers.", f"{prefix}norm."
    used, rest = ([name for name in names if name.startswith(own) == mine] for mine in (True, False))
    ignored = globs(rest, used)
    lines += [f"ignore: [{', '.join(ignored)}]"] if ignored else []
    which = f"the first of {len(found)}" if len(found) > 1 else "an"
    return (
        f"holds {which} {NAME} without its heads, norm_first and activation: "
        f"write {{{', '.join(lines)}}} into a file, and give it with --spec"
    )
