"""The installed ``hess analyze``: what is refused, with which code, and what goes to which stream."""

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from hesscore.analysis import COLUMNS
from tests.command import HESS, LAST, ROOT, SAMPLE, analyze, rows_of, strict
from tests.reference_nanogpt import state_dict

PAPER_BLOCK = ROOT / "configs/blocks/paper-block.yaml"
ARGS = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 6, "vocab_size": 11, "bias": True}


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
    "loss": (["overflow.pt", "--data", "good.bin"], 3, "overflow.pt: the loss is nan, so there is nothing to"),
    "vocabulary": (["good.pt", "--data", "beyond.bin"], 3, "beyond.bin: token 11 at position 11 is beyond the"),
    "typo in spec": (["typo.yaml"], 2, "typo.yaml: unknown field layer, did you mean layers?"),
    "spec and tokens": (["good.yaml", "--data", "good.bin"], 2, "good.yaml is a spec: its input is drawn"),
    "layers": (["good.pt", "--layers", "1"], 2, "--layers 1: the model has layers 0 to 0"),
    "no layer": (["good.pt", "--layers", "9" * 5000], 2, f"--layers {'9' * 80}...: the model has layers 0 to 0"),
    "no source": ([""], 2, "SOURCE is empty: name a file"),
    "components": (["good.pt", "--components", "attn"], 2, "--components attn matches nothing among attn.k, attn.o"),
    "dtype": (["good.pt", "--dtype", "half"], 2, "--dtype half: give one of float64, float32"),
    "tolerance": (["good.pt", "--tolerance", "nan"], 2, "--tolerance nan: give a number between 0 and 1"),
    "max-tokens": (["good.pt", "--max-tokens", "5"], 2, "--max-tokens needs --data"),
    "csv nowhere": (["none.pt", "--csv", "nowhere/rows.csv"], 2, "nowhere/rows.csv: cannot be written"),
    "csv no name": (["none.pt", "--csv", ""], 2, "'': cannot be written: not the name of a file"),
    "csv long name": (["none.pt", "--csv", "r" * 300], 2, f"{'r' * 300}: cannot be written: File name too long"),
    "csv a folder": (["none.pt", "--csv", "empty-folder"], 2, "empty-folder: cannot be written: a folder"),
    "csv the input": (["good.pt", "--csv", "good.pt"], 2, "good.pt: is an input, and would be overwritten"),
    "both to stdout": (["good.pt", "--csv", "-", "--json", "-"], 2, "two outputs cannot both go to stdout"),
    "both to one file": (["good.pt", "--csv", "a", "--json", "./a"], 2, "two outputs cannot both go to ./a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_a_code_and_nothing_is_written(folder, case):
    arguments, code, message = REFUSED[case]
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    outputs = [] if "--csv" in arguments else ["--csv", "rows.csv", "--json", "rows.json"]
    result = analyze(*arguments, *outputs, "--quiet", folder=folder)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith(f"hess: {message}")
    assert result.stderr.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "arguments",
    [["--max-tokens", "0"], ["--seed", "-1"], ["--seed", str(2**64)], ["--tolerance", "small"]],
    ids=" ".join,
)
def test_what_is_no_such_value_is_2(tmp_path, arguments):
    result = analyze(*LAST, *arguments, "--csv", tmp_path / "rows.csv")
    assert (result.returncode, result.stdout) == (2, "")
    assert arguments[0] in result.stderr
    assert not os.listdir(tmp_path)


# --- streams ---


def test_a_pipe_gets_every_row_and_every_digit():
    arguments = [*SAMPLE, "--layers", "3", "--components", "norm?,mlp.down"]
    result = analyze(*arguments)
    assert result.returncode == 0
    assert result.stderr == "note: only the first 64 of 4096 tokens are scored\n6 blocks on 64 tokens\n"
    head, table = result.stdout.split("\n\n")[0], result.stdout.split("\n\n")[-1]
    assert "4 layers, d_model 64, 214,400 parameters" in head
    assert "loss 1.7096: mean cross entropy over 64 scored tokens" in head
    header, *lines = table.splitlines()
    assert tuple(header.split()) == COLUMNS
    assert len(lines) == 6
    wanted = analyze(*arguments, "--quiet", "--csv", "-")
    for line, row in zip(lines, rows_of(wanted.stdout), strict=True):
        for name in ("tensor", "n_params", "lambda_max", "lambda_min_error", "trace", "from_activation"):
            assert row[name] in line.split()
        assert "…" not in line


def test_csv_on_stdout_is_all_there_is():
    result = analyze(*LAST, "--csv", "-")
    rows = rows_of(result.stdout)
    assert (result.returncode, len(rows)) == (0, 2)
    assert tuple(rows[0]) == COLUMNS
    assert [row["parameter"] for row in rows] == ["weight", "bias"]
    assert result.stderr == "note: only the first 64 of 4096 tokens are scored\n2 blocks on 64 tokens\n"


def test_json_on_stdout_is_all_there_is(tmp_path):
    result = analyze(*LAST, "--json", "-", "--csv", tmp_path / "rows.csv", "--seed", "9")
    content = strict(result.stdout)
    assert result.returncode == 0
    assert (content["seed"], content["components"], content["scored_tokens"]) == (9, "final_norm", 64)
    assert set(content["skipped"].values()) == {"not selected"}
    assert len(content["skipped"]) == 68 - 2
    for line, row in zip(rows_of((tmp_path / "rows.csv").read_text()), content["rows"], strict=True):
        assert float(line["lambda_max"]) == row["lambda_max"]
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_files_are_written_beside_the_table(tmp_path):
    result = analyze(*LAST, "--json", tmp_path / "rows.json", "--csv", tmp_path / "rows.csv", "--quiet")
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
    one, again, two = (analyze(*arguments, OMP_NUM_THREADS=threads) for threads in "112")
    assert one.returncode == 0
    assert one.stdout == again.stdout
    assert len(rows_of(one.stdout)) == 2
    for row, other in zip(rows_of(one.stdout), rows_of(two.stdout), strict=True):
        for name in ("lambda_max", "lambda_min"):
            assert abs(float(row[name]) - float(other[name])) <= float(row[f"{name}_error"])


def test_a_block_spec():
    result = analyze(PAPER_BLOCK, "--scope", "model", "--csv", "-", "--components", "attn.*,norm1")
    assert result.returncode == 0
    assert result.stderr == (
        "note: seeded weights and inputs: these numbers describe the architecture, not a trained model\n"
        "5 blocks on 8 tokens\n"
    )
    rows = {(row["component"], row["parameter"]): row for row in rows_of(result.stdout)}
    assert set(rows) == {*((f"attn.{part}", "weight") for part in "qkvo"), ("norm1", "weight")}
    assert {row["converged"] for row in rows.values()} == {"True"}
    assert {row["from_activation"] for row in rows.values()} == {"0.0"}  # ReLU
    assert "spec, 1 layer, d_model" in analyze(PAPER_BLOCK, "--scope", "model", "--components", "norm1").stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_file_that_cannot_be_written_does_not_cost_the_table(tmp_path):
    result = analyze(*LAST, "--quiet", "--csv", "/dev/full", "--json", tmp_path / "rows.json")
    assert (result.returncode, result.stderr) == (2, "hess: /dev/full: cannot be written: No space left on device\n")
    assert "transformer.ln_f.bias" in result.stdout
    assert len(strict((tmp_path / "rows.json").read_text())["rows"]) == 2


def test_a_pipe_whose_reader_has_left_does_not_cost_the_table(tmp_path):
    """As in ``--csv >(head -1)``; stdout is another matter."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [HESS, "analyze", *LAST, "--quiet", "--csv", f"/dev/fd/{write_end}"]
    result = subprocess.run(command, capture_output=True, text=True, pass_fds=[write_end], check=False, timeout=60)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (2, f"hess: /dev/fd/{write_end}: cannot be written: Broken pipe\n")
    assert "transformer.ln_f.bias" in result.stdout
