"""A nanoGPT checkpoint means to us what it means to nanoGPT."""

import re
from collections import OrderedDict
from itertools import permutations

import numpy as np
import pytest
import torch

from hesscore.checkpoints import load
from hesscore.checkpoints.family import Family
from hesscore.checkpoints.nanogpt import NanoGPT
from hesscore.wiring.model import model
from tests.checkpoints import ARGS, assert_same_model, saved
from tests.reference_nanogpt import state_dict


def renamed(state, rule):
    return {rule(name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradient_are_nanogpts(tmp_path, bias, untied):
    args = ARGS | {"bias": bias}
    state = state_dict(args, untied=untied)
    path = saved(tmp_path, state, args)
    assert load(path).spec.tied is not untied
    assert load(path).spec.bias is bias
    assert_same_model(path, state, args)


@pytest.mark.parametrize(
    "prefix",
    [
        "".join(f"{wrapper}." for wrapper in wrappers)
        for count in (1, 2, 3)
        for wrappers in permutations(["_orig_mod", "module", "model"], count)
    ]
    + ["module.module._orig_mod."],
)
def test_prefixes_of_wrappers_are_seen_through_and_reported(tmp_path, prefix):
    state = state_dict(ARGS)
    path = saved(tmp_path, renamed(state, lambda name: prefix + name))
    assert_same_model(path, state, ARGS)
    places = load(path).tensors
    assert places["blocks.1.attn.k.weight"] == f"{prefix}transformer.h.1.attn.c_attn.weight[8:16]"


def test_a_wrapper_inside_is_seen_through(tmp_path):
    state = state_dict(ARGS)
    compiled = renamed(state, lambda name: re.sub(r"^transformer\.h\.\d\.", r"\g<0>_orig_mod.", name))
    assert_same_model(saved(tmp_path, compiled), state, ARGS)


def test_an_absent_head_is_tied(tmp_path):
    state = state_dict(ARGS)
    del state["lm_head.weight"]
    path = saved(tmp_path, state)
    assert load(path).spec.tied
    assert_same_model(path, state, ARGS)


def test_an_equal_head_is_tied_though_it_is_stored_twice(tmp_path):
    state = state_dict(ARGS)
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    path = saved(tmp_path, state)
    assert (load(path).spec.tied, load(path).notes) == (True, [])


def test_an_untied_head_is_noted(tmp_path):
    checkpoint = load(saved(tmp_path, state_dict(ARGS, untied=True)))
    assert checkpoint.notes == ["lm_head.weight differs from transformer.wte.weight: the head is not tied"]
    assert checkpoint.tensors["head.weight"] == "lm_head.weight"


def test_a_padded_vocabulary_is_the_models(tmp_path):
    args = ARGS | {"vocab_size": 64}
    state = state_dict(args)
    path = saved(tmp_path, state, args)
    assert load(path).spec.vocab == 64
    assert_same_model(path, state, args)


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8, torch.bool])
def test_masks_of_old_files_are_no_parameters(tmp_path, kind):
    state = state_dict(ARGS)
    masks = {}
    for layer in range(2):
        masks[f"transformer.h.{layer}.attn.bias"] = torch.ones(6, 6).tril().view(1, 1, 6, 6).to(kind)
        masks[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    assert_same_model(saved(tmp_path, state | masks), state, ARGS)


def test_the_spec_is_nanogpts_architecture(tmp_path):
    spec = load(saved(tmp_path, state_dict(ARGS))).spec
    assert (spec.layers, spec.heads, spec.d_model, spec.d_ff, spec.seq_len, spec.vocab) == (
        2,
        2,
        8,
        32,
        6,
        11,
    )
    assert (spec.placement, spec.norm, spec.norm_eps, spec.positions) == ("pre", "layernorm", 1e-5, "learned")
    assert (spec.activation, spec.gated, spec.causal) == ("gelu", False, True)


def test_every_leaf_is_a_view_of_its_place(tmp_path):
    state = state_dict(ARGS)
    checkpoint = load(saved(tmp_path, state))
    shapes = {leaf: tuple(tensor.shape) for leaf, tensor in checkpoint.parameters.items()}
    assert shapes == model(checkpoint.spec).parameters
    assert list(checkpoint.tensors) == list(shapes)
    q, v = (checkpoint.parameters[f"blocks.0.attn.{part}.weight"] for part in "qv")
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert torch.equal(v, state["transformer.h.0.attn.c_attn.weight"][16:24].T)
    assert checkpoint.tensors["blocks.0.attn.v.weight"] == "transformer.h.0.attn.c_attn.weight[16:24]"
    assert checkpoint.tensors["blocks.0.attn.q.bias"] == "transformer.h.0.attn.c_attn.bias[0:8]"
    assert checkpoint.tensors["blocks.1.mlp.up.weight"] == "transformer.h.1.mlp.c_fc.weight"


def test_views_cover_every_number_of_the_tensors_once(tmp_path):
    spec = load(saved(tmp_path, state_dict(ARGS))).spec
    counts = {place.name: torch.zeros(place.shape) for place in NanoGPT().places(spec).values()}
    for view in NanoGPT().views(counts, spec).values():
        view += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize(
    ("kind", "notes"),
    [
        (torch.float64, []),
        (torch.float32, []),
        (torch.float16, ["weights stored in float16"]),
        (torch.bfloat16, ["weights stored in bfloat16"]),
    ],
)
def test_the_dtype_is_kept_and_half_precision_noted(tmp_path, kind, notes):
    checkpoint = load(saved(tmp_path, {name: t.to(kind) for name, t in state_dict(ARGS).items()}))
    assert {tensor.dtype for tensor in checkpoint.parameters.values()} == {kind}
    assert checkpoint.notes == notes
    assert checkpoint.family == "nanoGPT"


def test_dropout_is_noted(tmp_path):
    checkpoint = load(saved(tmp_path, state_dict(ARGS), ARGS | {"dropout": 0.2}))
    assert checkpoint.notes == ["trained with dropout 0.2, which is off here"]


def test_parameters_of_a_module_are_taken_without_their_autograd(tmp_path):
    state = {name: torch.nn.Parameter(tensor) for name, tensor in state_dict(ARGS).items()}
    checkpoint = load(saved(tmp_path, OrderedDict(state)))
    assert not any(tensor.requires_grad for tensor in checkpoint.parameters.values())


@pytest.mark.parametrize("zipped", [True, False])
def test_whatever_else_a_training_script_saves_is_no_hindrance(tmp_path, zipped):
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in state_dict(ARGS).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = torch.nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()}).state_dict()
    assert vars(state)["_metadata"]  # what state_dict() writes beside its tensors
    for name in weights:
        state[name] = state.pop(name.replace(".", "/"))
    rest = {
        "best_val_loss": torch.tensor(1.5),
        "config": {"dtype": "bfloat16", "betas": (0.9, 0.95), "compile": True, "init_from": None, "seed": 2**40, 3: -1},
        "kinds": [torch.bfloat16, torch.device("cuda:0"), torch.device("cpu"), torch.Size([2, 3]), b"bytes"],
        "tensors": [
            torch.get_rng_state(),
            torch.nn.Parameter(torch.zeros(2)),
            torch.zeros(2, dtype=torch.cfloat).conj(),
        ],
    }
    content = {"model": state, "model_args": ARGS, "optimizer": optimizer.state_dict(), **rest}
    torch.save(content, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert_same_model(tmp_path / "ckpt.pt", dict(state), ARGS)


def test_harmless_numpy_scalars_are_read(tmp_path):
    args = ARGS | {"n_layer": np.int64(2), "n_embd": np.int32(8), "dropout": np.float64(0)}
    losses = {"best_val_loss": np.float32(1.5), "config": {"lr": np.float64(1e-3), "bias": np.bool_(True)}}
    path = saved(tmp_path, state_dict(ARGS), args, **losses)
    before = set(torch.serialization.get_safe_globals())
    assert load(path).spec.layers == 2
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_family_registers_by_being_defined():
    assert type(Family.registry["nanoGPT"]) is NanoGPT
