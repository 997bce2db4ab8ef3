"""The installed ``hess analyze``: streams, exit codes, what is refused, interruptions, and what a terminal shows."""

import csv
import fcntl
import io
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hesscore.analysis import COLUMNS
from tests.reference_nanogpt import state_dict
from tests.test_report import refuse

ROOT = Path(__file__).parent.parent
CHECKPOINT, VAL = ROOT / "sample_runs/pydoc/ckpt-end.pt", ROOT / "sample_runs/pydoc/val.bin"
PAPER_BLOCK = ROOT / "configs/blocks/paper-block.yaml"
HESS = shutil.which("hess", path=str(Path(sys.executable).parent)) or "hess"

SAMPLE = [str(CHECKPOINT), "--tokens", str(VAL), "--max-tokens", "64"]
LAST = [*SAMPLE, "--components", "final_norm"]
ARGS = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 6, "vocab_size": 11, "bias": True}


def run(*arguments, folder=None, **environment):
    return subprocess.run(
        [HESS, "analyze", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )


def strict(text):
    return json.loads(text, parse_constant=refuse)


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


# --- what is refused: one line, a code, and nothing written ---


@pytest.fixture
def folder(tmp_path):
    """Checkpoints and token files of every kind of fault."""
    small = state_dict(ARGS)
    np.arange(12, dtype="<u2").tofile(tmp_path / "beyond.bin")
    np.array([1, 2, 3, 4], dtype="<u2").tofile(tmp_path / "good.bin")
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "empty.pt").touch()
    torch.save({"model": small, "model_args": ARGS}, tmp_path / "good.pt")
    whole = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "truncated.pt").write_bytes(whole[: len(whole) // 2])

    def save(name, change):
        state = {key: tensor.clone() for key, tensor in small.items()}
        change(state)
        torch.save({"model": state, "model_args": ARGS}, tmp_path / name)

    save("nan.pt", lambda state: state["transformer.ln_f.weight"].fill_(torch.nan))
    save("missing.pt", lambda state: state.pop("transformer.ln_f.weight"))
    save("unexpected.pt", lambda state: state.update(extra=torch.zeros(2)))
    save("overflow.pt", lambda state: [state[name].mul_(1e160) for name in ("lm_head.weight", "transformer.ln_f.bias")])

    class Canary:
        def __reduce__(self):
            return os.system, (f"touch '{tmp_path / 'canary'}'",)

    torch.save({"model": Canary(), "model_args": ARGS}, tmp_path / "code.pt")
    (tmp_path / "typo.yaml").write_text("d_model: 8\nd_ff: 8\nlayer: 2\n")
    (tmp_path / "good.yaml").write_text("d_model: 8\nd_ff: 8\n")
    return tmp_path


NOT_ITS_TENSORS = "not the tensors of its architecture"

REFUSED = {
    "no such file": (["none.pt"], 3, "none.pt: no such file"),
    "empty folder": (["empty-folder"], 3, "empty-folder: a folder with nothing in it"),
    "empty file": (["empty.pt"], 3, "empty.pt: empty"),
    "truncated": (["truncated.pt"], 3, "truncated.pt: cut short or damaged"),
    "code": (["code.pt"], 3, "code.pt: asks to run posix.system on loading; nothing was run"),
    "nan": (["nan.pt"], 3, "nan.pt: transformer.ln_f.weight is NaN or infinite in 8 of 8 places"),
    "missing": (["missing.pt"], 3, f"missing.pt: {NOT_ITS_TENSORS}; 1 missing: transformer.ln_f.weight"),
    "unexpected": (["unexpected.pt"], 3, f"unexpected.pt: {NOT_ITS_TENSORS}; 1 unexpected: extra"),
    "loss": (["overflow.pt", "--tokens", "good.bin"], 3, "overflow.pt: the loss is nan, so there is nothing to"),
    "vocabulary": (["good.pt", "--tokens", "beyond.bin"], 3, "beyond.bin: token 11 at position 11 is beyond the"),
    "typo in spec": (["typo.yaml"], 2, "typo.yaml: unknown field layer, did you mean layers?"),
    "spec and tokens": (["good.yaml", "--tokens", "good.bin"], 2, "good.yaml is a spec: its input is drawn"),
    "layers": (["good.pt", "--layers", "1"], 2, "--layers 1: the model has layers 0 to 0"),
    "components": (["good.pt", "--components", "attn"], 2, "--components attn matches nothing among attn.k, attn.o"),
    "dtype": (["good.pt", "--dtype", "half"], 2, "--dtype half: give one of float64, float32"),
    "tolerance": (["good.pt", "--tolerance", "nan"], 2, "--tolerance nan: give a number between 0 and 1"),
    "max-tokens": (["good.pt", "--max-tokens", "5"], 2, "--max-tokens needs --tokens"),
    "seed": (["good.pt", "--seed", str(2**64)], 2, "--seed 18446744073709551616: give a number from 0 to"),
    "csv nowhere": (["none.pt", "--csv", "nowhere/rows.csv"], 2, "nowhere/rows.csv: cannot be written"),
    "csv a folder": (["none.pt", "--csv", "empty-folder"], 2, "empty-folder: cannot be written: a folder"),
    "csv the input": (["good.pt", "--csv", "good.pt"], 2, "good.pt: is an input, and would be overwritten"),
    "both to stdout": (["good.pt", "--csv", "-", "--json", "-"], 2, "--csv and --json cannot both write to stdout"),
    "both to one file": (["good.pt", "--csv", "a", "--json", "a"], 2, "--csv and --json cannot both write to a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_a_code_and_nothing_is_written(folder, case):
    arguments, code, message = REFUSED[case]
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    outputs = [] if "--csv" in arguments else ["--csv", "rows.csv", "--json", "rows.json"]
    result = run(*arguments, *outputs, "--quiet", folder=folder)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(f"hess: {message}")
    assert result.stderr.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("arguments", [["--max-tokens", "0"], ["--seed", "-1"], ["--tolerance", "small"]], ids=" ".join)
def test_what_is_no_such_value_is_2(tmp_path, arguments):
    result = run(*LAST, *arguments, "--csv", tmp_path / "rows.csv")
    assert (result.returncode, result.stdout) == (2, "")
    assert arguments[0] in result.stderr
    assert not os.listdir(tmp_path)


# --- streams ---


def test_a_pipe_gets_every_row_and_every_digit():
    arguments = [*SAMPLE, "--layers", "3", "--components", "norm?,mlp.down"]
    result = run(*arguments)
    assert result.returncode == 0
    assert result.stderr == "note: only the first 64 of 4096 tokens are scored\n"
    head, table = result.stdout.split("\n\n")[0], result.stdout.split("\n\n")[-1]
    assert "4 layers, d_model 64, 214,400 parameters" in head
    assert "loss 1.7096: mean cross entropy over 64 scored tokens" in head
    header, *lines = table.splitlines()
    assert tuple(header.split()) == COLUMNS
    assert len(lines) == 6
    wanted = run(*arguments, "--quiet", "--csv", "-")
    for line, row in zip(lines, rows_of(wanted.stdout), strict=True):
        for name in ("tensor", "n_params", "lambda_max", "lambda_min_error", "trace", "from_activation"):
            assert row[name] in line.split()
        assert "…" not in line


def test_csv_on_stdout_is_all_there_is():
    result = run(*LAST, "--csv", "-")
    rows = rows_of(result.stdout)
    assert (result.returncode, len(rows)) == (0, 2)
    assert tuple(rows[0]) == COLUMNS
    assert [row["parameter"] for row in rows] == ["weight", "bias"]
    assert result.stderr == "note: only the first 64 of 4096 tokens are scored\n"


def test_json_on_stdout_is_all_there_is(tmp_path):
    result = run(*LAST, "--json", "-", "--csv", tmp_path / "rows.csv", "--seed", "9")
    content = strict(result.stdout)
    assert result.returncode == 0
    assert (content["seed"], content["components"], content["scored_tokens"]) == (9, "final_norm", 64)
    assert content["skipped"] == {}
    for line, row in zip(rows_of((tmp_path / "rows.csv").read_text()), content["rows"], strict=True):
        assert float(line["lambda_max"]) == row["lambda_max"]
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_files_are_written_beside_the_table(tmp_path):
    result = run(*LAST, "--json", tmp_path / "rows.json", "--csv", tmp_path / "rows.csv", "--quiet")
    assert (result.returncode, result.stderr) == (0, "")
    assert "sharpest blocks" in result.stdout
    assert len(rows_of((tmp_path / "rows.csv").read_text())) == 2
    assert len(strict((tmp_path / "rows.json").read_text())["rows"]) == 2


def test_a_reader_that_leaves_early_does_not_cost_the_files(tmp_path):
    """As in ``hess analyze ... --csv rows.csv | head -1``."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    paths = tmp_path / "rows.csv", tmp_path / "rows.json"
    command = [HESS, "analyze", *LAST, "--quiet", "--csv", str(paths[0]), "--json", str(paths[1])]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")
    assert len(rows_of(paths[0].read_text())) == len(strict(paths[1].read_text())["rows"]) == 2


def test_the_same_seed_gives_the_same_bytes_and_another_number_of_threads_the_same_numbers():
    arguments = [*SAMPLE, "--layers", "3", "--components", "mlp.down", "--quiet", "--csv", "-", "--seed", "4"]
    one, again, two = (run(*arguments, OMP_NUM_THREADS=threads) for threads in "112")
    assert one.returncode == 0
    assert one.stdout == again.stdout
    assert len(rows_of(one.stdout)) == 2
    for row, other in zip(rows_of(one.stdout), rows_of(two.stdout), strict=True):
        for name in ("lambda_max", "lambda_min"):
            assert abs(float(row[name]) - float(other[name])) <= float(row[f"{name}_error"])


def test_a_block_spec():
    result = run(PAPER_BLOCK, "--csv", "-", "--components", "attn.*,norm1")
    assert result.returncode == 0
    assert result.stderr == (
        "note: seeded weights and inputs: these numbers describe the architecture, not a trained model\n"
    )
    rows = {(row["component"], row["parameter"]): row for row in rows_of(result.stdout)}
    assert set(rows) == {*((f"attn.{part}", "weight") for part in "qkvo"), ("norm1", "weight")}
    assert {row["converged"] for row in rows.values()} == {"True"}
    assert {row["from_activation"] for row in rows.values()} == {"0.0"}  # ReLU


# --- a terminal ---


def on_terminal(arguments, width, stderr_too=False, **environment):
    """What ``hess analyze`` shows on a terminal of this width, and its other stream."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [HESS, "analyze", *map(str, arguments)],
        env={**inherited, "TERM": "xterm-256color", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs if stderr_too else subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    rest = process.communicate(timeout=60)[1] or b""
    return process.returncode, shown.decode().replace("\r\n", "\n"), rest.decode()


def plain(shown):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_a_table_that_fits_and_nothing_is_cut(width):
    arguments = [*SAMPLE, "--layers", "3", "--components", "attn.k,norm1,mlp.down"]
    code, shown, notes = on_terminal(arguments, width)
    assert (code, notes) == (0, "note: only the first 64 of 4096 tokens are scored\n")
    table = plain(shown).partition("sharpest")[2].split("\n\n", 1)[1]
    header = table.partition("─")[0]
    assert "…" not in shown
    assert max(map(len, table.splitlines())) <= width
    assert {"block", "|grad|", "lambda_max", "lambda_min", "trace", "caused"} <= set(header.split())
    for name in ("3.norm1.weight", "3.norm1.bias", "3.attn.k.bias", "3.mlp.down.weight"):
        assert sum(line.lstrip().startswith(f"{name} ") for line in table.splitlines()) == 1
    assert "blocks.3.attn.k.bias: no curvature beyond rounding" in table


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


def test_progress_is_shown_on_a_terminal_and_gone_at_the_end():
    code, shown, _ = on_terminal(LAST, 100, stderr_too=True)
    assert code == 0
    assert "analyze" in shown
    assert "\x1b[2K" in shown  # the bar's line, erased
    assert COLOUR.search(shown)


def test_no_color_is_honoured():
    shown = on_terminal(LAST, 100, stderr_too=True, NO_COLOR="1")[1]
    assert "analyze" in shown
    assert not COLOUR.search(shown)


def test_quiet_shows_no_progress_on_a_terminal():
    shown = on_terminal([*LAST, "--quiet"], 100, stderr_too=True)[1]
    assert "final_norm.weight" in shown
    assert "analyze" not in shown
    assert "note:" not in shown


# --- interruption ---


def interrupted(tmp_path, *moments):
    """Analyse the sample, all of it, and send SIGINT so many seconds after the first note."""
    paths = tmp_path / "rows.csv", tmp_path / "rows.json"
    command = [HESS, "analyze", *SAMPLE[:3], "--max-tokens", "128", "--csv", str(paths[0]), "--json", str(paths[1])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    assert process.stderr.readline().startswith("note:")
    for moment in moments:
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr, *paths


def test_an_interruption_keeps_what_is_finished(tmp_path):
    code, stdout, stderr, csv_path, json_path = interrupted(tmp_path, 4)
    content = strict(json_path.read_text())
    finished, skipped = len(content["rows"]), content["skipped"]
    assert code == 130
    assert stderr == f"interrupted: {finished} of 68 blocks are finished\n"
    assert 0 < finished < 68
    assert len(skipped) == 68 - finished
    assert set(skipped.values()) == {"interrupted"}
    rows = rows_of(csv_path.read_text())
    assert [float(row["lambda_max"]) for row in rows] == [row["lambda_max"] for row in content["rows"]]
    names = {f"blocks.{row['layer']}.{row['component']}.{row['parameter']}" for row in rows if row["layer"]}
    assert names.isdisjoint(skipped)
    assert stdout.count("\n") >= finished
    assert sorted(os.listdir(tmp_path)) == ["rows.csv", "rows.json"]


@pytest.mark.parametrize("between", [0.0, 0.1])
def test_two_interruptions_leave_no_half_file(tmp_path, between):
    code, _, stderr, csv_path, json_path = interrupted(tmp_path, 2, between, between)
    assert code == 130
    assert "Traceback" not in stderr
    assert between == 0 or (csv_path.exists() and json_path.exists())
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.csv", "rows.json"}
    if csv_path.exists():
        assert all(float(row["lambda_max"]) for row in rows_of(csv_path.read_text()))
    if json_path.exists():
        content = strict(json_path.read_text())
        assert len(content["rows"]) + len(content["skipped"]) == 68
