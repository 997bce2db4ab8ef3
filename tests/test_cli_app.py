"""The installed command ``hess``: help, version, and an exit code for everything that can be raised."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HESS = shutil.which("hess", path=str(Path(sys.executable).parent)) or "hess"


def run(*command, **environment):
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def run_raising(statement, **environment):
    """Run ``hess boom``, a command made here that does ``statement``."""
    program = f"""
import os, signal, sys
from hesscore.errors import HessError, InputError, UsageError
from hesscore_cli.app import app, main

@app.command()
def boom() -> None:
    {statement}

sys.argv = ["hess", "boom"]
main()
"""
    return run(sys.executable, "-c", program, **environment)


def test_help():
    result = run(HESS, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: hess ")


def test_help_does_not_import_what_is_heavy():
    imported = run(HESS, "--help", PYTHONPROFILEIMPORTTIME="1").stderr
    names = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "hesscore" in names
    assert names.isdisjoint({"torch", "numpy", "pandas", "scipy", "safetensors"})


def test_version():
    import hesscore

    assert run(HESS, "--version").stdout == f"hess {hesscore.__version__}\n"


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"], []])
def test_usage_error_is_2_and_leaves_stdout_alone(arguments):
    result = run(HESS, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: hess ")


@pytest.mark.parametrize(
    ("error", "code"), [('UsageError("no such layer: 9")', 2), ('InputError("no such layer: 9")', 3)]
)
def test_an_error_the_user_can_mend_is_one_line(error, code):
    result = run_raising(f"raise {error}")
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "hess: no such layer: 9\n")


def test_a_message_stays_on_one_line_and_carries_no_control_characters():
    result = run_raising(r'raise InputError("bad name: a\nb\x1b[31m")')
    assert result.stderr == "hess: bad name: a\\nb\\x1b[31m\n"


@pytest.mark.parametrize("error", ['ValueError("odd\\nshape")', "KeyError('x')", 'HessError("no subclass")'])
def test_anything_else_is_a_fault_in_hess(error):
    result = run_raising(f"raise {error}")
    assert result.returncode == 70
    assert result.stderr.startswith("hess: ")
    assert result.stderr.count("\n") == 1


def test_a_fault_says_how_to_get_the_traceback():
    assert "HESS_DEBUG=1" in run_raising("1 / 0").stderr
    debugged = run_raising("1 / 0", HESS_DEBUG="1")
    assert debugged.returncode == 70
    assert "Traceback" in debugged.stderr


def test_a_command_chooses_its_exit_code():
    assert run_raising("import typer; raise typer.Exit(1)").returncode == 1


def test_interrupt_is_130():
    result = run_raising("os.kill(os.getpid(), signal.SIGINT)")
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs SIGPIPE")
def test_a_closed_pipe_is_quiet():
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run([HESS, "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")
