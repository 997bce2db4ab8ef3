"""The command ``hess verify``."""

import csv
import io
import json
from math import nan
from pathlib import Path

import pytest
import torch
import typer
from hesscore_cli.verify import verify
from typer.testing import CliRunner

from hesscore.components.activation import ACTIVATIONS
from hesscore.errors import UsageError
from hesscore.verify import CHANNELS, Check, count, grid, maps

CONFIGS = Path(__file__).parent.parent / "configs"


def run(*arguments):
    app = typer.Typer()
    app.command()(verify)
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """``hess verify`` without a source, and its rows as CSV."""
    path = tmp_path_factory.mktemp("verify") / "rows.csv"
    result = run("--json", "-", "--csv", str(path))
    return result, list(csv.DictReader(io.StringIO(path.read_text())))


def test_every_map_and_the_grid_pass(everything):
    result, rows = everything
    assert result.exit_code == 0
    first, last = result.stderr.splitlines()
    assert first == f"{count()} checks: every map and {len(grid())} small models, by autograd, jacfwd, differences"
    assert last.startswith(f"verified: {count()} checks within 1.0e-10; ")
    content = json.loads(result.stdout)
    assert content["passed"] is True
    assert content["source"] is None
    assert content["tolerance"] == 1e-10
    assert content["channels"] == ["autograd", "jacfwd", "differences"]
    assert 0 < content["duration_seconds"] < 600
    assert len(content["rows"]) == len(rows) == count()
    names = [*maps(torch.Generator()), *grid()]
    assert [row["object"] for row in rows] == [name for name in names for _ in CHANNELS]
    for row in content["rows"]:
        assert row["asymmetry"] < 1e-14
        if row["channel"] == "differences":
            assert row["error"] < row["tolerance"] < 5e-10
        else:
            assert row["error"] < 1e-13
            assert row["tolerance"] == 1e-10


@pytest.fixture
def block(tmp_path):
    path = tmp_path / "block.yaml"
    path.write_text("d_model: 4\nd_ff: 3\nheads: 2\nseq_len: 3\n")
    return str(path)


def test_a_spec_is_verified_on_its_own(block):
    result = run(block)
    assert result.exit_code == 0
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["object", "channel", "error", "tolerance", "asymmetry", "passed"]
    assert len(rows) == 3 * 5
    note, what, verdict = result.stderr.splitlines()
    assert note.startswith("note: seeded weights")
    assert what == "15 checks: the model and its 4 parts, by autograd, jacfwd, differences"
    assert verdict.startswith("verified: 15 checks within 1.0e-10; the largest error is ")
    assert run(block, "--quiet").stderr.splitlines() == [verdict]


def test_what_a_channel_cannot_tell_is_said(block):
    result = run(block, "--tolerance", "1e-13", "--json", "-")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    told = max(row["tolerance"] for row in content["rows"] if row["channel"] == "differences")
    assert content["tolerance"] == 1e-13 < told < 1e-10
    verdict = result.stderr.splitlines()[-1]
    assert verdict.startswith(
        f"verified: 15 checks within 1.0e-13; differences can tell no better than {told:.1e} here; the largest error"
    )


def test_a_terminal_shows_what_failed_and_the_worst_of_each_channel(block, monkeypatch):
    monkeypatch.setattr("hesscore_cli.verify.on_terminal", lambda: True)
    header, *rows = run(block).stdout.splitlines()
    assert header.split() == ["channel", "checks", "failed", "largest", "error", "of"]
    assert [row.split()[:3] for row in rows] == [[channel.__name__, "5", "0"] for channel in CHANNELS]

    tight = run(block, "--tolerance", "1e-16", "--json", "-"), run(block, "--tolerance", "1e-16")
    failed = [row for row in json.loads(tight[0].stdout)["rows"] if not row["passed"]]
    assert 0 < len(failed) < 15
    lines = tight[1].stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:-4]] == [[row["object"], row["channel"]] for row in failed]
    assert sum(int(line.split()[2]) for line in lines[-3:]) == len(failed)


def test_beyond_the_tolerance_is_1(block):
    assert run(block, "--dtype", "float32").exit_code == 0
    result = run(block, "--dtype", "float32", "--tolerance", "1e-9", "--json", "-")
    assert result.exit_code == 1
    assert "NOT verified: 15 of 15 checks are beyond their tolerance; the first: model by autograd" in result.stderr
    assert json.loads(result.stdout)["passed"] is False


def test_what_is_not_a_number_is_1_and_null(block, monkeypatch):
    nothing = ACTIVATIONS["gelu"]._replace(value=lambda x: x * nan)
    monkeypatch.setitem(ACTIVATIONS, "gelu", nothing)
    result = run(block, "--json", "-")
    assert result.exit_code == 1
    assert {row["error"] for row in json.loads(result.stdout)["rows"]} == {None}


def test_the_same_seed_gives_the_same_rows(block):
    first, again, other = run(block), run(block), run(block, "--seed", "1")
    assert first.stdout == again.stdout != other.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tolerance", "nan"],
        ["--tolerance", "-1e-9"],
        ["--tolerance", "0"],
        ["--tolerance", "inf"],
        ["--tolerance", "0.0011"],
        ["--dtype", "float32"],
        ["--max-tokens", "5"],
        ["--csv", "-", "--json", "-"],
        [str(CONFIGS / "blocks/paper-block.yaml"), "--dtype", "int8"],
        ["--csv", "nowhere/rows.csv"],
    ],
    ids=" ".join,
)
def test_nonsense_is_2(arguments):
    error = run(*arguments).exception
    assert isinstance(error, UsageError)
    assert error.code == 2


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--tolerance", "small"], ["--seed", "-1"]], ids=" ".join)
def test_what_is_no_such_value_is_2(block, arguments):
    assert run(block, *arguments).exit_code == 2


def test_interrupted_it_writes_what_is_finished(block, tmp_path, monkeypatch):
    def some(*args):
        yield Check("model", "autograd", 0.0, 1e-10)
        raise KeyboardInterrupt

    monkeypatch.setattr("hesscore.verify.verify_model", some)
    path = tmp_path / "rows.json"
    assert run(block, "--json", str(path)).exit_code == 130
    content = json.loads(path.read_text())
    assert content["passed"] is False
    assert [row["object"] for row in content["rows"]] == ["model"]
