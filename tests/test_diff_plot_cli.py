"""``hess diff`` and ``hess plot`` from the installed command, and reports that are read back."""

import csv
import io
import json
import os

import pytest

from hesscore.diff import difference
from hesscore.errors import InputError
from hesscore.pages.figures import FIGURES
from hesscore.stored import read_report
from tests.command import CHECKPOINT, HESS, ROOT, VAL, run

SAMPLE = ROOT / "sample_runs/pydoc/report-end.json"
EARLY = ROOT / "sample_runs/pydoc/ckpt-early.pt"


@pytest.fixture(scope="module")
def content():
    return json.loads(SAMPLE.read_text())


def changed(content, tmp_path, change):
    content = json.loads(json.dumps(content))
    change(content)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    return path


# --- reports that are read ---


def test_a_stored_report_is_read(content):
    assert read_report(SAMPLE) == content


BROKEN = {
    "no rows": (lambda c: c.pop("rows"), "no report: give what hess analyze --json wrote"),
    "version": (
        lambda c: c.update(schema_version=1),
        "a report of version 1: reports of models are read, of version 2",
    ),
    "scope": (lambda c: c.update(scope="block"), "a report of blocks on their own: reports of models are read"),
    "a text for a number": (lambda c: c["rows"][0].update(lambda_max="x"), "not a sound report: rows.0.lambda_max: "),
    "no column": (lambda c: c["rows"][3].pop("trace"), "not a sound report: rows.3.trace: field required"),
    "a list for rows": (lambda c: c.update(rows={}), "not a sound report: rows: input should be a valid list"),
    "weights": (lambda c: c["spectra"]["model"]["weights"].pop(), "the spectrum of model has not a weight for each"),
    "kinds": (lambda c: c["kinds"].pop("loss"), "not a sound report: of what kind loss is, it does not say"),
    "another kind": (lambda c: c["kinds"].update(loss="x"), "not a sound report: kinds.loss: input should be 'loss'"),
    "sites": (lambda c: c["activations"]["sites"][0].pop("site"), "not a sound report: activations.sites.0.site: "),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_sound_report_is_3_and_nothing_is_written(content, tmp_path, case):
    change, said = BROKEN[case]
    path = changed(content, tmp_path, change)
    with pytest.raises(InputError) as caught:
        read_report(path)
    assert said in str(caught.value)
    (tmp_path / "out").mkdir()
    result = run(HESS, "plot", path, "--out", tmp_path / "out")
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith(f"hess: {path}: ")
    assert os.listdir(tmp_path / "out") == []


# --- plot ---


def test_plot_writes_every_figure(tmp_path):
    result = run(HESS, "plot", SAMPLE, "--out", tmp_path, "--format", "png", "--html", tmp_path / "page.html")
    assert (result.returncode, result.stderr) == (0, "")
    figures = sorted(f"{name}.png" for name in FIGURES)
    assert sorted(os.listdir(tmp_path)) == sorted([*figures, "page.html"])
    assert sorted(result.stdout.split()) == sorted(str(tmp_path / name) for name in figures)
    assert run(HESS, "plot", SAMPLE, "--md", "-").stdout.startswith("## Curvature of ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name what to write: --out FOLDER, --html FILE or --md FILE"),
        (["--out", "nowhere"], "--out nowhere: no such folder"),
        (["--out", ".", "--format", "pdf"], "--format pdf: give svg or png"),
        (["--html", str(SAMPLE)], f"{SAMPLE}: is an input, and would be overwritten"),
    ],
)
def test_usage_of_plot(tmp_path, arguments, said):
    result = run(HESS, "plot", SAMPLE, *arguments, folder=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"hess: {said}\n")


# --- diff ---


def test_a_report_is_no_other_than_itself(content):
    found = difference(content, content)
    assert found.notes == []
    assert len(found.changes) == 1 + len(content["rows"])
    for change in found.changes:
        assert change.apart is False
        assert change.ratio is None or change.ratio == 1
        assert change.note == ""


def test_changes_beyond_the_errors_are_told(content, tmp_path):
    def change(c):
        c["rows"][0]["lambda_max"] *= 2
        c["rows"][1]["lambda_max"] += c["rows"][1]["lambda_max_error"]
        c["scored_tokens"] = 3
        del c["rows"][5]

    found = difference(content, read_report(changed(content, tmp_path, change)))
    first, second = found.changes[1:3]
    assert (first.ratio, first.apart) == (2, True)
    assert second.apart is False
    gone = [change for change in found.changes if change.note]
    assert [change.note for change in gone] == ["only in A"]
    assert (gone[0].ratio, gone[0].apart, gone[0].lambda_max_b) == (None, None, None)
    assert found.notes == ["scored_tokens is 256 in one and 3 in the other: not the same loss"]


def test_two_checkpoints_side_by_side(tmp_path):
    options = ["--data", VAL, "--max-tokens", "32", "--components", "final_norm", "--csv", "-"]
    result = run(HESS, "diff", EARLY, CHECKPOINT, *options)
    assert result.returncode == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["component"], row["parameter"]) for row in rows] == [("final_norm", "weight"), ("final_norm", "bias")]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["lambda_max_b"]) / float(row["lambda_max_a"]), rel=1e-9)
        assert row["apart"] == "True"
    shown = run(HESS, "diff", SAMPLE, SAMPLE)
    assert shown.stdout.startswith(f"A: {json.loads(SAMPLE.read_text())['source']}, loss 1.31728\n")
    assert shown.stdout.count("\n") == 4 + 69
