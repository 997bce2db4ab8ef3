"""Ctrl-C at any time: code 130, no traceback, what is finished is written, and no half file is left."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.command import HESS, LAST, SAMPLE, rows_of, run, strict

PROGRAM = """
import os, signal, threading
from hesscore import analysis
from hesscore_cli.app import main

block, moments, finished = analysis.Analyst.block, {moments}, []

def struck(*arguments):
    finished.append(block(*arguments))
    for moment in moments if len(finished) == 2 else ():
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT)).start()
    return finished[-1]

analysis.Analyst.block = struck
main()
"""


def interrupted(tmp_path, *moments):
    """Analyse the sample, all of it, with SIGINT so many seconds after the second row, in the midst of the third."""
    paths = tmp_path / "rows.csv", tmp_path / "rows.json"
    program = PROGRAM.format(moments=moments)
    command = [sys.executable, "-c", program, "analyze", *SAMPLE, "--csv", paths[0], "--json", paths[1], "--quiet"]
    return run(*command), *paths


def test_an_interruption_keeps_what_is_finished(tmp_path):
    result, csv_path, json_path = interrupted(tmp_path, 0.2)
    content = strict(json_path.read_text())
    finished, skipped = len(content["rows"]), content["skipped"]
    assert result.returncode == 130
    assert result.stderr == f"interrupted: {finished} of 68 blocks are finished\n"
    assert 2 <= finished < 68
    assert len(skipped) == 68 - finished
    assert set(skipped.values()) == {"interrupted"}
    rows = rows_of(csv_path.read_text())
    assert [float(row["lambda_max"]) for row in rows] == [row["lambda_max"] for row in content["rows"]]
    names = {f"blocks.{row['layer']}.{row['component']}.{row['parameter']}" for row in rows if row["layer"]}
    assert names.isdisjoint(skipped)
    assert result.stdout.count("\n") >= finished
    assert sorted(os.listdir(tmp_path)) == ["rows.csv", "rows.json"]


@pytest.mark.parametrize("between", [0.0, 0.05])
def test_two_interruptions_leave_no_half_file(tmp_path, between):
    result, csv_path, json_path = interrupted(tmp_path, 0.2, 0.2 + between, 0.2 + 2 * between)
    assert result.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in result.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.csv", "rows.json"}
    if csv_path.exists():
        assert all(float(row["lambda_max"]) for row in rows_of(csv_path.read_text()))
    if json_path.exists():
        content = strict(json_path.read_text())
        assert len(content["rows"]) + len(content["skipped"]) == 68


def interrupted_after(tmp_path, module, moment):
    """Send SIGINT so many seconds after this module is imported, which Python tells on stderr if it is asked to."""
    (tmp_path / "out").mkdir()
    command = [HESS, "analyze", *SAMPLE, "--csv", str(tmp_path / "out" / "rows.csv")]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    with (tmp_path / "stderr").open("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        while not re.search(rf"\| +{re.escape(module)}\n", (tmp_path / "stderr").read_text()):
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    said = (tmp_path / "stderr").read_text().splitlines()
    return process.returncode, stdout, [line for line in said if not line.startswith("import time:")]


@pytest.mark.parametrize("module", ["typer.models", "hesscore_cli.commands", "numpy", "torch._C", "torch", "pandas"])
def test_an_interruption_while_loading_is_one_line(tmp_path, module):
    assert interrupted_after(tmp_path, module, 0) == (130, "", ["interrupted: nothing is finished"])
    assert not os.listdir(tmp_path / "out")


@pytest.mark.parametrize("moment", [0.05, 0.15, 0.3, 0.6, 1.2, 2.4, 4.8])
def test_an_interruption_at_any_time_is_130(tmp_path, moment):
    code, _, said = interrupted_after(tmp_path, "typer.models", moment)
    assert code == 130
    assert said[-1].startswith("interrupted: ")
    assert set(said[:-1]) <= {"note: only the first 64 of 4096 tokens are scored", "68 blocks on 64 tokens"}
    assert set(os.listdir(tmp_path / "out")) <= {"rows.csv"}


def test_a_second_interruption_ends_the_wait_for_a_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    command = [HESS, "analyze", *SAMPLE, "--csv", str(tmp_path / "pipe")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    said = [process.stderr.readline() for _ in range(2)]
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    said.append(process.stderr.readline())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    assert said[-1].startswith("interrupted: ")


def test_it_stays_deaf_if_it_was_started_so():
    """As in the background of a script, where Ctrl-C is meant for another."""
    command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", HESS, "analyze", *LAST]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(4):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "interrupted" not in stderr
    assert "transformer.ln_f.bias" in stdout
