"""The sample run: its files are nanoGPT's, its losses are what they say, and hess trained it without autograd."""

import ast
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hesscore.chain import Point
from hesscore.checkpoints import load
from hesscore.checkpoints.nanogpt import NanoGPT
from hesscore.inputs.reading import read_data
from hesscore.inputs.tokens import read_tokens, windows
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference_nanogpt

FOLDER = Path(__file__).parent.parent / "sample_runs" / "pydoc"
SCRIPT = FOLDER / "train.py"
MOMENTS = {"early": 100, "middle": 1000, "end": 5000}
LOSSES = {"early": 2.7282, "middle": 1.7023, "end": 1.3654}


def read(moment, folder=FOLDER):
    """The content of a checkpoint as nanoGPT would read it."""
    return torch.load(folder / f"ckpt-{moment}.pt", weights_only=True)


def our_point(moment, data, kind):
    checkpoint = load(FOLDER / f"ckpt-{moment}.pt")
    leaves = {name: tensor.to(kind) for name, tensor in checkpoint.parameters.items()}
    return Point(model(checkpoint.spec), leaves | inputs(checkpoint.spec, data.data, data.target))


@pytest.fixture(scope="module")
def val():
    return read_data(FOLDER / "val.bin", load(FOLDER / "ckpt-end.pt").spec)


def nanogpt_shapes():
    """Names and shapes in the order of nanoGPT's own ``state_dict``."""
    args = read("end")["model_args"]
    return {name: tensor.shape for name, tensor in reference_nanogpt.state_dict(args).items()}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_layout_is_nanogpts(moment):
    content = read(moment)
    assert list(content) == ["model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"]
    assert content["model_args"] == {
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 64,
        "block_size": 128,
        "bias": True,
        "vocab_size": 96,
        "dropout": 0.0,
    }
    state = content["model"]
    assert {name: tensor.shape for name, tensor in state.items()} == nanogpt_shapes()
    assert list(state) == list(nanogpt_shapes())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert content["iter_num"] == MOMENTS[moment]
    assert type(content["best_val_loss"]) is float
    config = content["config"]
    assert (config["learning_rate"], config["beta1"], config["beta2"]) == (3e-3, 0.9, 0.99)
    assert (config["weight_decay"], config["grad_clip"], config["max_iters"]) == (0.1, 1.0, 5000)
    assert (FOLDER / f"ckpt-{moment}.pt").stat().st_size < 3_000_000


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_optimizer_state_is_nanogpts(moment):
    """AdamW's own, matrices first and then vectors, each in the order of the model."""
    content = read(moment)
    shapes = [shape for name, shape in nanogpt_shapes().items() if name != "lm_head.weight"]
    ordered = sorted(shapes, key=len, reverse=True)
    state, groups = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in groups] == [18, 34]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {group["betas"] for group in groups} == {(0.9, 0.99)}
    for index, shape in enumerate(ordered):
        assert state[index]["exp_avg"].shape == state[index]["exp_avg_sq"].shape == shape
        assert state[index]["step"] == MOMENTS[moment]
        assert (state[index]["exp_avg_sq"] >= 0).all()


@pytest.mark.parametrize("kind, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_loss_is_nanogpts(moment, kind, tolerance, val):
    content = read(moment)
    state = {name: tensor.to(kind) for name, tensor in content["model"].items()}
    expected = reference_nanogpt.loss(state, content["model_args"], val.data, val.target)
    assert our_point(moment, val, kind).output.item() == pytest.approx(expected.item(), rel=tolerance, abs=0)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_losses_are_what_the_readme_says(moment, val):
    loss = our_point(moment, val, torch.float32).output.item()
    assert loss == pytest.approx(LOSSES[moment], abs=1e-4)
    assert f"{LOSSES[moment]}" in (FOLDER.parent / "README.md").read_text()
    assert loss - 0.01 < read(moment)["best_val_loss"] <= loss + 1e-5


def test_the_gradient_is_autograds(val):
    content = read("end")
    state = {name: tensor.double().requires_grad_() for name, tensor in content["model"].items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    few = val.data[:4], val.target[:4]
    reference_nanogpt.loss(state, content["model_args"], *few).backward()

    checkpoint = load(FOLDER / "ckpt-end.pt")
    leaves = {name: tensor.double() for name, tensor in checkpoint.parameters.items()}
    graph = model(checkpoint.spec)
    found = Point(graph, leaves | inputs(checkpoint.spec, *few)).gradient(graph.parameter_positions)
    gradients = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for leaf, view in NanoGPT().views(gradients, checkpoint.spec).items():
        view.copy_(found[graph.index[leaf]][0])
    del state["lm_head.weight"]
    for name, tensor in state.items():
        assert (gradients[name] - tensor.grad).norm() <= 1e-10 * tensor.grad.norm(), name


def test_the_validation_text(val):
    assert (val.scored, tuple(val.data.shape), val.notes) == (4096, (32, 128), ())
    assert (FOLDER / "val.bin").stat().st_size == 2 * 4097
    text = "".join(script.VOCABULARY[i] for i in read_tokens(FOLDER / "val.bin").tolist())
    assert "dictionary" in text


def load_script():
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_no_autograd_is_used():
    names = {node.attr for node in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(node, ast.Attribute)}
    assert names.isdisjoint({"backward", "requires_grad", "requires_grad_", "autograd", "func"})
    gpt = script.GPT(torch.Generator().manual_seed(0))
    assert not any(tensor.requires_grad for tensor in gpt.state.values())


def test_the_first_gradient_is_autograds():
    gpt = script.GPT(torch.Generator().manual_seed(0))
    ids = torch.randint(96, (4, 129), generator=torch.Generator().manual_seed(1))
    loss = gpt.differentiate(ids[:, :-1], ids[:, 1:])
    state = {name: tensor.detach().double().requires_grad_() for name, tensor in gpt.state.items()}
    expected = reference_nanogpt.loss(state, script.MODEL_ARGS, ids[:, :-1], ids[:, 1:])
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, tensor in gpt.state.items():
        error = (tensor.grad - state[name].grad).norm() / state["transformer.wte.weight"].grad.norm()
        assert error < 1e-5, name


def test_three_steps_write_a_run_whose_loss_falls(tmp_path):
    command = [sys.executable, SCRIPT, "--steps", "3", "--out", tmp_path / "run"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    losses = [float(line.partition("val ")[2].partition(",")[0]) for line in shown.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0] < math.log(96)
    content = read("end", tmp_path / "run")
    assert content["iter_num"] == 3
    assert content["best_val_loss"] == pytest.approx(losses[1], abs=1e-4)

    checkpoint = load(tmp_path / "run" / "ckpt-end.pt")
    tokens, targets = windows(read_tokens(tmp_path / "run" / "val.bin"), 128)
    point = Point(model(checkpoint.spec), checkpoint.parameters | inputs(checkpoint.spec, tokens, targets))
    assert point.output.item() == pytest.approx(content["best_val_loss"], rel=1e-6)
    train = np.fromfile(tmp_path / "run" / "train.bin", dtype="<u2")
    assert len(train) > 300_000
    assert train.max() < 96
