"""An ``nn.TransformerEncoder`` means to us what it means to PyTorch, given a file that says what it does not store."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hesscore.checkpoints import load
from hesscore.curvature import Batch, Curvature
from hesscore.inputs.arrays import of_arrays
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests.encoders import Scored, drawn, made, saved, written
from tests.oracle import assert_same as assert_same_as
from tests.oracle import outputs, randomised

SCEPTR = Path(__file__).parent.parent / "configs/checkpoints/sceptr-tiny.yaml"
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(autouse=True)
def plain():
    """What PyTorch documents, not its fused kernels, which have no second derivative."""
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.mha.set_fastpath_enabled(True)


def assert_same(model, folder, batch, **fields):
    def save(model, folder):
        return saved(folder, model.state_dict())

    spec = written(folder, **fields)
    path = save(model, folder)
    assert_same_as(model, path, batch, save=save, described=spec)
    found = load(path, spec=spec)
    assert (found.family, found.left_out) == ("nn.TransformerEncoder", {})
    return found.spec


# --- every option ---


@pytest.mark.parametrize("final", [False, True], ids=["", "final norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_the_places_of_norms_and_the_activation(tmp_path, norm_first, activation, final):
    scored = made(norm_first=norm_first, activation=activation, final=final)
    fields = {"placement": "pre" if norm_first else "post", "activation": activation}
    spec = assert_same(scored, tmp_path, drawn() | {"attention_mask": MASK}, **fields)
    assert (spec.d_model, spec.d_ff, spec.layers, spec.final_norm) == (6, 10, 2, final)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_without_biases(tmp_path, norm_first):
    scored = made(norm_first=norm_first, bias=False, final=True)
    assert_same(scored, tmp_path, drawn(), placement="pre" if norm_first else "post")


def test_another_epsilon(tmp_path):
    scored = made(layer_norm_eps=0.3, final=True)
    assert_same(scored, tmp_path, drawn(), norm_eps=0.3)
    with pytest.raises(AssertionError):
        assert_same(scored, tmp_path, drawn())


def test_a_causal_mask(tmp_path):
    assert_same(made(causal=True), tmp_path, drawn() | {"attention_mask": MASK}, causal="true")


@pytest.mark.parametrize("mask", [MASK, MASK.flip(1)], ids=["right", "left"])
def test_padding_on_either_side(tmp_path, mask):
    assert_same(made(layers=1, nhead=2), tmp_path, drawn() | {"attention_mask": mask}, heads=2)


@pytest.mark.parametrize("prefix", ["", "a.b.", "module._orig_mod.", "net.module.encoder."])
def test_any_prefix(tmp_path, prefix):
    """Wrappers may be given or left out."""
    state = made().encoder.state_dict()
    path = saved(tmp_path, {prefix + name: tensor for name, tensor in state.items()})
    bare = prefix.replace("module.", "").replace("_orig_mod.", "")
    given, left = (load(path, spec=written(tmp_path, prefix=said or None)) for said in (prefix, bare))
    for name, leaf in load(saved(tmp_path, state), spec=written(tmp_path, prefix=None)).parameters.items():
        assert torch.equal(given.parameters[name], leaf)
        assert torch.equal(left.parameters[name], leaf)
    assert given.tensors["blocks.1.attn.k.weight"] == f"{prefix}layers.1.self_attn.in_proj_weight[6:12]"


def test_fewer_layers_are_a_model_too(tmp_path):
    """That of the activations between them."""
    state = made(layers=3).state_dict()
    found = load(saved(tmp_path, state), spec=written(tmp_path, ignore="[encoder.layers.2.*]"))
    assert found.spec.layers == 2
    assert len(found.left_out) == 12


class Tagger(nn.Module):
    """A class for every token, by an encoder between tables and a head."""

    config = None

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 6), nn.Parameter(torch.empty(1, 5, 6))
        self.body, self.tags = Scored(final=True, norm_first=True), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.body(self.words(input_ids) + self.places, attention_mask).last_hidden_state
        logits = self.tags(hidden)
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_what_is_around_it_comes_by_names(tmp_path):
    ids, labels = (
        torch.tensor([[1, 6, 6, 0, 2], [3, 2, 1, 0, 0]]),
        torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, -100, -100]]),
    )
    spec = assert_same(
        randomised(Tagger()),
        tmp_path,
        {"input_ids": ids, "attention_mask": MASK, "labels": labels},
        prefix="body.encoder.",
        placement="pre",
        loss="token",
        names="{embed.token: words, embed.position.weight: places, head: tags}",
    )
    assert (spec.vocab, spec.seq_len, spec.labels, spec.head_bias, spec.positions) == (7, 5, 3, True, "learned")


# --- a published encoder ---


PUBLISHED = Path(torch.__file__).parents[1] / "sceptr/_model_saves/SCEPTR_tiny/state_dict.pt"


def test_a_published_encoder_is_read():
    found = load(PUBLISHED, spec=SCEPTR)
    assert sum(leaf.numel() for leaf in found.parameters.values()) == 9840
    assert (found.spec.d_model, found.spec.d_ff, found.spec.layers, found.spec.final_norm) == (16, 64, 3, False)
    assert len(found.left_out) == 5


@pytest.mark.slow
def test_the_whole_hessian_of_a_trained_encoder(tmp_path):
    """SCEPTR (tiny), 9,840 parameters, on seeded activations: that of double backward, row by row."""
    checkpoint = load(PUBLISHED, spec=SCEPTR)
    batch = drawn(16, 8) | {"attention_mask": (torch.arange(8) < torch.tensor([[8], [5]])).long()}
    data = of_arrays(checkpoint.spec, batch)
    constants = inputs(checkpoint.spec, data.data, data.target, data.keep)
    weights = {name: leaf.double() for name, leaf in checkpoint.parameters.items()}
    ours = Curvature(model(checkpoint.spec), weights, [Batch(1.0, constants)]).dense()

    before = "_self_attention_stack._standard_stack._self_attention_stack."
    stored = torch.load(PUBLISHED, weights_only=True)
    scored = made(3, 16, 8, 64)
    scored.encoder.load_state_dict({n.removeprefix(before): t for n, t in stored.items() if n.startswith(before)})
    theirs = dict(scored.encoder.named_parameters())
    _, loss = outputs(scored, checkpoint.spec, batch)
    gradient = torch.autograd.grad(loss, tuple(theirs.values()), create_graph=True)
    flat = torch.cat([part.flatten() for part in gradient])
    assert ours.shape == (len(flat), len(flat)) == (9840, 9840)

    # Where each of our parameters is among theirs: a file of their numbers says so.
    numbers = torch.arange(len(flat), dtype=torch.float64).split([part.numel() for part in theirs.values()])
    named = {name: part.view_as(theirs[name]) for name, part in zip(theirs, numbers, strict=True)}
    index = load(saved(tmp_path, named), spec=written(tmp_path, prefix=None, heads=8)).parameters
    order = torch.cat([index[leaf].flatten() for leaf in model(checkpoint.spec).parameters]).long()
    error, whole = 0.0, 0.0
    for own in torch.arange(len(flat)).split(256):
        basis = torch.zeros(len(own), len(flat), dtype=torch.float64)
        basis[torch.arange(len(own)), order[own]] = 1
        parts = torch.autograd.grad(flat, tuple(theirs.values()), basis, is_grads_batched=True, retain_graph=True)
        rows = torch.cat([part.flatten(1) for part in parts], 1)[:, order]
        error += float((ours[own] - rows).square().sum())
        whole += float(rows.square().sum())
    assert error**0.5 < 1e-10 * whole**0.5
