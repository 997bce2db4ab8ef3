"""A small file whose tensors have names of their own, and what a ``--spec`` file says of them."""

import pytest
import torch
import yaml

from hesscore.checkpoints import load
from hesscore.errors import HessError
from hesscore.spec import Spec
from hesscore.wiring.model import parameters

SPEC = Spec(d_model=4, d_ff=6, layers=2, heads=2, vocab=5)
FIELDS = {
    "heads": 2,
    "placement": "pre",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "causal": True,
    "positions": "none",
    "activation": "gelu",
    "loss": "causal_lm",
}
NAMES = {
    "embed.token": "table",
    "blocks.{i}.norm1": "net.{i}.norm_a",
    "blocks.{i}.attn.q+k+v": "net.{i}.qkv",
    "blocks.{i}.attn.o": "net.{i}.out",
    "blocks.{i}.norm2": "net.{i}.norm_b",
    "blocks.{i}.mlp.up": "net.{i}.up",
    "blocks.{i}.mlp.down": "net.{i}.down",
    "final_norm": "norm",
    "head.weight": "out",
}


def drawn(spec, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(leaf.shape, generator=rng) for name, leaf in parameters(spec).items()}


def state_of(spec=SPEC, seed=0):
    """What ``NAMES`` are of."""
    weights = drawn(spec, seed)
    state = {"table.weight": weights["embed.token.weight"], "out": weights["head.weight"]}
    parts = {"norm_a": "norm1", "out": "attn.o", "norm_b": "norm2", "up": "mlp.up", "down": "mlp.down"}
    for kind in "weight", "bias":
        state[f"norm.{kind}"] = weights[f"final_norm.{kind}"]
        for i in range(spec.layers):
            qkv = [weights[f"blocks.{i}.attn.{part}.{kind}"] for part in "qkv"]
            own = {theirs: weights[f"blocks.{i}.{ours}.{kind}"] for theirs, ours in parts.items()}
            for theirs, leaf in (own | {"qkv": torch.cat(qkv, -1)}).items():
                state[f"net.{i}.{theirs}.{kind}"] = leaf.T.clone() if leaf.ndim == 2 else leaf
    return state


def loaded(folder, state=None, names=(), asked=None, **fields):
    """What comes of a state dict by names and fields; ``None`` leaves one out, and ``asked`` is the loss."""
    names = {ours: theirs for ours, theirs in (NAMES | dict(names)).items() if theirs is not None}
    fields = {field: value for field, value in (FIELDS | fields).items() if value is not None}
    (folder / "spec.yaml").write_text(yaml.safe_dump(fields | {"names": names}, sort_keys=False))
    torch.save(state_of() if state is None else state, folder / "model.pt")
    return load(folder / "model.pt", asked, folder / "spec.yaml")


def fault(folder, *args, **fields):
    """The code and the message where nothing comes of it, with SPEC and FILE for the files."""
    with pytest.raises(HessError) as caught:
        loaded(folder, *args, **fields)
    message = str(caught.value)
    assert "\n" not in message
    for name, path in ("SPEC", "spec.yaml"), ("FILE", "model.pt"):
        message = message.replace(f"{folder}/{path}", name)
    return caught.value.code, message
