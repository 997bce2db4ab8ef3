"""The whole report: what is in it, that it holds together, and the doors of the library."""

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import hesscore
from hesscore.curvature import Curvature
from hesscore.errors import UsageError
from hesscore.problem import open_problem
from hesscore.run import analyze, begin
from hesscore.stored import read_report
from tests.checkpoints import ARGS, saved
from tests.command import CHECKPOINT, VAL
from tests.reference_nanogpt import state_dict


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small nanoGPT with tokens, which are scored in seconds."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    state = {name: tensor * (3.0 if tensor.ndim > 1 else 1.0) for name, tensor in state_dict(ARGS).items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    np.array([1, 4, 4, 0, 9, 10, 3, 7, 2, 3, 4, 5, 6], dtype="<u2").tofile(folder / "val.bin")
    return saved(folder, state), folder / "val.bin"


@pytest.fixture(scope="module")
def report(files):
    return analyze(*files)


def test_the_whole_model_is_one_more_row(report, files):
    curvature = open_problem(*files).curvature()
    matrix = curvature.dense()
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    row = report.whole.row
    assert (row.name, row.component, row.shape) == ("model", "model", (len(values),))
    assert abs(row.lambda_max - float(values[-1])) <= row.lambda_max_error
    assert abs(row.lambda_min - float(values[0])) <= row.lambda_min_error
    assert abs(row.trace - float(values.sum())) <= 4 * row.trace_stderr
    assert float(values.abs().max()) <= row.bound_upper
    assert row.bound_lower <= float(values.abs().max()) * (1 + 1e-12)


def test_the_traces_of_the_blocks_add_up_to_that_of_the_whole(report, files):
    matrix = open_problem(*files).curvature().dense()
    total = sum(row.trace for row in report.rows)
    spread = sum(row.trace_stderr**2 for row in report.rows) ** 0.5
    assert abs(total - float(matrix.trace())) <= 4 * spread


def test_sources_add_up_for_every_block_and_the_whole(report):
    for finding in [*report.findings, report.whole]:
        row = finding.row
        if row.note.startswith("no curvature"):
            continue
        assert sum(finding.causes.values()) == pytest.approx(row.lambda_max, rel=1e-9)
        kinds = row.from_loss + row.from_softmax + row.from_norm + row.from_activation + row.from_product
        assert kinds == pytest.approx(row.lambda_max, rel=1e-9)
        assert sum(part.value for part in finding.trace_causes.values()) == pytest.approx(row.trace, rel=1e-9)


def test_a_block_is_caused_by_what_comes_after_it_alone(report):
    """By layer of the source: nothing before a parameter causes its curvature."""
    late = next(f for f in report.findings if f.row.name == "blocks.1.mlp.down.weight")
    assert set(late.causes) <= {"loss", "final_norm", "final_norm.gain", "head"}
    early = next(f for f in report.findings if f.row.name == "blocks.0.attn.k.weight")
    assert {"blocks.0.attn.softmax", "blocks.1.attn.softmax", "blocks.1.norm2", "loss"} <= set(early.causes)


def test_every_column_is_filled_or_the_note_says_why(report):
    for row in [*report.rows, report.whole.row]:
        missing = {name for name, value in vars(row).items() if value is None} - {"layer"}
        missing -= {"preconditioned_sharpness", "preconditioned_sharpness_error"}  # no optimizer is in the file
        assert not missing or row.note, (row.name, missing)


def test_the_json_comes_back_as_it_was(report, tmp_path):
    (tmp_path / "report.json").write_text(report.to_json())
    content = read_report(tmp_path / "report.json")
    assert content == json.loads(json.dumps(report.content))
    for name, causes in content["causes"].items():
        row = content["model"] if name == "model" else next(r for r in report.rows if r.name == name).__dict__
        assert sum(causes["lambda_max"].values()) == pytest.approx(row["lambda_max"], rel=1e-7, abs=1e-12)
    for spectrum in content["spectra"].values():
        assert sum(spectrum["weights"]) == pytest.approx(1, rel=1e-4)
        assert spectrum["eigenvalues"] == sorted(spectrum["eigenvalues"])


def test_the_same_seed_gives_the_same_bytes(report, files):
    def text(found):
        content = {name: value for name, value in found.content.items() if name != "duration_seconds"}
        return json.dumps(content)

    again, other = analyze(*files), analyze(*files, seed=1)
    assert text(again) == text(report) != text(other)


def test_doubling_the_batch_by_repetition_changes_nothing(files, tmp_path):
    ids = np.array([[1, 4, 4, 0, 9, 10], [7, 2, 3, 4, 5, 6]])
    np.savez(tmp_path / "once.npz", input_ids=ids)
    np.savez(tmp_path / "twice.npz", input_ids=np.concatenate([ids, ids]))
    once, twice = (
        analyze(files[0], tmp_path / f"{name}.npz", components="attn.*,mlp.up") for name in ("once", "twice")
    )
    for one, two in zip(once.rows, twice.rows, strict=True):
        for name in ("lambda_max", "lambda_min", "trace"):
            error = f"{name}_error" if name != "trace" else "trace_stderr"
            doubt = max(getattr(one, error), getattr(two, error))
            assert abs(getattr(one, name) - getattr(two, name)) <= doubt + 1e-12
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-10, abs=1e-15)


def test_a_part_of_the_model_has_no_whole(files):
    found = analyze(*files, components="norm1")
    assert (found.whole, found.activations, found.stability) == (None, None, None)
    assert [row.component for row in found.rows] == ["norm1"] * 4
    content = found.content
    assert (content["model"], content["stability"], content["activations"]) == (None, None, None)
    assert content["heterogeneity"]["blocks"] == 4


def test_a_budget_is_kept_and_errors_are_as_large_as_they_are():
    """Of the sample, in a fraction of the time that it takes."""
    started = time.monotonic()
    found = begin(CHECKPOINT, VAL, max_tokens=64, layers="3", budget=1.0)
    for _ in found.steps():
        pass
    rows: Any = found.report.rows
    assert len(rows) == 16
    assert any(not row.converged for row in rows)
    curvature = found.analyst.curvature
    for row in rows[:4]:
        matrix = curvature.dense([row.name])
        values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        assert abs(row.lambda_max - float(values[-1])) <= row.lambda_max_error
        assert abs(row.lambda_min - float(values[0])) <= row.lambda_min_error
    assert found.settings["budget"] == 1.0
    assert time.monotonic() - started < 120  # not for ever


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(files, budget):
    with pytest.raises(UsageError, match="--budget"):
        begin(*files, budget=budget)


# --- the library ---


def test_the_door_gives_a_data_frame(report, files):
    assert hesscore.analyze is analyze
    frame = report.frame
    assert list(frame["component"].unique()[:2]) == ["embed.token", "embed.position"]
    assert len(frame) == len(open_problem(*files).graph.parameters)
    assert "<table" in report._repr_html_()


def test_figures_are_matplotlibs(report):
    from matplotlib.figure import Figure

    assert isinstance(report.figure(), Figure)
    assert isinstance(report.figure("spectra"), Figure)
    with pytest.raises(UsageError, match="no figure is named spectrum: there are heat, causes"):
        report.figure("spectrum")


def test_blocks_are_operators_of_scipy(files):
    curvature: Curvature = open_problem(*files).curvature()
    block = curvature.block("blocks.0.attn.q.weight")
    operator = block.to_scipy()
    matrix = block.dense().numpy()
    np.testing.assert_allclose(operator @ np.eye(len(matrix)), matrix, atol=1e-12)
    assert operator.dtype == np.float64
    top = eigsh(operator, 1, which="LA", return_eigenvectors=False)[0]
    assert top == pytest.approx(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1], rel=1e-8)
    pair = curvature.block("blocks.0.attn.q.weight", "blocks.1.mlp.up.bias")
    np.testing.assert_allclose(pair.to_scipy().T @ np.eye(pair.shape[0]), pair.dense().numpy().T, atol=1e-12)
