"""The state dict in a file of torch.save, wherever a training script put it."""

from typing import Any

import pytest
import torch

from hesscore.checkpoints.reading import read
from hesscore.checkpoints.statedicts import find
from hesscore.errors import InputError

STATE = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.tensor([1.0, 2.0])}
OTHER = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(2)}


def optimizer(parameters):
    adam = torch.optim.AdamW(parameters)
    torch.stack([(p**2).sum() for p in parameters]).sum().backward()
    adam.step()
    return adam.state_dict()


OPTIMIZER = optimizer([torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2))])


def assert_state(tensors, state=STATE):
    assert list(tensors) == list(state)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("modern", [True, False])
@pytest.mark.parametrize(
    ("content", "beside"),
    [
        (STATE, {}),
        (STATE | {"epoch": 3, "optimizer": {"lr": 0.1}}, {"epoch": 3, "optimizer": {"lr": 0.1}}),
        ({"model": STATE, "iter_num": 7, 5: None}, {"iter_num": 7, 5: None}),
        ({"epoch": 3, "state_dict": STATE}, {"epoch": 3}),
        ({"model_state_dict": STATE}, {}),
        ({"module": {"model": {"state_dict": STATE, "a": 1}, "b": 2}, "c": 3}, {"a": 1, "b": 2, "c": 3}),
        ({"model": {"state_dict": STATE, "epoch": "inner"}, "epoch": "outer"}, {"epoch": "inner"}),
        ({"net": STATE, "epoch": 3}, {"epoch": 3}),
        ({"ema": {"module": STATE}}, {}),
    ],
)
def test_a_state_dict_at_any_place(tmp_path, content, beside, modern):
    path = tmp_path / "ckpt.pt"
    torch.save(content, path, _use_new_zipfile_serialization=modern)
    stored = read(path)
    assert_state(stored.tensors)
    assert (stored.beside, stored.notes) == (beside, [])


@pytest.mark.parametrize("key", ["optimizer", "model"])
def test_an_optimizer_holds_no_state_dict(tmp_path, key):
    path = tmp_path / "ckpt.pt"
    torch.save({"net": STATE, key: OPTIMIZER}, path)
    stored = read(path)
    assert_state(stored.tensors)
    assert torch.equal(stored.beside[key]["state"][1]["exp_avg"], OPTIMIZER["state"][1]["exp_avg"])
    assert stored.notes == []
    with pytest.raises(InputError, match=r"^holds no dictionary of tensors; its keys are optimizer: save model"):
        find({"optimizer": OPTIMIZER})


def test_a_loss_and_the_state_of_a_generator_are_no_weights():
    beside = {"best_val_loss": torch.tensor(2.5), "rng": torch.get_rng_state(), "rngs": {"cpu": torch.get_rng_state()}}
    found = find({"net": STATE, **beside})
    assert_state(found.tensors)
    assert found.beside is not beside and found.beside == beside
    assert found.notes == []
    with pytest.raises(InputError, match="holds no dictionary of tensors"):
        find(beside)


@pytest.mark.parametrize(
    ("content", "chosen", "others"),
    [
        ({"model_ema": OTHER, "model": STATE}, "model", "model_ema"),
        ({"state_dict": STATE, "ema": {"shadow": OTHER}}, "state_dict", "ema.shadow"),
        ({"model": {"state_dict": STATE, "ema": OTHER}}, "model.state_dict", "model.ema"),
        ({"teacher": {"model": OTHER | {"c": torch.ones(9)}}, "model": STATE}, "model", "teacher.model"),
        ({"mean": torch.ones(3), "model": STATE}, "model", "the outermost dictionary"),
    ],
)
def test_the_model_itself_comes_before_others_and_a_note_says_so(content, chosen, others):
    found = find(content)
    assert_state(found.tensors)
    assert found.notes == [f"its weights are those of {chosen}; left out: {others}"]


def test_where_none_is_more_likely_one_is_asked_for():
    said = "holds several state dicts: generator, discriminator; save the one to be analysed alone"
    with pytest.raises(InputError, match=f"^{said}$"):
        find({"generator": STATE, "discriminator": OTHER})
    with pytest.raises(InputError, match=r"^holds several state dicts: the outermost dictionary, ema;"):
        find({**STATE, "ema": OTHER})


def test_dictionaries_that_many_lead_to_are_looked_into_once():
    """A pickle may hold 10^9 ways to one dictionary."""
    below: list[dict[str, Any]] = [{"model": STATE}]
    for _ in range(8):
        below = [{str(key): content for key, content in enumerate(below)} for _ in range(10)]
    assert_state(find({str(key): content for key, content in enumerate(below)}).tensors)


def test_a_dictionary_within_itself_has_an_end():
    content: dict[str, Any] = {"model": STATE}
    content["again"] = content
    assert_state(find(content).tensors)
