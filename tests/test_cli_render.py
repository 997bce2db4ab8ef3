"""Tables, messages and progress: in a pipe and on a terminal."""

import os
import pty
import subprocess
import sys
from decimal import Decimal
from re import fullmatch

import pytest
from hesscore_cli.render import Measured, message, progress, table
from hypothesis import example, given
from hypothesis import strategies as st

from tests.command import read_terminal

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
    shown = read_terminal(ours)
    rest = b"".join(output for output in process.communicate() if output)
    return shown, rest.decode()


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


@pytest.mark.parametrize(
    "value, error, text",
    [
        (2.3744, 0.003, "2.374(4)"),  # what rounding loses is in the error
        (937.71, 0.001, "937.7"),
        (-77.74, 0.31, "-77.7(4)"),
        (3748.0, 41.0, "3750(50)"),
        (-3e7, 2e8, "0(3)e+8"),
        (-1e-9, 0.5, "0.0(6)"),
        (9.9999e-4, 0.0, "0.001000"),
        (1.5e-7, 0.0, "1.500e-7"),
        (0.0, 0.0, "0"),
        (0.0, 0.01, "0.00(1)"),
        (None, 1.0, "-"),
    ],
)
def test_a_measured_number(value, error, text):
    assert str(Measured(value, error)) == text


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
@example(99.996, 0.0005)
@example(0.0995, 0.0951)
def test_a_measured_number_is_within_the_error_that_is_shown(value, error):
    shown = fullmatch(r"(-?[\d.]+)(?:\((\d+)\))?(?:e([+-]\d+))?", str(Measured(value, error)))
    assert shown
    digits, doubt, power = shown.groups()
    unit = Decimal(1).scaleb(-len(digits.partition(".")[2]) + int(power or 0))
    apart = abs(Decimal(digits).scaleb(int(power or 0)) - Decimal(value)) + Decimal(error)
    assert apart <= int(doubt or 1) * unit * Decimal("1.000001")
    assert len(digits.strip("-0.").replace(".", "")) <= 6


@pytest.mark.parametrize("width", ["20", "40", "60"])
def test_no_terminal_is_too_narrow_for_a_number(width):
    columns, row = ["block", "a", "b", "cause"], ["0.attn.q", 12345.0, 0.5, "w " * 40]
    program = f"from hesscore_cli.render import table; table({columns}, [{row}])"
    shown, _ = on_terminal(program, "stdout", COLUMNS=width)
    assert "1.234e+04" in shown
    assert shown.count("w") == 40
