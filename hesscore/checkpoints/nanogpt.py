"""nanoGPT's ``ckpt.pt``: fused q, k and v, a tied head, and the architecture in ``model_args``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hesscore.checkpoints.config import architecture
from hesscore.checkpoints.family import Content, Family, Head, numbered
from hesscore.checkpoints.places import Place, Shape, fused, linear
from hesscore.checkpoints.reading import Stored
from hesscore.checkpoints.tensors import listed, plain
from hesscore.errors import InputError
from hesscore.files import short
from hesscore.spec import Loss, Spec
from hesscore.wiring.names import Named

MODULES = {
    "embed.token": "transformer.wte",
    "embed.position": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
FUSED = ("attn.q", "attn.k", "attn.v")
MASK = "a buffer: the causal mask, no parameter"
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"

_SIZE = (int | np.integer, "a whole number", 1, 2**31 - 1)
ARGS: dict[str, tuple[Any, str, int, int]] = {
    "n_layer": _SIZE,
    "n_head": _SIZE,
    "n_embd": _SIZE,
    "block_size": _SIZE,
    "vocab_size": _SIZE,
    "bias": (bool, "true or false", False, True),
    "dropout": (int | float | np.integer | np.floating, "a number", 0, 1),
}
"""The entries of ``model_args``: their types, what to call these, and the least and the most."""


class NanoGPT(Family):
    """A GPT-2 with LayerNorm before each part and one fused matrix for q, k and v; GELU by erf."""

    name = "nanoGPT"

    def recognises(self, names: Iterable[str], stored: Stored) -> bool:
        return "model_args" in stored.beside

    def own(self, key: str) -> str:
        return re.sub(r"(?:^|(?<=\.))model\.", "", super().own(key))

    def spec(self, content: Content) -> Spec:
        args = check_args(content.stored.beside["model_args"])
        without_masks(content, args["block_size"])
        count = numbered(content.tensors, r"transformer\.h\.(\d+)\.")
        if count != args["n_layer"]:
            raise InputError(f"model_args say n_layer {args['n_layer']}, but there are {count} blocks")
        if args["dropout"]:
            content.notes.append(f"trained with dropout {args['dropout']:g}, which is off here")
        tied = content.tied(HEAD, TABLE)
        loss, _ = content.head([Head("causal_lm", TABLE if tied else HEAD, re.escape(HEAD))])
        return spec_of(args, tied, loss)

    def place(self, at: Named, leaf: Shape, spec: Spec) -> Place:
        """``blocks.0.attn.k.bias``, say, lies in ``transformer.h.0.attn.c_attn.bias[d:2d]``."""
        layer, part, kind = at
        block = "" if layer is None else f"transformer.h.{layer}."
        if part in FUSED:
            return fused(f"{block}attn.c_attn.{kind}", leaf, FUSED.index(part), len(FUSED))
        return linear(f"{block}{MODULES[part]}.{kind}", part, leaf)


def spec_of(args: Mapping[str, Any], tied: bool, loss: Loss = "causal_lm") -> Spec:
    """The architecture that ``model_args`` stand for."""
    return architecture(
        d_model=args["n_embd"],
        d_ff=4 * args["n_embd"],
        layers=args["n_layer"],
        heads=args["n_head"],
        vocab=args["vocab_size"],
        placement="pre",
        norm="layernorm",
        norm_eps=1e-5,
        causal=True,
        activation="gelu",
        bias=args["bias"],
        positions="learned",
        loss=loss,
        tied=tied and loss == "causal_lm",
        seq_len=args["block_size"],
    )


def check_args(args: object) -> dict[str, Any]:
    """``model_args`` as Python's own numbers; an ``InputError`` names the entry at fault."""
    if not isinstance(args, dict):
        raise InputError(f"model_args is of type {type(args).__name__}, not a dictionary")
    args = {"dropout": 0.0} | plain(args)
    missing = [name for name in ARGS if name not in args]
    if missing:
        raise InputError(f"model_args has no {listed(missing)}: shapes alone do not tell, so add it")
    unknown = [name for name in args if name not in ARGS]
    if unknown:
        raise InputError(f"model_args has {listed(unknown)}, which nanoGPT has not: is it a variant of it?")
    for name, (types, what, least, most) in ARGS.items():
        value = args[name]
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise InputError(f"model_args: {name} is of type {type(value).__name__}, not {what}")
        if not least <= value <= most:
            raise InputError(f"model_args: {name} is {short(value)}, not {what} from {least} to {most}")
        args[name] = value.item() if isinstance(value, np.generic) else value
    if args["n_embd"] % args["n_head"]:
        raise InputError(f"model_args: n_embd {args['n_embd']} is not divisible by n_head {args['n_head']}")
    return args


def without_masks(content: Content, block_size: int) -> None:
    """Leave out the buffers of older files: the causal mask, and the score of what it masks.

    Their names could be a parameter's, so it takes shape and value to tell that they are not.
    """
    for name, tensor in list(content.tensors.items()):
        if name.endswith(".attn.bias") and tensor.shape == (1, 1, block_size, block_size):
            if not torch.equal(tensor[0, 0] != 0, torch.ones(tensor.shape[2:]).tril() != 0):
                raise InputError(f"{short(name)} is not the causal mask, so this is not nanoGPT's attention")
            content.leave_out(re.escape(name), MASK, trained=False)
        elif name.endswith(".attn.masked_bias") and tensor.shape == ():
            content.leave_out(re.escape(name), MASK, trained=False)
