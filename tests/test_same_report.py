"""One model, however it is stored, has one report."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.checkpoints import ARGS, saved
from tests.command import analyze, strict
from tests.oracle import made
from tests.oracle import saved as folder_of
from tests.reference_nanogpt import state_dict

OF_THE_FILE = ("source", "family", "checkpoint_sha256", "duration_seconds", "notes", "left_out")


@pytest.fixture
def ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([[1, 4, 4, 0, 9, 10, 3], [7, 2, 3, 4, 5, 6, 1]]))
    return tmp_path / "ids.npy"


def report(path, ids):
    """Everything but what tells where it was stored."""
    shown = analyze(path, "--data", ids, "--json", "-", "--quiet")
    assert shown.returncode == 0, shown.stderr
    content = strict(shown.stdout)
    for row in content["rows"]:
        del row["tensor"]
    return {name: value for name, value in content.items() if name not in OF_THE_FILE}


def test_any_nesting_of_prefixes(tmp_path, ids):
    state, reports = state_dict(ARGS), []
    for i, prefix in enumerate(("", "module.", "_orig_mod.module.", "model._orig_mod.")):
        (tmp_path / str(i)).mkdir()
        reports.append(report(saved(tmp_path / str(i), {prefix + name: w for name, w in state.items()}), ids))
    assert reports[1:] == reports[:1] * 3


def test_a_tied_head_that_is_stored_and_one_that_is_not(tmp_path, ids):
    state = state_dict(ARGS)
    (tmp_path / "without").mkdir()
    whole = report(saved(tmp_path, state), ids)
    del state["lm_head.weight"]
    assert report(saved(tmp_path / "without", state), ids) == whole


def test_gpt2_of_transformers_and_as_nanogpt_has_it(tmp_path, ids):
    """Its matrices are transposed, and GELU is by erf."""
    config = GPT2Config(
        vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2, activation_function="gelu", n_inner=32
    )
    model = made(GPT2LMHeadModel, config).float()
    state = {
        name: tensor.T.contiguous() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor
        for name, tensor in model.state_dict().items()
    }
    assert report(folder_of(model, tmp_path / "folder"), ids) == report(saved(tmp_path, state), ids)


def test_half_precision_is_promoted_and_noted(tmp_path, ids):
    state = {name: tensor.half() for name, tensor in state_dict(ARGS).items()}
    shown = analyze(saved(tmp_path, state), "--data", ids, "--json", "-", "--components", "final_norm")
    assert strict(shown.stdout)["notes"] == ["weights stored in float16"]
    assert strict(shown.stdout)["dtype"] == "float64"
    (tmp_path / "single").mkdir()
    promoted = saved(tmp_path / "single", {name: tensor.float() for name, tensor in state.items()})
    alike = analyze(promoted, "--data", ids, "--json", "-", "--components", "final_norm")
    assert strict(shown.stdout)["rows"] == strict(alike.stdout)["rows"]
    assert torch.float16 in {tensor.dtype for tensor in state.values()}
