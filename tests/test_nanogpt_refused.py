"""nanoGPT checkpoints that are not what their model_args say: the message is the whole of what a user sees."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import ARGS, RESAVE, refusal, saved
from tests.reference_nanogpt import state_dict

C_FC, LN_F = "transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.weight"
REAL = "save it in float32, as weights are real numbers"
NOTHING = f"on loading; nothing was run; {RESAVE}"
TWICE = "shares its memory with other weights or itself: save a clone of it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": None}, "model_args: n_head is of type NoneType, not a whole number"),
        ({"n_head": "2"}, "model_args: n_head is of type str, not a whole number"),
        ({"n_layer": True}, "model_args: n_layer is of type bool, not a whole number"),
        ({"n_layer": 2.0}, "model_args: n_layer is of type float, not a whole number"),
        ({"n_layer": torch.tensor(2)}, "model_args: n_layer is of type Tensor, not a whole number"),
        ({"block_size": 0}, "model_args: block_size is 0, not a whole number from 1 to 2147483647"),
        ({"vocab_size": -11}, "model_args: vocab_size is -11, not a whole number from 1 to 2147483647"),
        ({"n_embd": 2**40}, "model_args: n_embd is 1099511627776, not a whole number from 1 to 2147483647"),
        ({"n_head": 3}, "model_args: n_embd 8 is not divisible by n_head 3"),
        ({"bias": 1}, "model_args: bias is of type int, not true or false"),
        ({"n_layer": 10**400}, f"model_args: n_layer is 1{'0' * 79}..., not a whole number from 1 to 2147483647"),
        ({"dropout": "no"}, "model_args: dropout is of type str, not a number"),
        ({"dropout": True}, "model_args: dropout is of type bool, not a number"),
        ({"dropout": np.bool_(True)}, "model_args: dropout is of type bool, not a number"),
        ({"dropout": 10**400}, f"model_args: dropout is 1{'0' * 79}..., not a number from 0 to 1"),
        ({"dropout": torch.nan}, "model_args: dropout is nan, not a number from 0 to 1"),
        ({"dropout": torch.inf}, "model_args: dropout is inf, not a number from 0 to 1"),
        ({"dropout": np.float32(-3)}, "model_args: dropout is -3.0, not a number from 0 to 1"),
        ({"n_embd": 10**9}, "transformer.wte.weight has shape (11, 8); its architecture asks for (11, 1000000000)"),
        ({"vocab_size": 10**9}, "transformer.wte.weight has shape (11, 8); its architecture asks for (1000000000, 8)"),
        ({"block_size": 10**9}, "transformer.wpe.weight has shape (6, 8); its architecture asks for (1000000000, 8)"),
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
        (broken(C_FC, Tensor.to_sparse), f"asks to run torch._utils._rebuild_sparse_tensor {NOTHING}"),
        (
            broken(C_FC, lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)),
            f"asks to run torch._utils._rebuild_qtensor {NOTHING}",
        ),
        (
            broken(C_FC, lambda t: t.to("meta")),
            f"asks to run torch._utils._rebuild_meta_tensor_no_storage {NOTHING}",
        ),
        (
            broken(C_FC, lambda t: torch.nested.nested_tensor([t])),
            f"asks to run torch._utils._rebuild_nested_tensor {NOTHING}",
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
            lambda state: state.update({"module." * 100 + C_FC: poke(torch.nan)(state.pop(C_FC))}),
            f"{('module.' * 12)[:80]}... is NaN or infinite in 1 of 256 places: no curvature there",
        ),
        (
            lambda state: state.update({"module." * 100 + C_FC: state.pop(C_FC).view(*[1] * 50, -1)}),
            f"{('module.' * 12)[:80]}... has shape ({'1, ' * 26}1...; its architecture asks for (32, 8)",
        ),
        (
            lambda state: state.update({"x" * 1001: torch.ones(8)}),
            f"a dictionary in it has a long str for a key, not a name or a number; {RESAVE}",
        ),
        (
            lambda state: [state.pop(name) for name in list(state)],
            "holds no dictionary of tensors; its keys are model, model_args, iter_num: save model.state_dict()",
        ),
    ],
)
def test_tensors_that_are_odd_or_do_not_fit(tmp_path, change, message):
    state = state_dict(ARGS)
    change(state)
    assert refusal(saved(tmp_path, state)) == message
