"""The speed tables: they check values, and report times without judging them."""

import json
import sys
from math import nan

import pytest
import torch

from hesscore.bench import cases, environment, timing
from hesscore.bench.peak import peak_bytes
from hesscore.bench.timing import Case, Contestant, Timing, measure
from tests.command import run

PROGRAM = """
import os, torch
import hesscore.bench as bench
from hesscore.bench.peak import peak_bytes
from hesscore.bench.timing import Case, Contestant
from hesscore_cli.commands import app

def value(x):
    return Contestant(f"gives {x}", "rival", lambda: lambda: x, lambda x: torch.tensor([x]))

bench.cases = lambda quick: iter([Case("a number", "1", (value(1.0), value(float(os.environ["VALUE"]))), 1e-3)])
app()
"""


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 0)
    monkeypatch.setattr(timing, "LEAST", 1)


def test_all_that_is_compared_agrees(short):
    names = []
    for case in cases(quick=True):
        found = measure(case)
        names.append(case.name)
        assert all(t.right for t in found), found
        assert sum(t.error is not None for t in found) >= 3 - ("block" in case.name)
        assert found[0].role == "ours"
        assert {t.role for t in found} >= {"ours", "rival"}
    assert len(set(names)) == len(names) == 6


def test_contestants_take_turns(short, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(timing, "LEAST", 4)

    def contestant(name):
        return Contestant(name, "ours", lambda: lambda: calls.append(name))

    found = measure(Case("none", "", (contestant("a"), contestant("b")), 0.0))
    assert calls == ["a", "b"] * 5  # the first to warm up
    assert [t.repeats for t in found] == [4, 4]
    assert [t.error for t in found] == [None, None]


def test_the_peak_is_of_the_contestant_and_not_of_who_asks():
    """A process begins with its parent's mark of the most it ever took."""
    ballast = torch.ones(2**27)  # half a gigabyte
    case = next(case for case in cases(quick=True) if case.memory)
    taken = peak_bytes(case, measure(case)[0], quick=True)
    assert 0 < taken < ballast.nbytes / 2


@pytest.mark.parametrize(("error", "right"), [(None, True), (0.1, True), (0.2, False), (nan, False)])
def test_a_wrong_value_is_no_contestant(error, right):
    assert Timing("", "", "", "rival", 1.0, 3, error, 0.1).right is right


@pytest.mark.parametrize(("value", "code"), [("1.0", 0), ("1.1", 1), ("nan", 1)])
def test_the_command_fails_on_a_wrong_value_alone(tmp_path, value, code):
    path = tmp_path / "bench.json"
    result = run(sys.executable, "-c", PROGRAM, "bench", "--json", path, VALUE=value)
    assert result.returncode == code
    assert ("is off by" in result.stderr) is bool(code)
    stored = json.loads(path.read_text())
    assert {row["contestant"] for row in stored["rows"]} == {"gives 1.0", f"gives {float(value)}"}
    assert stored["torch"] == torch.__version__
    assert set(environment()) <= set(stored)
