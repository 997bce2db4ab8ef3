"""Checkpoints: a nanoGPT file means to us what it means to nanoGPT, or it is refused in one clear line."""

import hashlib
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hesscore.chain import Point
from hesscore.checkpoints import load
from hesscore.checkpoints.family import Family
from hesscore.checkpoints.nanogpt import NanoGPT
from hesscore.errors import InputError
from hesscore.wiring.model import inputs, model
from tests import reference_nanogpt
from tests.reference_nanogpt import state_dict

ARGS = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 8,
    "block_size": 6,
    "vocab_size": 11,
    "bias": True,
    "dropout": 0.0,
}
TOKENS = torch.tensor([[1, 4, 4, 0, 9, 10], [7, 2, 3, 4, 5, 6]])
TARGETS = torch.tensor([[4, 4, 0, 9, 10, 3], [2, 3, 4, 5, 6, -100]])


def saved(folder, state, args=ARGS, **rest):
    path = folder / "ckpt.pt"
    torch.save({"model": state, "model_args": args, "iter_num": 7, **rest}, path)
    return path


def renamed(state, rule):
    return {rule(name): tensor for name, tensor in state.items()}


def assert_same_model(path, state, args):
    """Our loss and gradient, the latter mapped back to the file's layout, are nanoGPT's."""
    checkpoint = load(path)
    state = {name: tensor.double().requires_grad_() for name, tensor in state.items()}
    if checkpoint.spec.tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    expected = reference_nanogpt.loss(state, args, TOKENS, TARGETS)
    expected.backward()

    graph = model(checkpoint.spec)
    leaves = {name: tensor.double() for name, tensor in checkpoint.parameters.items()}
    point = Point(graph, leaves | inputs(checkpoint.spec, TOKENS, TARGETS))
    assert abs(point.output.item() - expected.item()) < 1e-12

    gradients = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}
    found = point.gradient(graph.parameter_positions)
    for leaf, view in NanoGPT().views(gradients, checkpoint.spec).items():
        view.copy_(found[graph.index[leaf]][0])
    for name, tensor in state.items():
        if name != "lm_head.weight" or not checkpoint.spec.tied:
            assert (gradients[name] - tensor.grad).norm() <= 1e-10 * tensor.grad.norm(), name


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
    "prefix", ["_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.", "module.module._orig_mod."]
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


def test_views_cover_every_number_of_the_tensors_once():
    spec = NanoGPT().weights({"model": state_dict(ARGS), "model_args": ARGS}, 10**6).spec
    counts = {name: torch.zeros(shape) for name, shape in NanoGPT().shapes(spec).items()}
    for view in NanoGPT().views(counts, spec).values():
        view += 1
    assert all((count == 1).all() for count in counts.values())


def test_the_sha256_is_the_files(tmp_path):
    path = saved(tmp_path, state_dict(ARGS))
    assert load(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


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


def test_harmless_numpy_scalars_are_read(tmp_path):
    args = ARGS | {"n_layer": np.int64(2), "n_embd": np.int32(8), "dropout": np.float64(0)}
    losses = {"best_val_loss": np.float32(1.5), "config": {"lr": np.float64(1e-3), "bias": np.bool_(True)}}
    path = saved(tmp_path, state_dict(ARGS), args, **losses)
    before = set(torch.serialization.get_safe_globals())
    assert load(path).spec.layers == 2
    assert set(torch.serialization.get_safe_globals()) == before


def test_the_legacy_format_is_read(tmp_path):
    path = tmp_path / "ckpt.pt"
    content = {"model": state_dict(ARGS), "model_args": ARGS}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert_same_model(path, content["model"], ARGS)


def test_a_family_registers_by_being_defined():
    assert {name: type(family) for name, family in Family.registry.items()} == {"nanoGPT": NanoGPT}


# What is refused: the message is the whole of what a user sees.


def refusal(path):
    with pytest.raises(InputError) as caught:
        load(path)
    name, _, message = str(caught.value).partition(f"{path}: ")
    assert (name, caught.value.code, "\n" in message) == ("", 3, False)
    return message


RESAVE = "torch.save only tensors and numbers: {'model': model.state_dict(), 'model_args': ...}"


def test_no_file_and_folders(tmp_path):
    assert refusal(tmp_path / "none.pt") == "no such file"
    assert refusal(tmp_path) == "a folder with nothing in it"
    (tmp_path / "a.txt").touch()
    (tmp_path / "z.pt").touch()
    assert refusal(tmp_path) == "a folder: name a file in it, such as z.pt"
    assert refusal(f"{tmp_path}/\0") == "cannot be read: embedded null byte"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == "not a regular file"


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
SAFETENSORS = (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32"' + b" " * 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (LFS, "a Git LFS pointer, not the file that it stands for: run git lfs pull"),
        (b"GGUF\x03\0\0\0", "a GGUF file: not supported, its weights are quantised"),
        (SAFETENSORS, "a safetensors file: not supported yet, only nanoGPT's ckpt.pt is"),
        (b"some text", "not a checkpoint: no file of torch.save begins with b'some tex'"),
        (b"\x89PNG\r\n\x1a\n\0", r"not a checkpoint: no file of torch.save begins with b'\x89PNG\r\n\x1a\n'"),
        (b"x", "not a checkpoint: no file of torch.save begins with b'x'"),
        (pickle.dumps({"model": {}}), f"a pickle, but not by torch.save; {RESAVE}"),
        (b"PK\x03\x04", "cut short or damaged: a zip archive without a sound end; copy it again"),
        (b"\x80\x02}", "damaged, or not a checkpoint: pickle exhausted before seeing STOP"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, content, message):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(content)
    assert refusal(path) == message


def test_random_bytes_are_refused_whatever_they_are(tmp_path):
    path = tmp_path / "ckpt.pt"
    rng = np.random.default_rng(0)
    for magic in (b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."):
        for _ in range(20):
            path.write_bytes(magic + rng.bytes(200))
            refusal(path)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_checkpoint(tmp_path, share):
    path = saved(tmp_path, state_dict(ARGS))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert refusal(path) == "cut short or damaged: a zip archive without a sound end; copy it again"


def test_a_damaged_checkpoint_is_refused_or_reads_as_a_checkpoint(tmp_path):
    path = saved(tmp_path, state_dict(ARGS))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for start in rng.integers(0, len(whole) - 8, 150):
        path.write_bytes(whole[:start] + rng.bytes(8) + whole[start + 8 :])
        try:
            load(path)
        except InputError:
            continue


def zipped(path, pickled, compression=zipfile.ZIP_STORED, **more):
    """What torch.save would write, with ``pickled`` for its pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("ckpt/data.pkl", pickled)
        archive.writestr("ckpt/version", "3\n")
        for name, content in more.items():
            archive.writestr(f"ckpt/{name}", content)
    return path


def test_archives_that_are_no_checkpoint(tmp_path):
    path = tmp_path / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    assert refusal(path) == "a zip archive, but not a checkpoint: no data.pkl in it"
    zipped(path, pickle.dumps({}, 2), zipfile.ZIP_DEFLATED, zeros=bytes(10**6))
    assert refusal(path) == "a compressed archive, which torch.save never writes: unpack and torch.save it"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert refusal(path) == f"a TorchScript archive, which holds code: torch.jit.load it, and {RESAVE}"


class Canary:
    """Unpickled by the usual means, this makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("way", ["zip", "legacy", "plain"])
def test_a_pickle_that_wants_code_is_refused_and_runs_nothing(tmp_path, way, protocol):
    path, canary = tmp_path / "ckpt.pt", tmp_path / "canary"
    content = {"model": Canary(canary), "model_args": ARGS}
    if way == "plain":
        path.write_bytes(pickle.dumps(content, protocol))
    else:
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=way == "zip")
    message = refusal(path)
    assert not canary.exists()
    if protocol == 2 or (protocol > 2 and way == "plain"):
        assert message == f"asks to run {os.system.__module__}.system on loading; nothing was run; {RESAVE}"
    if way == "plain":
        pickle.loads(path.read_bytes())
        assert canary.exists()  # so it was a canary


def test_the_result_of_a_call_is_not_called(tmp_path):
    method = pickle.dumps(Path.touch, 2)  # getattr(Path, "touch")
    path = zipped(tmp_path / "ckpt.pt", method[:-1] + b")R.")
    names = "__builtin__.getattr, pathlib.Path"
    assert refusal(path) == f"not sound: calls what is no function (it names {names}); nothing was run"


def test_another_pickle_protocol_is_explained(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"model": state_dict(ARGS), "model_args": ARGS}, path, pickle_protocol=4)
    assert refusal(path) == (
        "damaged, or not a checkpoint: its pickle protocol is not torch.save's own; "
        "torch.save it without pickle_protocol"
    )


def test_an_archive_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, state_dict(ARGS))
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same_model(path, state_dict(ARGS), ARGS)


UNKNOWN = "of no known family: only nanoGPT (model and model_args) so far; its keys are"
NO_MODEL = "has no dictionary of tensors under model: put model.state_dict() there"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], f"holds a list, not a dictionary; {RESAVE}"),
        ((ARGS, state_dict(ARGS)), f"holds a tuple, not a dictionary; {RESAVE}"),
        (torch.zeros(3), f"holds a Tensor, not a dictionary; {RESAVE}"),
        ({}, f"{UNKNOWN} none"),
        ({"model": state_dict(ARGS), 3: 4}, f"{UNKNOWN} model, <int>"),
        (
            state_dict(ARGS),
            f"{UNKNOWN} transformer.wte.weight, transformer.wpe.weight, transformer.h.0.ln_1.weight, "
            "transformer.h.0.ln_1.bias and 25 more",
        ),
        ({"model_args": ARGS}, NO_MODEL),
        ({"model_args": ARGS, "model": [torch.zeros(2)]}, NO_MODEL),
    ],
)
def test_the_wrong_content(tmp_path, content, message):
    path = tmp_path / "ckpt.pt"
    torch.save(content, path)
    assert refusal(path) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": None}, "model_args: n_head is of type NoneType, not a whole number"),
        ({"n_head": "2"}, "model_args: n_head is of type str, not a whole number"),
        ({"n_layer": True}, "model_args: n_layer is of type bool, not a whole number"),
        ({"n_layer": 2.0}, "model_args: n_layer is of type float, not a whole number"),
        ({"n_layer": torch.tensor(2)}, "model_args: n_layer is of type Tensor, not a whole number"),
        ({"block_size": 0}, "model_args: block_size is 0, which is not a size"),
        ({"vocab_size": -11}, "model_args: vocab_size is -11, which is not a size"),
        ({"n_embd": 2**40}, "model_args: n_embd is 1099511627776, which is not a size"),
        ({"n_head": 3}, "model_args: n_embd 8 is not divisible by n_head 3"),
        ({"bias": 1}, "model_args: bias is of type int, not true or false"),
        ({"dropout": "no"}, "model_args: dropout is of type str, not a number"),
        ({"n_layer": 3}, "model_args say n_layer 3, but there are 2 blocks"),
        ({"n_layer": 2**30}, "model_args say n_layer 1073741824, but there are 2 blocks"),
        ({"rope": 1}, "model_args has rope, which nanoGPT has not: is it a variant of it?"),
        (
            {"vocab_size": 12},
            "transformer.wte.weight has shape (11, 8); its architecture asks for (12, 8)",
        ),
        (
            {"block_size": 7},
            "transformer.wpe.weight has shape (6, 8); its architecture asks for (7, 8)",
        ),
        (
            {"bias": False},
            "not the tensors of its architecture; 13 unexpected: transformer.h.0.ln_1.bias, "
            "transformer.h.0.attn.c_attn.bias, transformer.h.0.attn.c_proj.bias, transformer.h.0.ln_2.bias "
            "and 9 more",
        ),
    ],
)
def test_model_args_that_are_odd_or_do_not_fit(tmp_path, change, message):
    assert refusal(saved(tmp_path, state_dict(ARGS), ARGS | change)) == message


def test_model_args_that_are_missing(tmp_path):
    few = {"n_layer": 2, "n_embd": 8, "vocab_size": 11}
    expected = "model_args has no n_head, block_size, bias: shapes alone do not tell, so add it"
    assert refusal(saved(tmp_path, state_dict(ARGS), few)) == expected
    assert refusal(saved(tmp_path, state_dict(ARGS), [])) == "model_args is of type list, not a dictionary"


def broken(name, change):
    def break_(state):
        state[name] = change(state[name])

    return break_


def poke(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


C_FC, LN_F = "transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.weight"
ORDINARY = "save it dense, in float32"
REAL = "save it in float32, as weights are real numbers"
TWICE = "shares its memory with other weights or itself: save a clone of it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken(C_FC, poke(torch.nan)), f"{C_FC} is NaN or infinite in 1 of 256 places: no curvature there"),
        (broken(LN_F, poke(-torch.inf)), f"{LN_F} is NaN or infinite in 1 of 8 places: no curvature there"),
        (broken(C_FC, lambda t: t.T.clone()), f"{C_FC} has shape (8, 32); its architecture asks for (32, 8)"),
        (broken(LN_F, lambda t: t[:0]), f"{LN_F} has shape (0,); its architecture asks for (8,)"),
        (broken(C_FC, lambda t: t.to(torch.int8)), f"{C_FC} holds int8 values: {REAL}"),
        (broken(C_FC, lambda t: t > 0), f"{C_FC} holds bool values: {REAL}"),
        (broken(C_FC, lambda t: t.to(torch.complex64)), f"{C_FC} holds complex64 values: {REAL}"),
        (broken(C_FC, lambda t: t.to(torch.float8_e4m3fn)), f"{C_FC} holds float8_e4m3fn values: {REAL}"),
        (
            broken(C_FC, Tensor.to_sparse),
            f"{C_FC} is not an ordinary tensor (sparse_coo, float64, on cpu): {ORDINARY}",
        ),
        (
            broken(C_FC, lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)),
            f"{C_FC} is not an ordinary tensor (strided, qint8, on cpu): {ORDINARY}",
        ),
        (
            broken(C_FC, lambda t: t.to("meta")),
            f"{C_FC} is not an ordinary tensor (strided, float64, on meta): {ORDINARY}",
        ),
        (
            broken(C_FC, lambda t: torch.nested.nested_tensor([t])),
            f"{C_FC} is not an ordinary tensor (strided, float64, on cpu): {ORDINARY}",
        ),
        (broken(C_FC, lambda t: 5), f"{C_FC} is of type int, not a tensor"),
        (broken(C_FC, lambda t: {"nested": t}), f"{C_FC} is of type dict, not a tensor"),
        (broken(LN_F, lambda t: t[:1].clone().expand(8)), f"{LN_F} {TWICE}"),
        (broken(C_FC, lambda t: t[:1, :1].expand(10**6, 10**6)), f"{C_FC} {TWICE}"),
        (lambda state: state.pop(C_FC), f"not the tensors of its architecture; 1 missing: {C_FC}"),
        (
            lambda state: state.update(lora=torch.zeros(2)),
            "not the tensors of its architecture; 1 unexpected: lora",
        ),
        (
            lambda state: state.update({"module.lm_head.weight": torch.zeros(11, 8)}),
            "lm_head.weight, module.lm_head.weight are two tensors for one place: keep one",
        ),
        (
            lambda state: state.update({"transformer.h.1.ln_1.weight": state["transformer.h.0.ln_1.weight"]}),
            f"transformer.h.1.ln_1.weight {TWICE}",
        ),
        (
            lambda state: state.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 6, 6)}),
            "transformer.h.0.attn.bias is not the causal mask, so this is not nanoGPT's attention",
        ),
        (
            lambda state: state.update({"transformer.h.0.attn.bias": torch.ones(8)}),
            "not the tensors of its architecture; 1 unexpected: transformer.h.0.attn.bias",
        ),
        (
            lambda state: state.update({"transformer.h.0.attn.masked_bias": torch.ones(8)}),
            "not the tensors of its architecture; 1 unexpected: transformer.h.0.attn.masked_bias",
        ),
        (lambda state: state.update({7: torch.ones(8)}), "a state dict has text for keys, not type int"),
        (
            lambda state: state.update({"x" * 1000: torch.ones(8)}),
            f"not the tensors of its architecture; 1 unexpected: {'x' * 80}...",
        ),
        (
            lambda state: [state.pop(name) for name in list(state)],
            "model_args say n_layer 2, but there are 0 blocks",
        ),
    ],
)
def test_tensors_that_are_odd_or_do_not_fit(tmp_path, change, message):
    state = state_dict(ARGS)
    change(state)
    assert refusal(saved(tmp_path, state)) == message


class Subclass(Tensor):
    pass


def test_a_tensor_subclass_is_refused(tmp_path):
    state = state_dict(ARGS)
    state[C_FC] = state[C_FC].as_subclass(Subclass)
    assert refusal(saved(tmp_path, state)) == (
        f"asks to run tests.test_checkpoints.Subclass on loading; nothing was run; {RESAVE}"
    )


def test_attributes_in_the_pickle_shadow_no_method(tmp_path):
    shadows = {name.upper(): "no method" for name in ("items", "keys", "detach", "untyped_storage", "numel")}
    state = OrderedDict(state_dict(ARGS))
    state.__dict__.update(shadows)
    state[C_FC].__dict__.update(shadows)
    path = saved(tmp_path, state)
    with zipfile.ZipFile(path) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    pickled = entries.pop("data.pkl")
    for name in shadows:
        assert pickled.count(name.encode()) == 1
        pickled = pickled.replace(name.encode(), name.lower().encode())
    assert_same_model(zipped(path, pickled, **entries), state_dict(ARGS), ARGS)


def test_more_memory_than_the_file_holds_is_refused(tmp_path):
    state = b"\x80\x02}(X\x0a\0\0\0model_args" + pickle.dumps(ARGS, 2)[2:-1]
    tensor = b"ctorch\nDoubleTensor\nJ\0\0\0\x10\x85R"  # DoubleTensor(2**28), 2 GiB, nowhere in the file
    forged = state + b"X\x05\0\0\0model}X\x01\0\0\0a" + tensor + b"su."
    path = zipped(tmp_path / "ckpt.pt", forged)
    assert re.fullmatch(r"its tensors are 2147483648 bytes, the file only \d+: save it again, whole", refusal(path))


def test_a_pickle_that_unfolds_without_end_is_refused(tmp_path):
    bomb = b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))  # t = (t, t), sixty times over
    message = "not sound: it unfolds to more than 10000000 objects"
    assert refusal(zipped(tmp_path / "ckpt.pt", b"\x80\x02})" + bomb + b"Ns.")) == message
    called = refusal(zipped(tmp_path / "ckpt.pt", b"\x80\x02]q\0(h\0h\0e)R."))
    assert called == "not sound: calls what is no function (it names none); nothing was run"


def test_deep_nesting_is_no_trouble(tmp_path):
    deep = b"\x80\x02" + b"}X\x01\0\0\0a" * 5000 + b"N" + b"s" * 5000 + b"."
    assert refusal(zipped(tmp_path / "ckpt.pt", deep)) == f"{UNKNOWN} a"
