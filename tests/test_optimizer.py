"""The optimizer in a checkpoint: its second moments are those of the weights that they belong to, or are left out."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hesscore import checkpoints
from hesscore.checkpoints.optimizer import Settings
from tests.oracle import made, saved

FOLDER = Path(__file__).parent.parent / "sample_runs" / "pydoc"
NOT_USED = "the state of its optimizer is not used: "


def load(path) -> Any:
    """Without its types: what is checked here is there."""
    return checkpoints.load(path)


def trained(model, ids, groups=None, steps=3, **options):
    """An AdamW after a few steps, as torch saves it."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(groups or list(model.parameters()), **{"lr": 1e-3, **options})
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A tied GPT-2 with its optimizer, and the file that a training script would write."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, attn_pdrop=0.0)
    model = made(GPT2LMHeadModel, config)
    optimizer = trained(model, torch.tensor([[1, 4, 4, 0, 9, 10]]))
    saved(model, folder)
    (folder / "model.safetensors").unlink()
    content = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    torch.save(content, folder / "ckpt.pt")
    return model, optimizer, folder / "ckpt.pt", content


def test_the_sample_run_has_its_own():
    """nanoGPT gives AdamW all matrices first, and then all vectors."""
    for moment, steps in (("early", 100), ("end", 5000)):
        raw = torch.load(FOLDER / f"ckpt-{moment}.pt", weights_only=True)
        adam = load(FOLDER / f"ckpt-{moment}.pt").optimizer
        names = [name for name in raw["model"] if name != "lm_head.weight"]
        order = [*(n for n in names if raw["model"][n].ndim > 1), *(n for n in names if raw["model"][n].ndim == 1)]
        moments = {name: raw["optimizer"]["state"][i]["exp_avg_sq"] for i, name in enumerate(order)}
        assert adam.settings["final_norm.bias"].step == steps
        lr = raw["optimizer"]["param_groups"][0]["lr"]
        assert adam.reference == Settings(lr, 0.9, 0.99, 1e-8, steps)
        assert adam.reference.limit == pytest.approx(38 / lr, rel=1e-12)
        found = adam.second_moments
        assert torch.equal(found["embed.token.weight"], moments["transformer.wte.weight"])
        assert torch.equal(found["blocks.2.mlp.down.weight"], moments["transformer.h.2.mlp.c_proj.weight"].T)
        assert torch.equal(found["blocks.1.attn.k.weight"], moments["transformer.h.1.attn.c_attn.weight"].T[:, 64:128])
        assert torch.equal(found["blocks.3.attn.v.bias"], moments["transformer.h.3.attn.c_attn.bias"][128:])


def test_every_moment_is_that_of_its_weight(gpt2):
    """The layout of a moment is that of the weight: read as if they were weights, they are the same leaves."""
    model, optimizer, path, content = gpt2
    other = copy.deepcopy(content)
    by_name = {name: optimizer.state[weight]["exp_avg_sq"] for name, weight in model.named_parameters()}
    by_name["lm_head.weight"] = by_name["transformer.wte.weight"]
    other["model_state_dict"] = by_name
    torch.save(other, path.with_name("moments.pt"))
    right = load(path.with_name("moments.pt")).parameters
    found = load(path)
    assert found.notes == []
    assert found.optimizer.second_moments.keys() == right.keys()
    for leaf, moment in found.optimizer.second_moments.items():
        assert torch.equal(moment, right[leaf]), leaf


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioner_is_that_of_a_step(gpt2, tmp_path, amsgrad):
    """``lr D^-1 m`` is what AdamW takes from a weight without decay."""
    model = copy.deepcopy(gpt2[0])
    ids = torch.tensor([[1, 4, 4, 0, 9, 10]])
    optimizer = trained(model, ids, amsgrad=amsgrad, weight_decay=0.0, lr=1e-2, betas=(0.8, 0.95), eps=1e-3)
    weight = model.transformer.h[1].mlp.c_fc.weight
    before = weight.detach().clone()
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    content = gpt2[3] | {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    folder = tmp_path
    (folder / "config.json").write_text((gpt2[2].parent / "config.json").read_text())
    torch.save(content, folder / "ckpt.pt")
    adam = load(folder / "ckpt.pt").optimizer
    step = 1e-2 * optimizer.state[weight]["exp_avg"] / adam.preconditioner("blocks.1.mlp.up.weight")
    torch.testing.assert_close(before - weight.detach(), step, rtol=1e-9, atol=1e-12)


def test_groups_keep_their_own_settings(tmp_path):
    """A smaller learning rate is a larger preconditioner."""
    model = made(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=6,
        ),
    )
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "lr": 2e-3}, {"params": vectors, "lr": 5e-4, "weight_decay": 0.0}]
    optimizer = trained(model, torch.tensor([[1, 4, 4, 0, 9, 10]]), groups)
    saved(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").rename(tmp_path / "last.pt")
    adam = load(tmp_path / "last.pt").optimizer
    assert (adam.settings["blocks.0.attn.q.weight"].lr, adam.settings["final_norm.weight"].lr) == (2e-3, 5e-4)
    moment = optimizer.state[model.model.norm.weight]["exp_avg_sq"].double()
    right = 4 * (1 - 0.9**3) * ((moment / (1 - 0.999**3)).sqrt() + 1e-8)
    torch.testing.assert_close(adam.preconditioner("final_norm.weight"), right, rtol=1e-12, atol=0)


def reread(gpt2, change):
    """What is said of a file after a change of its optimizer's state."""
    _, _, path, content = gpt2
    content = copy.deepcopy(content)
    change(content["optimizer_state_dict"], content)
    torch.save(content, path.with_name("changed.pt"))
    found = load(path.with_name("changed.pt"))
    return found.optimizer, found.notes


def drop(state, content):
    del state["state"][3]


def swap(state, content):
    state["state"][0], state["state"][1] = state["state"][1], state["state"][0]


def sort(state, content):
    content["model_state_dict"] = dict(sorted(content["model_state_dict"].items()))


def negative(state, content):
    state["state"][5]["exp_avg_sq"].neg_()


def spread(state, content):
    state["state"][0]["exp_avg_sq"] = torch.ones(1, 1).expand(13, 8)


REFUSED = {
    "one is missing": (drop, "it has 27 moments for 28 parameters"),
    "two are swapped": (swap, "its 28 moments fit the 28 weights in no known order"),
    "no order": (sort, "the weights are sorted by name, so that their order is lost"),
    "no step": (lambda state, _: state["state"].clear(), "it has taken no step"),
    "SGD": (lambda state, _: [entry.pop("exp_avg_sq") for entry in state["state"].values()], "it is no Adam"),
    "negative": (negative, "a second moment is negative, or no number"),
    "NaN": (lambda state, _: state["state"][1]["exp_avg_sq"].fill_(torch.nan), "a second moment is negative, or no"),
    "stretched": (spread, "it is not as torch saves one"),
    "integers": (
        lambda state, _: state["state"][0].update(exp_avg_sq=torch.ones(13, 8).long()),
        "a second moment is no",
    ),
    "lr": (lambda state, _: state["param_groups"][0].update(lr=-1.0), "its settings are Settings(lr=-1.0"),
    "a step of 0": (lambda state, _: state["state"][0].update(step=torch.tensor(0.0)), "its settings are Settings"),
    "betas": (lambda state, _: state["param_groups"][0].update(betas=(0.9,)), "it is not as torch saves one"),
    "groups": (lambda state, _: state.update(param_groups=[3]), "it is not as torch saves one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_left_out_and_said(gpt2, case):
    change, said = REFUSED[case]
    optimizer, notes = reread(gpt2, change)
    assert optimizer is None
    assert len(notes) == 1
    assert notes[0].startswith(NOT_USED + said), notes


def test_a_file_without_one_says_nothing_of_it(gpt2):
    optimizer, notes = reread(gpt2, lambda state, content: content.pop("optimizer_state_dict"))
    assert (optimizer, notes) == (None, [])


def test_no_damage_is_more_than_a_note(gpt2):
    """Any entry, of any level, in the place of any other."""
    strange: list[Any] = [
        None,
        -1,
        2.5,
        "text",
        [],
        {},
        torch.tensor([1.0, 2.0]),
        torch.zeros(()),
        float("nan"),
        True,
        b"x",
    ]
    rng = random.Random(0)

    def damage(state, content):
        places = [state["state"], state["param_groups"][0], *state["state"].values(), state]
        place = rng.choice(places)
        place[rng.choice(list(place))] = rng.choice(strange)

    outcomes = [reread(gpt2, damage) for _ in range(150)]
    assert all(notes == [] if optimizer else notes[0].startswith(NOT_USED) for optimizer, notes in outcomes)
    assert sum(optimizer is None for optimizer, _ in outcomes) > 50
