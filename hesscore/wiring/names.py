"""What the names of parameters say."""

from __future__ import annotations

from typing import NamedTuple


class Named(NamedTuple):
    """``blocks.3.attn.q.weight`` is layer 3, component ``attn.q``, parameter ``weight``."""

    layer: int | None
    component: str
    parameter: str


def place(name: str) -> Named:
    """Where a parameter stands; what is around the blocks has no layer."""
    module, _, parameter = name.rpartition(".")
    if not module.startswith("blocks."):
        return Named(None, module, parameter)
    _, layer, component = module.split(".", 2)
    return Named(int(layer), component, parameter)
