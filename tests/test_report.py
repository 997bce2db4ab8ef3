"""The report: the same columns everywhere, strict JSON, everything it takes to make it again, and no half files."""

import csv
import hashlib
import io
import json
import math
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import hesscore
from hesscore.analysis import Row, analyze
from hesscore.errors import UsageError
from hesscore.problem import open_problem
from hesscore.report import Report, check_writable, write

FOLDER = Path(__file__).parent.parent / "sample_runs" / "pydoc"
CHECKPOINT, VAL = FOLDER / "ckpt-end.pt", FOLDER / "val.bin"

# fmt: off
COLUMNS = [
    "layer", "component", "parameter", "tensor", "shape", "n_params", "weight_norm", "grad_norm", "lambda_max",
    "lambda_max_error", "lambda_min", "lambda_min_error", "trace", "trace_stderr", "gauss_newton_share", "from_loss",
    "from_softmax", "from_norm", "from_activation", "from_product", "converged", "note",
]
# fmt: on

SETTINGS = {"seed": 3, "tolerance": 1e-3, "layers": None, "components": "final_norm"}


@pytest.fixture(scope="module")
def report():
    problem = open_problem(CHECKPOINT, VAL, max_tokens=64)
    curvature = problem.curvature()
    found = list(analyze(problem, curvature, ["blocks.3.norm2.bias", "final_norm.weight"], 3))
    return Report(problem, float(curvature.loss), SETTINGS, found, {"final_norm.bias": "interrupted"}, 1.23456)


def empty_row(**fields):
    known = {"layer": 0, "component": "norm1", "parameter": "weight", "tensor": "x", "shape": (4, 2), "n_params": 8}
    return Row(**{**known, "weight_norm": 1.0, "grad_norm": 2.0, **fields})


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def strict(text):
    return json.loads(text, parse_constant=refuse)


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
    noted = replace(report, rows=[replace(row, note="why") for row in report.rows])
    back = pd.read_csv(io.StringIO(noted.to_csv()), dtype={"layer": "Int64"})
    pd.testing.assert_frame_equal(back.astype({"shape": str}), noted.frame.astype({"shape": str}))


def test_json_holds_the_rows(report):
    for line, row in zip(strict(report.to_json())["rows"], report.rows, strict=True):
        assert line == {name: list(row.shape) if name == "shape" else getattr(row, name) for name in COLUMNS}


def test_what_is_missing_is_empty_or_null(report):
    broken = empty_row(grad_norm=math.nan, lambda_min=-math.inf, note='a "note", with\nall')
    other = replace(report, rows=[broken, *report.rows])
    line = strict(other.to_json())["rows"][0]
    assert [line[name] for name in ("lambda_max", "lambda_min", "grad_norm", "trace")] == [None] * 4
    assert (line["converged"], line["note"], line["shape"]) == (False, broken.note, [4, 2])
    cells = next(csv.DictReader(io.StringIO(other.to_csv())))
    assert (cells["lambda_max"], cells["trace"], cells["converged"], cells["shape"]) == ("", "", "False", "4x2")
    assert cells["note"] == broken.note


def test_json_never_says_nan(report):
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(report, loss=math.nan).to_json()


def test_a_report_without_rows_has_its_columns(report):
    nothing = replace(report, rows=[])
    assert nothing.to_csv() == ",".join(COLUMNS) + "\n"
    assert strict(nothing.to_json())["rows"] == []


# --- provenance ---


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_json_says_what_it_takes_to_make_it_again(report):
    content = strict(report.to_json())
    assert content["schema_version"] == 1
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
    assert content["skipped"] == {"final_norm.bias": "interrupted"}


def test_the_spec_in_the_json_is_the_models(report):
    spec = strict(report.to_json())["spec"]
    assert type(report.problem.spec)(**spec) == report.problem.spec
    assert (spec["layers"], spec["d_model"], spec["vocab"], spec["tied"]) == (4, 64, 96, True)


def test_a_spec_says_where_its_weights_come_from():
    problem = open_problem(FOLDER.parent.parent / "configs/blocks/paper-block.yaml", seed=5)
    content = strict(Report(problem, 1.0, SETTINGS).to_json())
    assert (content["weights"], content["data"]) == ("drawn from seed 5", "drawn from seed 5")
    assert "checkpoint_sha256" not in content
    assert content["notes"] == [
        "seeded weights and inputs: these numbers describe the architecture, not a trained model"
    ]


def test_float32_is_said():
    problem = open_problem(CHECKPOINT, VAL, "float32", max_tokens=2)
    assert strict(Report(problem, 1.0, SETTINGS).to_json())["dtype"] == "float32"


# --- files ---


def test_a_file_is_written_whole(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("first, and longer\n", "ä\n"):
        write(str(path), text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["rows.csv"]


@pytest.mark.parametrize("existing", [None, "as it was"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["writing", "replacing"])
def test_a_write_that_fails_leaves_all_as_it_was(tmp_path, monkeypatch, existing, error, when):
    path = tmp_path / "rows.csv"
    if existing:
        path.write_text(existing)

    class Full(io.TextIOWrapper):
        def write(self, text):
            super().write(text[: len(text) // 2])
            raise error

    def failing(*args):
        raise error

    if when == "writing":
        opened = lambda name, *args, **kwargs: Full(open(name, "wb"))  # noqa: E731, SIM115
        monkeypatch.setattr("hesscore.report.open", opened, raising=False)
    else:
        monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write(str(path), "all of it" * 1000)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert os.listdir(tmp_path) == (["rows.csv"] if existing else [])
    assert not existing or path.read_text() == existing


def test_a_dash_is_stdout(capsys):
    write("-", "a,b\n")
    assert capsys.readouterr() == ("a,b\n", "")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "rows.csv")
    write(str(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "rows.csv").read_text() == "text"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    check_writable([str(path)])
    write(str(path), "text")
    reader.join(10)
    assert read == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_what_cannot_be_written_is_refused_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    check_writable([None, "-", str(tmp_path / "new"), str(tmp_path / "file")])
    assert os.listdir(tmp_path) == ["file"]
    for path, why in {
        tmp_path: "a folder",
        tmp_path / "none" / "rows.csv": "no such folder, or no right to write there",
        tmp_path / "file" / "rows.csv": "no such folder, or no right to write there",
        "": "a folder",
    }.items():
        with pytest.raises(UsageError) as caught:
            check_writable([None, str(path)])
        assert str(caught.value) == f"{path}: cannot be written: {why}"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_may_not_be_written_is_refused_beforehand(tmp_path, what):
    path = tmp_path / "rows.csv"
    path.write_text("mine")
    (tmp_path if what == "folder" else path).chmod(0o500)
    with pytest.raises(UsageError, match="no right to write there"):
        check_writable([str(path)])
    tmp_path.chmod(0o700)


def test_an_input_is_not_overwritten(tmp_path):
    path, link = tmp_path / "ckpt.pt", tmp_path / "link.pt"
    path.write_bytes(b"weights")
    link.symlink_to(path)
    for output in (path, link, tmp_path / "." / "ckpt.pt"):
        with pytest.raises(UsageError, match="is an input, and would be overwritten"):
            check_writable([str(output)], [str(path), None])
