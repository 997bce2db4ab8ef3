"""The installed command ``hess`` and the sample run, for the tests that start it."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECKPOINT, VAL = ROOT / "sample_runs/pydoc/ckpt-end.pt", ROOT / "sample_runs/pydoc/val.bin"
HESS = shutil.which("hess", path=str(Path(sys.executable).parent)) or "hess"

SAMPLE = [str(CHECKPOINT), "--data", str(VAL), "--max-tokens", "64"]
LAST = [*SAMPLE, "--components", "final_norm"]
"""Two blocks, and quick."""


def run(*command, folder=None, **environment):
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )


def analyze(*arguments, folder=None, **environment):
    return run(HESS, "analyze", *arguments, folder=folder, **environment)


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def strict(text):
    """JSON as the standard has it, without NaN and infinity."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(word):
    raise AssertionError(f"{word} is not JSON")


def read_terminal(end):
    """All that is shown on a terminal of which ``end`` is ours, until the other is closed."""
    shown = b""
    try:
        while chunk := os.read(end, 4096):
            shown += chunk
    except OSError:  # how Linux says so
        pass
    os.close(end)
    return shown.decode()
