"""Models of transformers to measure adapters against, in float64 and with eager attention."""

import json
import os
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file

from hesscore.chain import Point
from hesscore.checkpoints import load
from hesscore.curvature import Batch, Curvature
from hesscore.inputs.arrays import of_arrays
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model as wired

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


@contextmanager
def in_double():
    """All of transformers in float64: norms, softmax and rotary angles are in float32 by name there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def made(kind, config, seed=0):
    """A seeded model of transformers in which every gain and every bias is its own."""
    config._attn_implementation = "eager"
    with in_double():
        model = kind(config).double().eval()
    model = randomised(model, seed)
    model.tie_weights()
    return model


def randomised(model, seed=0):
    """In float64, with random weights."""
    model = model.double().eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            near = float(parameter.ndim == 1 and name.endswith("weight"))
            parameter.copy_(near + torch.randn(parameter.shape, generator=rng, dtype=torch.float64) / 3)
    return model


def saved(model, folder):
    """As transformers saves it."""
    with in_double():
        model.save_pretrained(folder)
    return folder


def changed(path, tensors=None, **fields):
    """The folder with other fields in its config.json, and its tensors after ``tensors``; a field of ... is dropped."""
    config = json.loads((path / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))
    if tensors:
        state = load_file(path / "model.safetensors")
        tensors(state)
        save_file(state, path / "model.safetensors")
    return path


def assert_same(model, path, batch, loss=None, save=saved, tolerance=1e-10, described=None):
    """Outputs, loss, gradient and one Hessian-vector product are those of ``model``, by double backward.

    A file that is ``described`` by another is read as that says.
    """
    checkpoint = load(path, loss, described)
    spec = checkpoint.spec
    graph = wired(spec)
    weights = {name: leaf.double() for name, leaf in checkpoint.parameters.items()}
    data = of_arrays(spec, batch)
    constants = inputs(spec, data.data, data.target, data.keep, segments=data.segments)
    expected, expected_loss = outputs(model, spec, batch)
    last = graph.nodes[graph.nodes[-1].sources[0]].name
    found = Point(graph, weights | constants, watch={last}).watched[last]
    found = found[:, 0] if spec.pools else found
    seen = torch.ones_like(found, dtype=torch.bool) if spec.pools or data.keep is None else data.keep[..., None]
    assert (((found - expected) * seen).abs().max() / expected.abs().max()) < tolerance

    ours = Curvature(graph, weights, [Batch(1.0, constants)])
    assert abs(float(ours.loss) - expected_loss.item()) < tolerance * abs(expected_loss.item())
    parameters = list(model.parameters())
    rng = torch.Generator().manual_seed(1)
    tangents = [torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in parameters]
    gradient = torch.autograd.grad(expected_loss, parameters, create_graph=True, allow_unused=True)
    slope = torch.stack([(g * t).sum() for g, t in zip(gradient, tangents, strict=True) if g is not None]).sum()
    product = torch.autograd.grad(slope, parameters, allow_unused=True)
    moved = as_leaves(model, tangents, loss, save, described)
    # What is left out of the model has no gradient: these tangents move nothing else.
    for own, theirs in (ours.gradient, gradient), (ours.hvp(moved), product):
        wanted = as_leaves(model, theirs, loss, save, described)
        total = sum(float(tensor.square().sum()) for tensor in theirs if tensor is not None) ** 0.5
        assert total == pytest.approx(sum(float(leaf.square().sum()) for leaf in wanted.values()) ** 0.5, rel=1e-12)
        for name, leaf in wanted.items():  # some are zero but for rounding, as those of a key's bias
            assert (own[name] - leaf).norm() < 1e-8 * leaf.norm() + 1e-14 * total, name


def as_leaves(model, tensors, loss, save, described=None):
    """Tensors by the parameters of a model of transformers in our layout: as if they were its weights."""
    twin = deepcopy(model)
    with torch.no_grad(), TemporaryDirectory() as folder:
        for parameter, tensor in zip(twin.parameters(), tensors, strict=True):
            parameter.copy_(torch.zeros_like(parameter) if tensor is None else tensor)
        leaves = load(save(twin, Path(folder)), loss, described).parameters
        return {name: leaf.contiguous() for name, leaf in leaves.items()}


def outputs(model, spec, batch):
    """What a model of transformers computes for a batch, and its loss; of a bare one, by the squared error."""
    if not hasattr(model, "config"):  # timm's have no loss
        if spec.objective == "hidden":
            hidden = model.forward_features(batch["pixel_values"])
            return hidden.detach(), (hidden - batch["labels"]).square().mean()
        logits = model(batch["pixel_values"])
        return logits.detach(), torch.nn.functional.cross_entropy(logits, batch["labels"])
    with in_double():
        if spec.objective != "hidden":
            found = model(**batch)
            return found.logits.detach(), found.loss
        hidden = model(**{part: array for part, array in batch.items() if part != "labels"}).last_hidden_state
    keep = batch.get("attention_mask", torch.ones(hidden.shape[:2])).bool()
    return hidden.detach(), (hidden[keep] - batch["labels"][keep]).square().mean()
