"""The installed ``hess analyze --scope block``: outputs, defaults, what is refused, a terminal, and Ctrl-C."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager

import pytest
from hesscore_cli.blocks import analyze_blocks

from hesscore.blocks import COLUMNS, PARTS
from tests.command import CHECKPOINT, ROOT, VAL, analyze, rows_of, run, strict
from tests.test_analyze_terminal import on_terminal, plain

PAPER_BLOCK = ROOT / "configs/blocks/paper-block.yaml"
PARAMETERS = [
    *(f"attn.{part}.weight" for part in "qkvo"),
    *(f"{n}.weight" for n in ("norm1", "mlp.up", "mlp.down", "norm2")),
]
ROWS = 3 * (8 * 9 // 2 + 1)
SOME = [
    CHECKPOINT,
    "--data",
    VAL,
    "--max-tokens",
    "16",
    "--scope",
    "block",
    "--layers",
    "1,3",
    "--components",
    "norm2",
]
"""Two layers of two parameters each."""


def test_a_spec_of_one_block_is_reported_by_pairs_in_csv_json_and_a_picture(tmp_path):
    csv, json, picture = (tmp_path / name for name in ("pairs.csv", "pairs.json", "pairs.svg"))
    result = analyze(PAPER_BLOCK, "--csv", csv, "--json", json, "--heatmap", picture)
    assert result.returncode == 0
    assert result.stderr == (
        "note: seeded weights and inputs: these numbers describe the architecture, not a trained model\n"
        f"{ROWS} rows on 8 tokens\n"
    )
    rows, content = rows_of(csv.read_text()), strict(json.read_text())
    assert tuple(rows[0]) == tuple(content["rows"][0]) == COLUMNS
    assert len(rows) == len(content["rows"]) == ROWS
    for part in PARTS:
        own = [row for row in rows if row["part"] == part]
        assert {frozenset((row["row"], row["column"])) for row in own[:-1]} == {
            frozenset((a, b)) for a in PARAMETERS for b in PARAMETERS
        }
        assert (own[-1]["row"], own[-1]["column"]) == ("block", "block")
    for line, row in zip(rows, content["rows"], strict=True):
        assert float(line["frobenius"]) == row["frobenius"]
        assert (line["trace"] == "") == (row["trace"] is None) == (row["row"] != row["column"])
    assert (content["scope"], content["target"], content["skipped"]) == ("block", "input", {})
    assert content["spec"]["d_model"] == 16
    assert list(content["loss"]) == ["0"]
    words = " ".join(ElementTree.parse(picture).getroot().itertext())
    for word in (*PARAMETERS, *(f"block 0: {part}" for part in PARTS), "Frobenius norm"):
        assert word in words


def test_a_pipe_gets_every_row():
    result = analyze(*SOME)
    assert result.returncode == 0
    header, *lines = result.stdout.partition("\n\n")[2].splitlines()
    assert tuple(header.split()) == COLUMNS
    assert len(lines) == 2 * 3 * (3 + 1)
    assert [line.split()[0] for line in lines] == ["1"] * 12 + ["3"] * 12
    assert "each block on its own, on 16 tokens, against its input: mean squared error" in result.stdout


def test_the_target_changes_the_loss_and_the_seed_only_a_random_one(tmp_path):
    def loss(*arguments):
        content = strict(analyze(*SOME, "--quiet", "--json", "-", *arguments).stdout)
        return content["target"], content["loss"]["1"]

    assert loss("--target", "input", "--seed", "1") == loss()
    assert (
        loss("--target", "random")
        == loss("--target", "random", "--seed", "0")
        != loss("--target", "random", "--seed", "1")
    )
    assert len({loss(*(("--target", target))) for target in ("input", "zero", "random")}) == 3


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    pictures = tmp_path / "one.png", tmp_path / "two.png"
    texts = [analyze(*SOME, "--quiet", "--csv", "-", "--heatmap", picture).stdout for picture in pictures]
    assert texts[0] == texts[1]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


REFUSED = {
    "scope": ([PAPER_BLOCK, "--scope", "layer"], "--scope layer: give one of model, block"),
    "target": ([PAPER_BLOCK, "--target", "noise"], "--target noise: give one of input, zero, random"),
    "target of a model": ([PAPER_BLOCK, "--scope", "model", "--target", "zero"], "--target needs --scope block"),
    "picture of a model": ([CHECKPOINT, "--heatmap", "x.svg"], "--heatmap needs --scope block"),
    "dtype": ([PAPER_BLOCK, "--dtype", "float32"], "--dtype float32: --scope block computes in float64"),
    "format": ([PAPER_BLOCK, "--heatmap", "x.pdf"], "--heatmap x.pdf: give a name that ends in .svg or .png"),
    "stdout": ([PAPER_BLOCK, "--heatmap", "-"], "--heatmap -: give a name that ends in .svg or .png"),
    "folder": ([PAPER_BLOCK, "--heatmap", "no/x.svg"], "no/x.svg: cannot be written: no such folder"),
    "one file": ([PAPER_BLOCK, "--csv", "x.svg", "--heatmap", "x.svg"], "two outputs cannot both go to x.svg"),
    "no block": (
        [CHECKPOINT, "--scope", "block", "--components", "embed.*"],
        "--scope block: what is selected lies in no",
    ),
    "layers": ([PAPER_BLOCK, "--layers", "1"], "--layers 1: the model has layers 0 to 0"),
    "max-tokens": ([PAPER_BLOCK, "--max-tokens", "5"], "--max-tokens needs --data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line_and_2_and_nothing_is_written(tmp_path, case):
    arguments, message = REFUSED[case]
    result = analyze(*arguments, "--quiet", folder=tmp_path)
    assert (result.returncode, result.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert result.stderr.startswith(f"hess: {message}")
    assert result.stderr.count("\n") == 1


def test_a_block_that_cannot_fit_is_3():
    spec = ROOT / "configs/blocks/llama-style.yaml"  # rows of 100,000 keys by 3.5 million
    result = analyze(spec, "--scope", "block", "--quiet")
    assert result.returncode == 3
    assert re.search(r"a block on 64 tokens would take .* GiB .*: no token fits; select --components", result.stderr)


def test_a_terminal_gets_a_shaded_square_and_the_diagonal():
    code, coloured, notes = on_terminal([PAPER_BLOCK], 110)
    shown = plain(coloured)
    assert code == 0
    assert notes.endswith(f"{ROWS} rows on 8 tokens\n")
    square = shown.partition("weights by weights\n")[2].splitlines()[:9]
    assert square[0].split() == ["q", "k", "v", "o", "norm1", "up", "down", "norm2"]
    cells = [line.split() for line in square[1:]]
    assert [line[0] for line in cells] == square[0].split()
    numbers = [[float(cell) for cell in line[1:]] for line in cells]
    assert numbers == [list(column) for column in zip(*numbers, strict=True)]
    assert len(set(re.findall(r"48;[25];[0-9;]+m", coloured))) == 7
    for name in (*PARAMETERS, "block"):
        assert sum(line.strip().startswith(f"0.{name} ") for line in shown.splitlines()) == 1
    assert max(map(len, shown.splitlines()[5:])) <= 110
    assert not re.search(r"\x1b\[[0-9;]*[34]8", on_terminal([PAPER_BLOCK], 110, NO_COLOR="1")[1])


@pytest.mark.parametrize(("width", "left_out"), [(80, ["condition", "entropy", "neg %"]), (100, ["neg %"]), (120, [])])
def test_a_narrow_terminal_does_without_as_few_columns_as_it_can(width, left_out):
    shown = plain(on_terminal([PAPER_BLOCK], width)[1])
    table = shown.partition("norm2\n")[2].partition("─")[0].splitlines()[-2]
    optional = ["trace", "condition", "entropy", "neg %"]
    assert [column for column in optional if column not in table] == left_out
    assert (f"\nA wider terminal shows {', '.join(left_out)}, too.\n" in shown) == bool(left_out)
    assert ("A wider terminal" in shown) == bool(left_out)
    assert max(map(len, shown.splitlines()[5:])) <= width


def test_progress_ends_where_the_work_does(monkeypatch):
    told: list[float] = []

    @contextmanager
    def progress(task, total, quiet):
        told.append(total)
        yield lambda done: told.append(-done)

    monkeypatch.setattr("hesscore_cli.blocks.progress", progress)
    monkeypatch.setattr("hesscore_cli.blocks.keep_on_interrupt", lambda: None)
    monkeypatch.setattr("hesscore.blocks.EXACT_UP_TO", 100)  # a block has 128 parameters here
    settings = {"seed": 0, "tolerance": 1e-3, "target": "input", "layers": "1,3", "components": "norm2"}
    outputs = dict.fromkeys(("csv", "json", "heatmap"))
    analyze_blocks(str(CHECKPOINT), {"data": str(VAL), "max_tokens": 16}, outputs, True, settings)
    assert told[0] == 2 * 3 * (3 * 64**3 + 100**3)
    assert sum(told) == 0
    assert len(told) == 1 + 2 * 3 * (3 + 1)


INTERRUPTED = """
import os, signal
from hesscore import blocks
from hesscore_cli.app import main

everything = blocks.analyze

def struck(*arguments):
    for count, row in enumerate(everything(*arguments), 1):
        yield row
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)

blocks.analyze = struck
main()
"""


def test_an_interruption_keeps_what_is_finished(tmp_path):
    csv, json, picture = (tmp_path / name for name in ("pairs.csv", "pairs.json", "pairs.png"))
    outputs = ["--csv", csv, "--json", json, "--heatmap", picture, "--quiet"]
    result = run(sys.executable, "-c", INTERRUPTED, "analyze", PAPER_BLOCK, *outputs)
    assert (result.returncode, result.stderr) == (130, f"interrupted: 5 of {ROWS} rows are finished\n")
    content = strict(json.read_text())
    assert len(rows_of(csv.read_text())) == len(content["rows"]) == 5
    assert set(content["skipped"].values()) == {"interrupted"}
    assert len(content["skipped"]) == 8
    assert picture.read_bytes().startswith(b"\x89PNG")
