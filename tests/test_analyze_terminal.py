"""``hess analyze`` on a terminal: a table that fits, progress, and colours only where they are wanted."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.command import HESS, LAST, ROOT, SAMPLE, read_terminal


def on_terminal(arguments, width, stderr_too=False, command="analyze", **environment):
    """What ``hess`` shows on a terminal of this width, and its other stream."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [HESS, command, *map(str, arguments)],
        env={**inherited, "TERM": "xterm-256color", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs if stderr_too else subprocess.PIPE,
    )
    os.close(theirs)
    shown = read_terminal(ours)
    rest = process.communicate(timeout=60)[1] or b""
    return process.returncode, shown.replace("\r\n", "\n"), rest.decode()


def plain(shown):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


@pytest.mark.parametrize("width", [100, 120])
def test_a_terminal_gets_a_table_that_fits_and_nothing_is_cut(width):
    arguments = [*SAMPLE, "--layers", "3", "--components", "attn.k,norm1,mlp.down"]
    code, shown, notes = on_terminal(arguments, width)
    assert (code, notes) == (0, "note: only the first 64 of 4096 tokens are scored\n6 blocks on 64 tokens\n")
    table = plain(shown).partition("sharpest")[2].split("\n\n", 1)[1]
    header = table.partition("─")[0]
    assert "…" not in shown
    assert max(map(len, table.splitlines())) <= width
    assert {"block", "|grad|", "lambda_max", "lambda_min", "trace", "loss", "soft", "norm", "acti", "prod"} == set(
        header.split()
    )
    for name in ("3.norm1.weight", "3.norm1.bias", "3.attn.k.bias", "3.mlp.down.weight"):
        assert sum(line.lstrip().startswith(f"{name} ") for line in table.splitlines()) == 1
    assert "\nno curvature beyond rounding: 3.attn.k.bias\n" in table


def test_a_narrow_terminal_does_without_two_columns_and_says_so():
    shown = plain(on_terminal([*SAMPLE, "--layers", "3", "--components", "mlp.down"], 80)[1])
    table = shown.partition("sharpest")[2].split("\n\n", 1)[1]
    assert " ".join(table.partition("─")[0].split()) == "block lambda_max lambda_min loss soft norm acti prod"
    assert "\nA wider terminal shows |grad|, trace, too.\n" in table
    assert max(map(len, table.splitlines())) <= 80


SATURATED = """
import torch
from hesscore.analysis import Finding, Row
from hesscore.problem import open_problem
from hesscore.report import Report
from hesscore_cli.analyze import _show
problem = open_problem("configs/blocks/paper-block.yaml")
row = Row(
    0, "attn.v", "weight", "w", (2, 2), 4, 1.0, 1.0, 2.0, 0.0, -1.0, 0.0, 1.0, 0.0, 0.0,
    from_loss=0.0, from_softmax=0.0, from_norm=1.5, from_activation=0.5, from_product=0.0,
)
causes = {"blocks.0.norm1": 1.5, "blocks.0.mlp.activation": 0.5}
_show(Report(problem, 1.0, {}, [row.name], [Finding(row, causes=causes)]))
"""


def test_a_loss_that_causes_nothing_hides_no_other_cause():
    """Where logits saturate, the curvature of the cross entropy is exactly zero."""
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", SATURATED], stdout=theirs, cwd=ROOT, check=True)
    os.close(theirs)
    shown = plain(read_terminal(ours))
    assert "0.attn.v.weight" in shown.partition("sharpest")[2].partition("\r\n\r\n")[0]
    assert "0.norm1 75, 0.mlp.activation 25\r\n" in shown
    assert re.search(r"0\.attn\.v\.weight .* 0 +0 +75 +25 +0", shown)


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
