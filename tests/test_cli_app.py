"""The installed command ``hess``: help, version, and an exit code for everything that can be raised."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import HESS, run


def doing(statement):
    """``hess boom``, a command made here that does ``statement``."""
    program = f"""
import os, signal, sys
from hesscore.errors import HessError, InputError, UsageError
from hesscore_cli.app import main
from hesscore_cli.commands import app

@app.command()
def boom() -> None:
    {statement}

sys.argv = ["hess", "boom"]
main()
"""
    return sys.executable, "-c", program


def run_raising(statement, **environment):
    return run(*doing(statement), **environment)


def test_help():
    result = run(HESS, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: hess ")
    assert "..." not in result.stdout.replace("[ARGS]...", "")


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


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs SIGPIPE")
def test_a_closed_pipe_is_quiet():
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run([HESS, "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")


def run_in_shell(redirection, *command, **environment):
    """As ``COMMAND REDIRECTION`` in a shell."""
    return run("bash", "-c", f'"$@" {redirection}', "bash", *command, **environment)


NO_SPACE = "hess: stdout: cannot be written: No space left on device\n"
CLOSED = "hess: stdout is closed: send it to /dev/null if nobody reads it\n"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


@pytest.mark.parametrize(
    ("redirection", "message"), [(">&-", CLOSED), pytest.param(">/dev/full", NO_SPACE, marks=needs_full)]
)
@pytest.mark.parametrize(
    "command",
    [
        (HESS, "--help"),
        (HESS, "--version"),
        doing("print('few')"),
        doing("print('many' * 100_000)"),
        doing("print('and an error'); raise UsageError('of its own')"),
    ],
)
def test_what_cannot_be_printed_is_2(redirection, message, command):
    result = run_in_shell(redirection, *command)
    assert (result.returncode, result.stderr) == (2, message)


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2>/dev/full", marks=needs_full)])
@pytest.mark.parametrize(
    ("command", "code", "stdout"),
    [
        (doing("sys.stderr.write('lost'); print('kept')"), 0, "kept\n"),
        (doing("raise InputError('lost')"), 3, ""),
        (doing("1 / 0"), 70, ""),
        ((HESS, "--no-such-option"), 2, ""),
    ],
)
def test_what_cannot_be_said_changes_nothing(redirection, command, code, stdout):
    result = run_in_shell(redirection, *command)
    assert (result.returncode, result.stdout, result.stderr) == (code, stdout, "")


def test_a_closed_stderr_is_not_the_next_file_that_is_opened(tmp_path):
    path = tmp_path / "rows.csv"
    opened = f"file = open({str(path)!r}, 'w'); print('a message', file=sys.stderr); os.write(2, b'another')"
    assert run_in_shell("2>&- <&-", *doing(opened)).returncode == 0
    assert path.read_text() == ""


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"\\u03bb \\xb1\n"), ("latin-1", b"\\u03bb \xb1\n")])
def test_a_letter_that_stdout_has_not_is_escaped(encoding, shown):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = doing(r"print('\u03bb \xb1')")
    result = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, shown, b"")
