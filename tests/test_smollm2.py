"""A real Llama: SmolLM2 with 135 million weights, 30 layers, 9 query and 3 key heads."""

import resource
import subprocess
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from hesscore.capacity import need
from hesscore.chain import Point
from hesscore.checkpoints import load
from hesscore.inputs.arrays import of_arrays
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests.command import HESS, rows_of
from tests.oracle import in_double
from tests.smollm2 import convert

pytestmark = pytest.mark.slow

PYTHON = 600 * 2**20
"""Bytes that Python and torch take before there is any model."""

BEGIN = 1
SENTENCE = [504, 3575, 282, 4649, 314, 7042, 28, 527, 314, 3807, 335, 260, 4626, 1268, 462, 30]
"""The capital of France is Paris, which is located on the river Seine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return convert(tmp_path_factory.mktemp("smollm2"))


def at(folder, ids):
    checkpoint = load(folder)
    graph = model(checkpoint.spec)
    data = of_arrays(checkpoint.spec, {"input_ids": torch.tensor([ids])})
    weights = {name: leaf.double() for name, leaf in checkpoint.parameters.items()}
    point = Point(graph, weights | inputs(checkpoint.spec, data.data, data.target), watch={"head"})
    return float(point.output), point.watched["head"]


@pytest.mark.parametrize(("ids", "loss"), [([BEGIN, *SENTENCE], 2.8628), (SENTENCE, 1.9797)])
def test_the_loss_of_a_sentence(folder, ids, loss):
    ours, logits = at(folder, ids)
    assert abs(ours - loss) < 1e-3
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    with in_double():
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        expected = theirs(torch.tensor([ids]), labels=torch.tensor([ids]))
    assert abs(ours - expected.loss.item()) < 1e-10
    assert (logits - expected.logits).abs().max() < 1e-10 * expected.logits.abs().max()


def test_a_report_of_three_layers_takes_no_more_memory_than_was_predicted(folder, tmp_path):
    text = tmp_path / "topics.txt"
    text.write_text("\n".join(topics.values())[:10_000])
    command = [HESS, "analyze", folder, "--data", text, "--max-tokens", "128", "--layers", "0,15,29"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    found = subprocess.run([*command, "--components", "norm1", "--csv", "-", "--quiet"], capture_output=True, text=True)
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert found.returncode == 0, found.stderr
    rows = rows_of(found.stdout)
    assert [(row["layer"], row["converged"]) for row in rows] == [("0", "True"), ("15", "True"), ("29", "True")]
    assert all(float(row["lambda_max"]) > float(row["lambda_max_error"]) > 0 for row in rows)
    loaded = (folder / "model.safetensors").stat().st_size
    assert 1024 * before < peak < need(load(folder).spec, 1, 128, torch.float32) + loaded + PYTHON
