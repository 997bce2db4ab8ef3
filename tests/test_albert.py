"""An ALBERT of transformers means to us what it means to transformers."""

import pytest
import torch
import transformers as hf

from hesscore.analysis import select
from hesscore.checkpoints import load
from hesscore.errors import UsageError
from hesscore.problem import open_problem
from tests.checkpoints import refusal
from tests.oracle import assert_same, changed, made, saved
from tests.test_bert import BATCH, FIELDS, SCORED, target

NARROW = FIELDS | {"embedding_size": 4, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_hidden_groups": 2},
        {"num_hidden_groups": 4},
        {"tie_word_embeddings": False},
        {"hidden_act": "gelu", "layer_norm_eps": 0.1},
        {"embedding_size": 8},
    ],
    ids=str,
)
def test_masked_words(tmp_path, options):
    model = made(hf.AlbertForMaskedLM, hf.AlbertConfig(**NARROW | options))
    assert_same(model, saved(model, tmp_path), BATCH)


def test_other_heads(tmp_path):
    config = hf.AlbertConfig(**NARROW, num_labels=3)
    model = made(hf.AlbertForSequenceClassification, config)
    assert_same(model, saved(model, tmp_path / "sequence"), BATCH | {"labels": torch.tensor([2, 0])})
    model = made(hf.AlbertForTokenClassification, config)
    assert_same(model, saved(model, tmp_path / "token"), BATCH | {"labels": SCORED.clamp(max=2)})
    model = made(hf.AlbertModel, config)
    assert_same(model, saved(model, tmp_path / "bare"), BATCH | {"labels": target(2, 7, 8)})
    left_out = load(saved(made(hf.AlbertForPreTraining, config), tmp_path / "pretraining")).left_out
    assert {"albert.pooler.weight", "sop_classifier.classifier.weight"} <= set(left_out)


def test_a_block_on_its_own_has_the_weights_that_it_shares(tmp_path):
    """Its input is that of its own layer, its weights those of the first layer of the set."""
    path = saved(made(hf.AlbertForMaskedLM, hf.AlbertConfig(**NARROW, num_hidden_groups=2)), tmp_path)
    problem = open_problem(path)
    assert {name.split(".")[1] for name in problem.parameters if name.startswith("blocks.")} == {"0", "2"}
    first, second, third = (problem.block(layer) for layer in (0, 1, 2))
    weight = "blocks.0.mlp.up.weight"
    assert torch.equal(first.leaves[weight], second.leaves[weight])
    assert torch.equal(third.leaves[weight], problem.parameters["blocks.2.mlp.up.weight"])
    assert float(first.loss) != float(second.loss)


def test_layers_are_selected_by_the_first_with_their_weights(tmp_path):
    path = saved(made(hf.AlbertForMaskedLM, hf.AlbertConfig(**NARROW, num_hidden_groups=2)), tmp_path)
    problem = open_problem(path)
    second = {name for name in problem.parameters if name.startswith("blocks.2.")}
    assert set(select(problem, "2-3")) == second
    with pytest.raises(UsageError, match=r"--layers 3: layer 3 has the weights of layer 2: give that"):
        select(problem, "3")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"inner_group_num": 2}, "config.json: inner_group_num: input should be 1"),
        ({"is_decoder": True}, "config.json: is_decoder: input should be False"),
        ({"num_hidden_groups": 3}, "no such architecture: layers: 4 is not divisible by weight_sets: 3"),
        (
            {"embedding_size": 5},
            "albert.embeddings.word_embeddings.weight has shape (13, 4); its architecture asks ",
        ),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, fields, said):
    path = saved(made(hf.AlbertForMaskedLM, hf.AlbertConfig(**NARROW)), tmp_path)
    assert refusal(changed(path, **fields)).startswith(said)
