"""What the README shows: the report is the stored one, the stored one is what the program finds, the code runs."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hesscore_cli.render import Measured

from hesscore.analysis import Analyst
from hesscore.problem import open_problem

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SAMPLE = ROOT / "sample_runs" / "pydoc"
REPORT = json.loads((SAMPLE / "report-end.json").read_text())
CAUSES = ("loss", "softmax", "norm", "activation", "product")


def shown_as(row):
    """The cells of a row on a terminal."""
    place = [row["component"], row["parameter"]] if row["layer"] is None else [str(row["layer"]), row["component"]]
    name = ".".join([*place, row["parameter"]] if row["layer"] is not None else place)
    measured = [
        Measured(row["grad_norm"]),
        Measured(row["lambda_max"], row["lambda_max_error"]),
        Measured(row["lambda_min"], row["lambda_min_error"]),
        Measured(row["trace"], row["trace_stderr"]),
    ]
    flat = "no curvature" in row["note"]
    causes = ["-" if flat else str(round(100 * row[f"from_{kind}"] / row["lambda_max"])) for kind in CAUSES]
    return [name, *map(str, measured), *causes]


def test_the_report_in_the_readme_is_the_stored_one():
    rows = {shown_as(row)[0]: shown_as(row) for row in REPORT["rows"]}
    table = README.partition("─\n")[2].partition("\n\n")[0].splitlines()
    shown = [line.split() for line in table if line.strip() != "..."]
    assert len(shown) == 11
    for cells in shown:
        assert cells == rows[cells[0]]
    assert f"loss {REPORT['loss']:.6g}: mean cross entropy over {REPORT['scored_tokens']} scored tokens" in README
    sharpest = sorted(REPORT["rows"], key=lambda row: -row["lambda_max"])[:3]
    for line, row in zip(README.partition("in percent:\n")[2].splitlines(), sharpest, strict=False):
        assert line.split()[:2] == [shown_as(row)[0], shown_as(row)[2]]


def test_make_demo_makes_the_stored_report():
    (command,) = re.findall(r"hess analyze .*", (ROOT / "Makefile").read_text())
    assert command.endswith(f"--data {REPORT['data']} --max-tokens {REPORT['max_tokens']}")
    assert REPORT["source"] in command


@pytest.mark.parametrize("name", ["blocks.3.attn.k.weight", "blocks.3.mlp.up.bias", "final_norm.weight"])
def test_the_stored_report_is_what_is_found(name):
    problem = open_problem(ROOT / REPORT["source"], ROOT / REPORT["data"], max_tokens=REPORT["max_tokens"])
    curvature = problem.curvature()
    row = Analyst(problem, curvature).block(name).row
    layer, component, parameter = row.layer, row.component, row.parameter
    keys = [(r["layer"], r["component"], r["parameter"]) for r in REPORT["rows"]]
    stored = REPORT["rows"][keys.index((layer, component, parameter))]
    assert float(curvature.loss) == pytest.approx(REPORT["loss"], rel=1e-12)
    for end in "lambda_max", "lambda_min":
        errors = getattr(row, f"{end}_error") + stored[f"{end}_error"]
        assert abs(getattr(row, end) - stored[end]) <= errors
    assert abs(row.trace - stored["trace"]) <= 6 * (row.trace_stderr + stored["trace_stderr"])


def test_the_code_in_the_readme_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    pages = README, *((ROOT / "docs" / name).read_text() for name in ("report.md", "explicit.md"))
    for page in pages:
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(code, {})


def test_the_readme_speaks_of_what_is_there():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists()
    position = next(row for row in REPORT["rows"] if row["component"] == "embed.position")
    percent = {kind: round(Decimal(100 * position[f"from_{kind}"] / position["lambda_max"])) for kind in CAUSES}
    assert f"loss gives {percent['loss']} %" in README.replace("\n", " ")
    assert f"take {-percent['norm'] - percent['product']} % of it away" in README.replace("\n", " ")


def test_the_speeds_in_the_readme_are_measured():
    table = [line for line in README.splitlines() if line.startswith("|")]
    assert len(table) > 2
    assert set(table) <= set((ROOT / "docs" / "benchmarks.md").read_text().splitlines())
