"""The state of Adam in a checkpoint: read for every leaf as torch has it, or not at all, with a note that says why."""

import copy
import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from hesscore.checkpoints import load
from hesscore.checkpoints.nanogpt import NanoGPT
from hesscore.checkpoints.optimizer import Settings
from hesscore.problem import open_problem
from tests import described, encoders, reference_nanogpt, test_bert, test_fuzz, test_gpt2
from tests.checkpoints import ARGS, saved
from tests.oracle import as_leaves, made
from tests.oracle import saved as saved_folder
from tests.test_sample_run import FOLDER, MOMENTS
from tests.test_sample_run import read as read_sample

UNREAD = "the state of its optimizer is not used: "
RENAMED = {"vit", "dinov2"}
"""Whose state dict has other names than the files that transformers makes of it."""


def stepped(parameters, groups=None, steps=3, kind=torch.optim.AdamW, seed=0, **options):
    """An optimizer after a few steps along random gradients; what is frozen has none."""
    rng = torch.Generator().manual_seed(seed)
    parameters = list(parameters)
    optimizer = kind(parameters if groups is None else groups, **{"lr": 1e-2} | options)
    for _ in range(steps):
        for parameter in (p for p in parameters if p.requires_grad):
            parameter.grad = torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype)
        optimizer.step()
    return optimizer


def split(parameters):
    """nanoGPT's groups."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def written(folder, model, optimizer):
    """As many scripts save a model of transformers."""
    model.config.save_pretrained(folder)
    path = folder / "last.pt"
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path)
    return path


def adam(*args, **fields):
    return load(*args, **fields).optimizer


def assert_moments(found, expected):
    """Bit by bit, and for every leaf."""
    assert found.second_moments.keys() == expected.keys() == found.settings.keys()
    for leaf, moment in expected.items():
        assert torch.equal(found.second_moments[leaf], moment), leaf
        assert moment.count_nonzero() == moment.numel()


def moments(optimizer, parameters, name="exp_avg_sq"):
    return [optimizer.state[parameter].get(name) for parameter in parameters]


# --- what is read ---


@pytest.mark.parametrize("moment", MOMENTS)
def test_of_the_sample_run(moment):
    content, checkpoint = read_sample(moment), load(FOLDER / f"ckpt-{moment}.pt")
    names = [name for name in content["model"] if name != "lm_head.weight"]
    ordered = [n for n in names if content["model"][n].ndim > 1] + [n for n in names if content["model"][n].ndim == 1]
    state, (decayed, others) = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    theirs = {name: state[number]["exp_avg_sq"] for number, name in enumerate(ordered)}
    found: Any = checkpoint.optimizer
    assert_moments(found, NanoGPT().views(theirs, checkpoint.spec))
    assert decayed["lr"] == others["lr"]
    assert {*found.settings.values()} == {Settings(decayed["lr"], 0.9, 0.99, 1e-8, MOMENTS[moment])}
    assert found.reference.limit == pytest.approx(38 / decayed["lr"], rel=1e-12)
    assert checkpoint.notes == []


@pytest.mark.parametrize("groups", [lambda parameters: None, split], ids=["one group", "nanoGPT's groups"])
@pytest.mark.parametrize("family", sorted(test_fuzz.MODELS.keys() - RENAMED))
def test_every_leaf_has_torchs_moment_in_its_layout(tmp_path, family, groups):
    """Tied or fused, or interleaved."""
    model = test_fuzz.MODELS[family]()
    optimizer = stepped(model.parameters(), groups(model.parameters()), betas=(0.8, 0.95), eps=1e-6)
    found = adam(written(tmp_path, model, optimizer))
    assert_moments(found, as_leaves(model, moments(optimizer, model.parameters()), None, saved_folder))
    assert {*found.settings.values()} == {Settings(1e-2, 0.8, 0.95, 1e-6, 3)}


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_is_the_first_moment_over_the_preconditioner(tmp_path, kind, amsgrad):
    model = test_fuzz.MODELS["gpt2"]()
    options = {"lr": 0.03, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.0, "amsgrad": amsgrad}
    optimizer = stepped(model.parameters(), kind=kind, **options)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad /= 10  # so that the largest second moment is no longer the present one
    optimizer.step()
    moved = [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
    found = adam(written(tmp_path, model, optimizer))
    first = as_leaves(model, moments(optimizer, model.parameters(), "exp_avg"), None, saved_folder)
    for leaf, step in as_leaves(model, moved, None, saved_folder).items():
        preconditioner = found.preconditioner(leaf)
        assert preconditioner.dtype == torch.float64
        assert torch.allclose(step, -0.03 * first[leaf] / preconditioner, rtol=1e-9, atol=1e-14), leaf


def test_the_preconditioner_of_one_number():
    """As the formula has it."""
    content = read_sample("early")
    found = adam(FOLDER / "ckpt-early.pt")
    leaf = "blocks.2.norm1.weight"
    v = content["optimizer"]["state"][18 + 2 * 8]["exp_avg_sq"][0].item()
    assert found.second_moments[leaf][0] == v
    expected = (1 - 0.9**100) * (math.sqrt(v / (1 - 0.99**100)) + 1e-8)
    assert found.preconditioner(leaf)[0].item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a model"])
def test_an_encoder_of_pytorch(tmp_path, around):
    """What is ignored was trained as well, but for whole numbers and what is tied."""
    model = encoders.made()
    if around:
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 6), "encoder": model.encoder, "decoder": nn.Linear(6, 5)})
        model = encoders.randomised(model)
        model["decoder"].weight = model["embedding"].weight
        model["decoder"].register_buffer("calls", torch.tensor([7]))
    optimizer = stepped(model.parameters())
    spec = encoders.written(tmp_path, ignore="[embedding.*, decoder.*]" if around else None)
    path = tmp_path / "model.pt"
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, path)

    def save(model, folder):
        return encoders.saved(folder, model.state_dict())

    expected = as_leaves(model, moments(optimizer, model.parameters()), None, save, spec)
    assert_moments(adam(path, spec=spec), expected)


def test_numbers_in_tensors(tmp_path):
    """As capturable and schedulers leave them."""
    model = test_fuzz.MODELS["llama"]()
    optimizer = stepped(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    state = optimizer.state_dict()
    assert isinstance(state["param_groups"][0]["lr"], torch.Tensor)
    assert isinstance(state["state"][0]["step"], torch.Tensor)
    found = adam(written(tmp_path, model, optimizer))
    assert {*found.settings.values()} == {Settings(0.25, 0.9, 0.999, 1e-8, 3)}


def test_parameters_of_one_group_may_have_taken_their_own_numbers_of_steps(nanogpt):
    folder, content = nanogpt
    content["optimizer"]["state"][0] |= {"step": np.float64(2)}
    content["optimizer"]["state"][1] |= {"step": 1}
    content["optimizer"]["param_groups"][1]["lr"] = np.float32(0.25)
    found, notes = reread(folder, content)
    assert notes == []
    steps = {leaf: settings.step for leaf, settings in found.settings.items()}
    assert [steps.pop(leaf) for leaf in ("embed.token.weight", "embed.position.weight")] == [2, 1]
    assert {*steps.values()} == {3}
    assert found.settings["final_norm.bias"].lr == found.reference.lr == 0.25


def test_a_smaller_learning_rate_is_a_larger_preconditioner(nanogpt):
    folder, content = nanogpt
    same, _ = reread(folder, content)
    content["optimizer"]["param_groups"][1]["lr"] /= 4
    found, _ = reread(folder, content)
    assert (found.reference.lr, found.settings["final_norm.bias"].lr) == (1e-2, 2.5e-3)
    for leaf, times in {"blocks.1.attn.q.weight": 1, "final_norm.bias": 4}.items():
        assert torch.equal(found.preconditioner(leaf), times * same.preconditioner(leaf))


def test_names_tell_what_the_order_does_not(tmp_path):
    """torch stores them if it was given named parameters."""
    model = made(hf.GPT2LMHeadModel, hf.GPT2Config(**test_gpt2.FIELDS))
    named = random.Random(0).sample(list(model.named_parameters()), k=len(list(model.parameters())))
    optimizer = stepped(model.parameters(), named)
    found = adam(written(tmp_path, model, optimizer))
    assert_moments(found, as_leaves(model, moments(optimizer, model.parameters()), None, saved_folder))
    state = model.state_dict()
    torch.save({"model": dict(sorted(state.items())), "opt": optimizer.state_dict()}, tmp_path / "last.pt")
    assert_moments(adam(tmp_path / "last.pt"), found.second_moments)


def test_a_head_that_is_not_scored_was_trained(tmp_path):
    config = hf.GPT2Config(**test_gpt2.FIELDS, num_labels=3, pad_token_id=12)
    model = made(hf.GPT2ForSequenceClassification, config)
    path = written(tmp_path, model, optimizer := stepped(model.parameters()))
    expected = as_leaves(model, moments(optimizer, model.parameters()), "hidden", saved_folder)
    assert "head.weight" not in expected
    assert_moments(adam(path, "hidden"), expected)


def test_a_head_that_is_not_scored_need_have_no_moments(tmp_path):
    model = made(hf.BertForPreTraining, hf.BertConfig(**test_bert.FIELDS))
    model.bert.pooler.requires_grad_(False)
    model.cls.seq_relationship.requires_grad_(False)
    path = written(tmp_path, model, optimizer := stepped(model.parameters()))
    expected = as_leaves(model, moments(optimizer, model.parameters()), None, saved_folder)
    assert_moments(adam(path), expected)


def test_a_problem_has_it():
    problem: Any = open_problem(FOLDER / "ckpt-end.pt", FOLDER / "val.bin", max_tokens=8)
    assert_moments(problem.optimizer, adam(FOLDER / "ckpt-end.pt").second_moments)
    assert problem.optimizer.second_moments.keys() == problem.parameters.keys()
    assert "Adam" not in repr(problem)


# --- what is not ---


def contents(args):
    """What a file of nanoGPT holds, to be changed."""
    state = {name: nn.Parameter(tensor) for name, tensor in reference_nanogpt.state_dict(args).items()}
    del state["lm_head.weight"]
    optimizer = stepped(state.values(), split(state.values())).state_dict()
    model = {name: tensor.detach() for name, tensor in state.items()}
    model["lm_head.weight"] = model["transformer.wte.weight"]
    return {"model": model, "optimizer": copy.deepcopy(optimizer)}


@pytest.fixture
def nanogpt(tmp_path):
    return tmp_path, contents(ARGS)


def reread(folder, content, args=ARGS):
    """The optimizer that a file with this content has, and what is said of it; the weights are there as ever."""
    beside = {name: value for name, value in content.items() if name != "model"}
    checkpoint = load(saved(folder, content["model"], args, **beside))
    assert torch.equal(checkpoint.parameters["embed.token.weight"], content["model"]["transformer.wte.weight"])
    notes = [note for note in checkpoint.notes if note.startswith(UNREAD)]
    assert all(note.isprintable() and len(note) < 400 for note in notes)
    assert len(notes) <= (checkpoint.optimizer is None)
    return checkpoint.optimizer, [note.removeprefix(UNREAD) for note in notes]


BUFFERS = {
    "gpt2": ("transformer.h.1.attn.bias", torch.ones(1, 1, 6, 6).tril()),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)),
    "gpt_neox": ("gpt_neox.layers.0.attention.masked_bias", torch.tensor(-1e9)),
}


@pytest.mark.parametrize("family", BUFFERS)
def test_buffers_of_older_files_have_no_moments(tmp_path, family):
    model = test_fuzz.MODELS[family]()
    path = written(tmp_path, model, stepped(model.parameters()))
    expected = adam(path).second_moments
    content = torch.load(path, weights_only=True)
    name, buffer = BUFFERS[family]
    content["model_state_dict"] = {name: buffer, **content["model_state_dict"]}
    torch.save(content, path)
    assert name in load(path).left_out
    assert_moments(adam(path), expected)


@pytest.mark.parametrize("family", ["gpt2", "bert", "albert"])
def test_tied_weights_may_be_stored_twice(tmp_path, family):
    """As they are once each has been moved to the CPU."""
    model = test_fuzz.MODELS[family]()
    path = written(tmp_path, model, stepped(model.parameters()))
    expected = adam(path).second_moments
    content = torch.load(path, weights_only=True)
    content["model_state_dict"] = {name: tensor.clone() for name, tensor in content["model_state_dict"].items()}
    torch.save(content, path)
    assert "tied" in " ".join(load(path).left_out.values())
    assert_moments(adam(path), expected)


def test_a_head_that_is_a_copy_has_no_moments_by_a_spec_file_either(tmp_path):
    state = described.state_of()
    parameters = {name: nn.Parameter(tensor) for name, tensor in state.items() if name != "out"}
    optimizer = stepped(parameters.values())
    state["out"] = state["table.weight"].clone()
    checkpoint: Any = described.loaded(tmp_path, {"model": state, "optimizer": optimizer.state_dict()})
    assert checkpoint.spec.tied
    assert checkpoint.optimizer.second_moments.keys() == checkpoint.parameters.keys()
    for leaf, name in {"embed.token.weight": "table.weight", "final_norm.bias": "norm.bias"}.items():
        expected = optimizer.state[parameters[name]]["exp_avg_sq"]
        assert torch.equal(checkpoint.optimizer.second_moments[leaf], expected)


def test_masks_and_copies_of_nanogpt_have_no_moments(nanogpt):
    folder, content = nanogpt
    expected, _ = reread(folder, content)
    model = {}
    for name, tensor in content["model"].items():
        model[name] = tensor
        if name.endswith("ln_1.bias"):  # where older files have it
            model[name.replace("ln_1", "attn")] = torch.ones(1, 1, 6, 6).tril()
    found, notes = reread(folder, content | {"model": model | {"lm_head.weight": model["lm_head.weight"].clone()}})
    assert notes == []
    assert_moments(found, expected.second_moments)


@pytest.mark.parametrize("beside", [{}, {"optimizer": None}, {"optimizer": {}}, {"scheduler": {"last_epoch": 3}}])
def test_where_there_is_none_nothing_is_said(nanogpt, beside):
    folder, content = nanogpt
    assert reread(folder, {"model": content["model"], **beside}) == (None, [])


def test_safetensors_have_none(tmp_path):
    saved_folder(test_fuzz.MODELS["gpt2"](), tmp_path)
    checkpoint = load(tmp_path)
    assert (checkpoint.optimizer, checkpoint.notes) == (None, [])


def swapped(content, a, b):
    state = content["optimizer"]["state"]
    state[a], state[b] = state[b], state[a]


def regrouped(content, sizes, **options):
    """The parameters in the order of the state dict, in groups of these sizes."""
    state, (group, _) = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    names = [name for name in content["model"] if name != "lm_head.weight"]
    split = sorted(names, key=lambda name: content["model"][name].ndim < 2)
    content["optimizer"]["state"] = {i: state[split.index(name)] for i, name in enumerate(names)}
    numbers = iter(range(len(names)))
    groups = [group | options | {"params": [next(numbers) for _ in range(size)]} for size in sizes]
    content["optimizer"]["param_groups"] = groups


def moment(change, number=3):
    """The second moment of ``h.0.attn.c_proj.weight``, changed."""

    def damage(content):
        own = content["optimizer"]["state"][number]
        own["exp_avg_sq"] = change(own["exp_avg_sq"])

    return damage


def option(**fields):
    def damage(content):
        content["optimizer"]["param_groups"][1] |= fields

    return damage


def state(**fields):
    def damage(content):
        content["optimizer"]["state"][4] |= fields

    return damage


def without_state(content, numbers):
    for number in numbers:
        del content["optimizer"]["state"][number]


def reordered(content):
    content["model"] = dict(sorted(content["model"].items()))


def named(names):
    """One group that has them."""

    def damage(content):
        group, other = content["optimizer"]["param_groups"]
        numbers = group["params"] + other["params"]
        content["optimizer"]["param_groups"] = [group | {"params": numbers, "param_names": names}]

    return damage


def another(content):
    content["optimizer_of_the_critic"] = content["optimizer"]


def cut(content):
    content["optimizer"]["param_groups"][1]["params"].pop()


def shared(content):
    """Two moments in the memory of one."""
    state = content["optimizer"]["state"]
    state[4]["exp_avg_sq"] = state[8]["exp_avg_sq"]


def nan(tensor):
    return tensor.index_fill(0, torch.tensor([2]), math.nan)


SHAPES = {name: tensor.shape for name, tensor in contents(ARGS)["model"].items() if name != "lm_head.weight"}
SPLIT = sorted(SHAPES, key=lambda name: len(SHAPES[name]) < 2)
SORTED = "the weights are sorted by name, so their order in the model is lost"
C_PROJ = "transformer.h.0.attn.c_proj.weight"
C_FC = "transformer.h.1.mlp.c_fc.weight"
BAD = f"the second moments of {C_PROJ} are negative, NaN or infinite"
LAYOUT = "it is not laid out as torch's"
FAULTS: dict[str, tuple[Any, str]] = {
    "permuted": (lambda content: swapped(content, 0, 2), "2 of 28 moments have other shapes than the weights"),
    "transposed": (moment(lambda v: v.reshape(4, 16)), "1 of 28 moments have other shapes than the weights"),
    "cut": (cut, "1 of its moments are of no group"),
    "a group less": (lambda c: c["optimizer"]["param_groups"].pop(), "18 of its moments are of no group"),
    "frozen": (lambda c: without_state(c, [3]), f"it has no moments of {C_PROJ}"),
    "sorted": (reordered, SORTED),
    "two": (another, "there are 2 optimizers"),
    "of another parameter": (option(params=[*range(10, 29)]), "it is of 29 parameters, and the file has 28"),
    "other numbers": (option(params=[*range(11, 29)]), LAYOUT),
    "names for numbers": (option(params=["a"]), LAYOUT),
    "groups by name": (lambda c: c["optimizer"].update(param_groups={}), LAYOUT),
    "a group that is none": (lambda c: c["optimizer"]["param_groups"].append(7), LAYOUT),
    "no state": (lambda c: c["optimizer"].pop("state"), LAYOUT),
    "state that is none": (lambda c: c["optimizer"]["state"].update({4: [1.0]}), LAYOUT),
    "no steps": (
        lambda c: c["optimizer"]["state"].clear(),
        "it has taken no step",
    ),
    "only one moved": (
        lambda c: without_state(c, range(1, 28)),
        "so many of its moments are missing that the others fit in two ways",
    ),
    "names of others": (option(param_names=[f"p{i}" for i in range(18)]), "it has not a name for each parameter"),
    "names that are none": (named([7] * 28), LAYOUT),
    "too few names": (named(["transformer.wte.weight"]), LAYOUT),
    "other names": (named([f"p{i}" for i in range(28)]), "it names other parameters than the file has"),
    "names in another order": (named(SPLIT[::-1]), "24 of 28 moments have other shapes than the weights"),
    "two names for one": (
        named(["lm_head.weight", *SPLIT[:1], *SPLIT[2:]]),
        "it has two of its parameters for one tensor",
    ),
    "no second moment": (lambda c: c["optimizer"]["state"][4].pop("exp_avg_sq"), "a second moment in it is no tensor"),
    "a list for it": (moment(lambda v: v.tolist()), "a second moment in it is no tensor"),
    "no largest one": (option(amsgrad=True), "a second moment in it is no tensor"),
    "amsgrad": (option(amsgrad=torch.ones(3)), "its amsgrad is neither true nor false"),
    "negative": (moment(lambda v: v - v.min() - 1e-9), BAD),
    "NaN": (moment(nan), BAD),
    "infinite": (moment(lambda v: v / 0), BAD),
    "whole numbers": (moment(lambda v: v.long()), f"the moments of {C_PROJ} are not real numbers"),
    "complex": (moment(lambda v: v + 0j), f"the moments of {C_PROJ} are not real numbers"),
    "one number": (
        moment(lambda v: torch.ones(1).expand(v.shape)),
        f"the moment of {C_PROJ} shares its memory with other weights or itself: save a clone of it",
    ),
    "shared": (
        shared,
        f"the moment of {C_FC} shares its memory with other weights or itself: save a clone of it",
    ),
    "no lr": (lambda c: c["optimizer"]["param_groups"][1].pop("lr"), "its optimizer is no Adam"),
    "lr": (option(lr=math.nan), "its lr is not a number from 1e-30 to 1e+30"),
    "lr, at the end of a schedule": (option(lr=0.0), "its lr is not a number from 1e-30 to 1e+30"),
    "lr, negative": (option(lr=-1e-3), "its lr is not a number from 1e-30 to 1e+30"),
    "lr, large": (option(lr=10**400), "its lr is not a number from 1e-30 to 1e+30"),
    "lr, true": (option(lr=True), "its lr is not a number from 1e-30 to 1e+30"),
    "lr, of four bits": (
        option(lr=torch.ones(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
        "its lr is not a number from 1e-30 to 1e+30",
    ),
    "lr, many": (option(lr=torch.ones(2)), "its lr is not a number from 1e-30 to 1e+30"),
    "eps": (option(eps=0), "its eps is not a number from 1e-30 to 1e+30"),
    "betas": (option(betas=0.9), "its betas are not two numbers"),
    "beta1": (option(betas=(1.0, 0.9)), "its beta1 is not a number from 0 to 1"),
    "beta2": (option(betas=(0.9, 1 - 1e-17)), "its beta2 is not a number from 0 to 1"),
    "step 0": (state(step=0), "its step is not a number from 1 to 9.0072e+15"),
    "step 2.5": (state(step=torch.tensor(2.5)), "its step is 2.5"),
    "step, missing": (state(step=None), "its step is not a number from 1 to 9.0072e+15"),
    "step, complex": (state(step=torch.tensor(1 + 0j)), "its step is not a number from 1 to 9.0072e+15"),
    "groups alike": (
        lambda content: regrouped(content, [2, 12, 12, 2]),
        "two of its groups are of the same shapes, so which is which is not sure",
    ),
}


def armed(content):
    """With dictionaries at every depth whose methods are texts, which a pickle can make."""
    if isinstance(content, list):
        return [armed(item) for item in content]
    if not isinstance(content, dict):
        return content
    made = OrderedDict((key, armed(value)) for key, value in content.items())
    vars(made).update(dict.fromkeys(["get", "keys", "pop", "values"], "no method"))
    return made


def test_dictionaries_need_not_have_their_methods(nanogpt):
    folder, content = nanogpt
    expected, _ = reread(folder, content)
    found, notes = reread(folder, content | {"optimizer": armed(content["optimizer"])})
    assert notes == []
    assert_moments(found, expected.second_moments)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_matched_or_is_not_sound_is_said_in_a_note(nanogpt, fault):
    folder, content = nanogpt
    damage, said = FAULTS[fault]
    damage(content)
    assert reread(folder, content) == (None, [said])


def test_names_sorted_with_their_numbers_by_size_have_lost_their_order_too(tmp_path):
    args = ARGS | {"n_layer": 11}
    content = contents(args)
    assert reread(tmp_path, content, args)[0]
    ordered = sorted(content["model"], key=lambda name: name.replace("h.10.", "h.:."))
    assert ordered != sorted(content["model"])
    content["model"] = {name: content["model"][name] for name in ordered}
    assert reread(tmp_path, content, args) == (None, [SORTED])


def test_moments_have_no_autograd(nanogpt):
    folder, content = nanogpt
    content["optimizer"]["state"][3]["exp_avg_sq"].requires_grad_()
    found, _ = reread(folder, content)
    assert not any(moment.requires_grad for moment in found.second_moments.values())


def test_groups_in_the_order_of_the_state_dict(nanogpt):
    folder, content = nanogpt
    expected, _ = reread(folder, content)
    regrouped(content, [2, 24, 0, 2], weight_decay=0.5, amsgrad=False)
    found, notes = reread(folder, content)
    assert notes == []
    assert_moments(found, expected.second_moments)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop"])
def test_other_optimizers_are_none(nanogpt, kind):
    """NAdam and RAdam have second moments too, but divide by something else."""
    folder, content = nanogpt
    parameters = [nn.Parameter(t.clone()) for name, t in content["model"].items() if name != "lm_head.weight"]
    optimizer = stepped(parameters, kind=getattr(torch.optim, kind)).state_dict()
    assert reread(folder, content | {"optimizer": optimizer}) == (None, ["its optimizer is no Adam"])


def test_parameters_that_the_optimizer_was_not_given(nanogpt):
    folder, content = nanogpt
    parameters = [nn.Parameter(t.clone()) for name, t in content["model"].items() if "wpe" not in name][:-1]
    optimizer = stepped(parameters).state_dict()
    said = "it is of 27 parameters, and the file has 28"
    assert reread(folder, content | {"optimizer": optimizer}) == (None, [said])


def test_damaged_states_are_read_or_said_to_be_unread(tmp_path):
    """Whatever stands wherever: values, keys and whole branches."""
    args = ARGS | {"n_layer": 1, "bias": False}
    sound, rng, unread = contents(args), random.Random(0), 0
    assert reread(tmp_path, sound, args)[0]
    for _ in range(500):
        content = copy.deepcopy(sound)
        for _ in range(rng.choice([1, 1, 2])):
            damaged(content, rng)
        found, notes = reread(tmp_path, content, args)
        if found is None:
            unread += len(notes)
            assert notes or "param_groups" not in content["optimizer"]
            continue
        for leaf, moment in found.second_moments.items():
            preconditioner = found.preconditioner(leaf)
            assert preconditioner.shape == moment.shape
            assert (preconditioner > 0).all()
            assert preconditioner.isfinite().all()
    assert 200 < unread < 490


VALUES: list[Any] = [0, 1, -1, 7, 2.5, 1e308, 10**400, math.nan, -math.inf, True, None, "", "lr", [], [0], (1, 1), {}]
TENSORS: list[Any] = [
    lambda tensor: -tensor,
    lambda tensor: tensor * math.nan,
    lambda tensor: tensor[:-1],
    lambda tensor: tensor.transpose(0, -1),
    lambda tensor: tensor * 1e200 * 1e100,
    lambda tensor: tensor.int(),
    lambda tensor: tensor.half(),
    lambda tensor: tensor.to(torch.float8_e5m2),
    lambda tensor: tensor > 0,
    lambda tensor: torch.ones(1).expand(tensor.shape),
    lambda tensor: torch.ones(1).as_strided((10**6, 10**6), (0, 0)),
    lambda tensor: torch.empty(0),
]


def damaged(content, rng):
    """One thing of an optimizer's state lost, renamed, or replaced."""
    inner = content["optimizer"]
    if not inner:
        return
    while isinstance(inner, dict | list) and inner and (inner is content["optimizer"] or rng.random() < 0.85):
        holder, key = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = holder[key]
    kind, value = rng.randrange(4), holder[key]
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice([0, 3, 8, 9, -1, "step", "params", "x", None, 0.5, True])] = holder.pop(key)
    elif kind == 2 and isinstance(value, torch.Tensor) and value.ndim:
        holder[key] = rng.choice(TENSORS)(value)
    else:
        holder[key] = copy.deepcopy(rng.choice([*VALUES, np.float64(0.5), torch.tensor(0.5), torch.ones(2)]))
