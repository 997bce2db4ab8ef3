"""Tables, messages and progress: in a pipe and on a terminal."""

import os
import pty
import subprocess
import sys

import pytest
from hesscore_cli.render import message, progress, table

COLUMNS = ["parameter", "lambda_max", "note"]
ROWS = [["blocks.3.attn.q[red]", 1 / 3, None], ["head" * 30, 12345.678901, "a\x1b[31m\nb"]]
TABLE = f"from hesscore_cli.render import table; table({COLUMNS}, {ROWS})"
PROGRESS = """
import sys
from hesscore_cli.render import progress
with progress("sweeping", total=2, quiet="quiet" in sys.argv) as advance:
    for _ in range(2):
        advance(1)
        print("data")
"""


def on_terminal(program, stream, *arguments, **environment):
    """Run ``program`` with ``stream`` on a terminal; what it showed there, and its other stream."""
    ours, theirs = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**inherited, "COLUMNS": "60", "TERM": "xterm", **environment},
        stdout=theirs if stream == "stdout" else subprocess.PIPE,
        stderr=theirs if stream == "stderr" else subprocess.PIPE,
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    rest = b"".join(output for output in process.communicate() if output)
    return shown.decode(), rest.decode()


def test_a_pipe_gets_every_digit_and_whole_names(capsys):
    table(COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines() == [
        f"{'parameter':120}          lambda_max  note",
        f"{'blocks.3.attn.q[red]':120}  0.3333333333333333  -",
        f"{'head' * 30}        12345.678901  a\\x1b[31m\\nb",
    ]


def test_a_table_without_rows_is_its_header(capsys):
    table(["a", "b"], [])
    assert capsys.readouterr().out == "a  b\n"


def test_a_terminal_gets_rounded_numbers_and_whole_names():
    shown, _ = on_terminal(TABLE, "stdout")
    assert "0.3333 " in shown
    assert "1.235e+04" in shown
    assert "blocks.3.attn.q[red]" in shown
    assert shown.count("h") == 30  # of "head" thirty times over, folded where the width asks
    assert "\x1b[31m" not in shown


def test_a_message_is_one_line_on_stderr(capsys):
    message("a\nb")
    assert capsys.readouterr() == ("", "a\\nb\n")


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_silent_in_a_pipe(quiet, capsys):
    with progress("sweeping", total=1, quiet=quiet) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_on_a_terminal_and_leaves_data_on_stdout():
    shown, data = on_terminal(PROGRESS, "stderr")
    assert "sweeping" in shown
    assert data == "data\ndata\n"
    assert on_terminal(PROGRESS, "stderr", "quiet") == ("", "data\ndata\n")


def test_no_color_is_honoured():
    assert "\x1b[3" in on_terminal(PROGRESS, "stderr")[0]
    assert "\x1b[3" not in on_terminal(PROGRESS, "stderr", NO_COLOR="1")[0]
