"""The report: the same columns everywhere, strict JSON, and everything it takes to make it again."""

import csv
import hashlib
import io
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

import hesscore
from hesscore.analysis import Analyst, Finding, Row
from hesscore.problem import open_problem
from hesscore.report import Report
from tests.command import CHECKPOINT, ROOT, VAL, strict

# fmt: off
COLUMNS = [
    "layer", "component", "parameter", "tensor", "shape", "n_params", "weight_norm", "grad_norm", "lambda_max",
    "lambda_max_error", "lambda_min", "lambda_min_error", "trace", "trace_stderr", "gauss_newton_share", "condition",
    "condition_is_exact", "spectral_entropy", "spectral_entropy_error", "negative_mass", "negative_mass_error",
    "bound_upper", "bound_lower", "from_loss", "from_softmax", "from_norm", "from_activation", "from_product",
    "preconditioned_sharpness", "preconditioned_sharpness_error", "lr_scale", "converged", "note",
]
# fmt: on

SELECTED = ["blocks.3.norm2.bias", "final_norm.weight", "final_norm.bias"]
SETTINGS = {"seed": 3, "tolerance": 1e-3, "layers": None, "components": "final_norm"}


@pytest.fixture(scope="module")
def report():
    problem = open_problem(CHECKPOINT, VAL, max_tokens=64)
    curvature = problem.curvature()
    analyst = Analyst(problem, curvature, 3)
    found = [analyst.block(name) for name in SELECTED[:2]]
    return Report(problem, float(curvature.loss), SETTINGS, SELECTED, found, curvature.gradient, duration=1.23456)


def empty_row(**fields):
    known = {"layer": 0, "component": "norm1", "parameter": "weight", "tensor": "x", "shape": (4, 2), "n_params": 8}
    return Row(**{**known, "weight_norm": 1.0, "grad_norm": 2.0, **fields})


# --- columns ---


def test_columns_are_the_same_everywhere_and_in_order(report):
    (header, *_) = csv.reader(io.StringIO(report.to_csv()))
    assert header == COLUMNS == list(report.frame.columns)
    assert [list(row) for row in strict(report.to_json())["rows"]] == [COLUMNS] * 2


def test_csv_holds_every_digit(report):
    lines = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(lines) == 2
    for line, row in zip(lines, report.rows, strict=True):
        for name in ("lambda_max", "lambda_max_error", "trace", "weight_norm", "from_norm"):
            assert float(line[name]) == getattr(row, name)
        assert (line["shape"], line["n_params"], line["converged"], line["note"]) == ("64", "64", "True", "")
    assert [line["layer"] for line in lines] == ["3", ""]


def test_csv_comes_back_as_the_frame(report):
    noted = replace(report, findings=[Finding(replace(row, note="why")) for row in report.rows])
    back = pd.read_csv(io.StringIO(noted.to_csv()), dtype={"layer": "Int64"})
    pd.testing.assert_frame_equal(back.astype({"shape": str}), noted.frame.astype({"shape": str}))


def test_json_holds_the_rows(report):
    for line, row in zip(strict(report.to_json())["rows"], report.rows, strict=True):
        assert line == {name: "64" if name == "shape" else getattr(row, name) for name in COLUMNS}


def test_what_is_missing_is_empty_or_null(report):
    broken = empty_row(grad_norm=math.nan, lambda_min=-math.inf, note='a "note", with\nall')
    other = replace(report, findings=[Finding(broken), *report.findings])
    line = strict(other.to_json())["rows"][0]
    assert [line[name] for name in ("lambda_max", "lambda_min", "grad_norm", "trace")] == [None] * 4
    assert (line["converged"], line["note"], line["shape"]) == (False, broken.note, "4x2")
    cells = next(csv.DictReader(io.StringIO(other.to_csv())))
    assert [cells[name] for name in ("lambda_max", "lambda_min", "grad_norm", "trace")] == [""] * 4
    assert (cells["converged"], cells["note"], cells["shape"]) == ("False", broken.note, "4x2")
    assert other.frame.loc[0, ["lambda_max", "lambda_min", "grad_norm", "trace"]].isna().all()


def test_json_never_says_nan(report):
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(report, loss=math.nan).to_json()


def test_a_report_without_rows_has_its_columns(report):
    nothing = replace(report, findings=[])
    assert nothing.to_csv() == ",".join(COLUMNS) + "\n"
    assert strict(nothing.to_json())["rows"] == []


# --- provenance ---


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_json_says_what_it_takes_to_make_it_again(report):
    content = strict(report.to_json())
    assert content["schema_version"] == 2
    assert content["hess_version"] == hesscore.__version__
    assert content["torch_version"] == torch.__version__
    assert content["source"] == str(CHECKPOINT)
    assert content["family"] == "nanoGPT"
    assert content["checkpoint_sha256"] == sha256(CHECKPOINT)
    assert content["data"] == str(VAL)
    assert content["data_sha256"] == sha256(VAL)
    assert (content["dtype"], content["device"], content["scored_tokens"]) == ("float64", "cpu", 64)
    assert content["loss"] == report.loss == float(report.problem.curvature().loss)
    assert content["loss_normalisation"] == "mean over scored tokens"
    assert {name: content[name] for name in SETTINGS} == SETTINGS
    assert content["duration_seconds"] == 1.235
    assert content["notes"] == ["only the first 64 of 4096 tokens are scored"]


def test_every_parameter_has_a_row_or_a_reason_to_have_none(report):
    skipped = strict(report.to_json())["skipped"]
    assert skipped.pop("final_norm.bias") == "interrupted"
    assert set(skipped.values()) == {"not selected"}
    assert [*skipped] == [name for name in report.problem.graph.parameters if name not in SELECTED]
    assert len(skipped) == 68 - 3


def test_the_spec_in_the_json_is_the_models(report):
    spec = strict(report.to_json())["spec"]
    assert type(report.problem.spec)(**spec) == report.problem.spec
    assert (spec["layers"], spec["d_model"], spec["vocab"], spec["tied"]) == (4, 64, 96, True)


def test_a_spec_says_where_its_weights_come_from():
    problem = open_problem(ROOT / "configs/blocks/paper-block.yaml", seed=5)
    content = strict(Report(problem, 1.0, SETTINGS, []).to_json())
    assert (content["weights"], content["data"]) == ("drawn from seed 5", "drawn from seed 5")
    assert "checkpoint_sha256" not in content
    assert content["notes"] == [
        "seeded weights and inputs: these numbers describe the architecture, not a trained model"
    ]


def test_float32_is_said():
    problem = open_problem(CHECKPOINT, VAL, "float32", max_tokens=2)
    assert strict(Report(problem, 1.0, SETTINGS, []).to_json())["dtype"] == "float32"
