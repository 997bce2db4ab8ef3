"""``hess describe``: what a checkpoint holds is said in full, and nothing else is computed."""

import json

import pytest
import torch

from hesscore.describe import describe
from hesscore.problem import open_problem
from tests.checkpoints import ARGS, saved
from tests.command import CHECKPOINT, HESS, ROOT, run
from tests.reference_nanogpt import state_dict


def test_every_parameter_is_counted_once(tmp_path):
    found = describe(CHECKPOINT)
    assert found.n_params == 214_400 == sum(leaf.numel() for leaf in open_problem(CHECKPOINT).parameters.values())
    queries = next(part for part in found.parts if (part.component, part.parameter) == ("attn.q", "weight"))
    assert (queries.layers, queries.shape, queries.n_params) == (4, (64, 64), 4 * 64 * 64)
    assert queries.tensor == "transformer.h.0.attn.c_attn.weight[0:64]"


def test_what_is_left_out_is_said_with_its_reason(tmp_path):
    state = state_dict(ARGS)
    state["transformer.h.0.attn.bias"] = torch.ones(6, 6).tril().view(1, 1, 6, 6)
    assert describe(saved(tmp_path, state)).left_out == {
        "lm_head.weight": "tied: it is transformer.wte.weight",
        "transformer.h.0.attn.bias": "a buffer: the causal mask, no parameter",
    }


def test_the_time_grows_with_the_work_and_the_memory_with_the_precision():
    single, double = (describe(CHECKPOINT, dtype) for dtype in ("float32", "float64"))
    assert single.memory < double.memory < 2**30
    assert 1 < double.seconds < 3600


def test_less_data_take_less():
    few, many = (describe(CHECKPOINT, max_tokens=count) for count in (64, 4096))
    assert (few.tokens, many.tokens) == (64, 4096)
    assert few.memory < many.memory / 4
    assert few.seconds < many.seconds / 8


def test_a_spec_is_described_too():
    found = describe(ROOT / "configs/blocks/paper-block.yaml")
    assert (found.family, found.sha256, found.wants, found.left_out) == ("spec", None, [], {})


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    shown = run(HESS, "describe", str(CHECKPOINT), "--json", str(tmp_path / "found.json"))
    assert shown.returncode == 0
    assert "left out: lm_head.weight (tied: it is transformer.wte.weight)" in shown.stdout
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["n_params"] == 214_400
    assert written["spec"]["heads"] == 4
    assert {part["component"] for part in written["parameters"]} >= {"embed.token", "attn.q", "final_norm"}
    assert written["predicted"]["memory_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.pt"], 3, "hess: missing.pt: no such file"),
        ([str(CHECKPOINT), "--loss", "mlm"], 2, "hess: --loss mlm: give one of causal_lm, masked_lm, token, "),
        ([str(CHECKPOINT), "--loss", "sequence"], 2, "hess: --loss sequence: the file has no head for it; it can be "),
        ([str(CHECKPOINT), "--dtype", "int8"], 2, "hess: --dtype int8: give one of float64, float32"),
    ],
)
def test_what_cannot_be_described_is_one_line(arguments, code, said):
    refused = run(HESS, "describe", *arguments)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert refused.stderr.startswith(said)
    assert refused.stderr.count("\n") == 1


def test_a_spec_of_more_layers_than_can_be_written_down_is_refused(tmp_path):
    path = tmp_path / "deep.yaml"
    path.write_text("d_model: 4\nd_ff: 8\nlayers: 1000000000\n")
    result = run(HESS, "describe", path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "layers: 1000000000 are more than 10000" in result.stderr
