"""nanoGPT's ``ckpt.pt``: fused q, k and v, a tied head, and the architecture in ``model_args``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hesscore.checkpoints.family import Family, Place, Weights
from hesscore.checkpoints.tensors import check_float, check_memory, listed, plain, tensors_in
from hesscore.errors import InputError
from hesscore.files import short
from hesscore.spec import Spec
from hesscore.wiring.model import model

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
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module|model)\.")
"""What torch.compile, DistributedDataParallel and modules around the model put before names, in any order."""

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
    marks = "model and model_args"

    def recognises(self, content: Mapping[Any, Any]) -> bool:
        return "model_args" in content

    def weights(self, content: Mapping[Any, Any], size: int) -> Weights:
        args = check_args(content["model_args"])
        if not isinstance(content.get("model"), dict):
            raise InputError("has no dictionary of tensors under model: put model.state_dict() there")
        tensors, stored_as = unwrapped(tensors_in(content["model"]))
        head, table = tensors.get(HEAD), tensors.get(TABLE)
        if head is not None and table is not None and same_memory(head, table):
            del tensors[HEAD]
        check_memory(tensors, size)
        tensors = without_masks(tensors, args["block_size"])
        for name, tensor in tensors.items():
            check_float(stored_as[name], tensor)
        blocks = {name.split(".")[2] for name in tensors if re.match(r"transformer\.h\.\d+\.", name)}
        if len(blocks) != args["n_layer"]:
            raise InputError(f"model_args say n_layer {args['n_layer']}, but there are {len(blocks)} blocks")

        notes = []
        if args["dropout"]:
            notes.append(f"trained with dropout {args['dropout']:g}, which is off here")
        if HEAD in tensors and TABLE in tensors:
            if same_values(tensors[HEAD], tensors[TABLE]):
                del tensors[HEAD]
            else:
                notes.append(f"{HEAD} differs from {TABLE}: the head is not tied")
        return Weights(spec_of(args, tied=HEAD not in tensors), tensors, stored_as, notes)

    def places(self, spec: Spec) -> dict[str, Place]:
        return {leaf: place(leaf, spec.d_model) for leaf in model(spec).parameters}


def spec_of(args: Mapping[str, Any], tied: bool) -> Spec:
    """The architecture that ``model_args`` stand for."""
    return Spec(
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
        tied=tied,
        seq_len=args["block_size"],
    )


def place(leaf: str, d: int) -> Place:
    """``blocks.0.attn.k.bias``, say, lies in ``transformer.h.0.attn.c_attn.bias[d:2d]``."""
    module, _, kind = leaf.rpartition(".")
    block, part = "", module
    if module.startswith("blocks."):
        _, layer, part = module.split(".", 2)
        block = f"transformer.h.{layer}."
    transposed = kind == "weight" and part.startswith(("attn.", "mlp."))  # nn.Linear keeps (out, in)
    if part in FUSED:
        start = FUSED.index(part) * d
        return Place(f"{block}attn.c_attn.{kind}", transposed, range(start, start + d))
    return Place(f"{block}{MODULES[part]}.{kind}", transposed)


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


def unwrapped(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by nanoGPT's own names, and the key of each in the file."""
    stored_as: dict[str, str] = {}
    for key in state:
        name = WRAPPERS.sub("", key)
        if name in stored_as:
            raise InputError(f"{listed([stored_as[name], key])} are two tensors for one place: keep one")
        stored_as[name] = key
    return {name: state[key] for name, key in stored_as.items()}, stored_as


def without_masks(tensors: Mapping[str, Tensor], block_size: int) -> dict[str, Tensor]:
    """Leave out the buffers of older files: the causal mask, and the score of what it masks.

    Their names could be a parameter's, so it takes shape and value to tell that they are not.
    """
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".attn.bias") and tensor.shape == (1, 1, block_size, block_size):
            if not torch.equal(tensor[0, 0] != 0, torch.ones(tensor.shape[2:]).tril() != 0):
                raise InputError(f"{short(name)} is not the causal mask, so this is not nanoGPT's attention")
            del kept[name]
        elif name.endswith(".attn.masked_bias") and tensor.shape == ():
            del kept[name]
    return kept


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.is_set_to(b)


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
