"""What the tests of checkpoints share: a small nanoGPT, files of it, and what is said of them."""

import zipfile

import pytest
import torch

from hesscore.chain import Point
from hesscore.checkpoints import load
from hesscore.checkpoints.family import Family
from hesscore.checkpoints.nanogpt import NanoGPT
from hesscore.errors import InputError
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference_nanogpt

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
UNKNOWN = f"of no known family ({', '.join(Family.registry)}): say with --spec what its tensors are; its keys are"
NO_CONFIG = (
    "no config.json beside it, nor model_args of nanoGPT in it, and shapes alone do not tell its heads: "
    "model.config.save_pretrained(folder) writes one"
)
NO_TENSORS = "holds no dictionary of tensors; its keys are"
RESAVE = "torch.save only dense tensors and numbers, such as a state dict"


def saved(folder, state, args=ARGS, **rest):
    path = folder / "ckpt.pt"
    torch.save({"model": state, "model_args": args, "iter_num": 7, **rest}, path)
    return path


def zipped(path, pickled, compression=zipfile.ZIP_STORED, **more):
    """What torch.save would write, with ``pickled`` for its pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("ckpt/data.pkl", pickled)
        archive.writestr("ckpt/version", "3\n")
        for name, content in more.items():
            archive.writestr(f"ckpt/{name}", content)
    return path


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


def refusal(path):
    with pytest.raises(InputError) as caught:
        load(path)
    name, _, message = str(caught.value).partition(f"{path}: ")
    assert (name, caught.value.code, "\n" in message) == ("", 3, False)
    return message
