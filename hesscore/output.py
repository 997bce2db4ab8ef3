"""What is written: all of a file or nothing of it, and nothing that could not be written is worked for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hesscore.errors import UsageError

ABOUT = ("config.json", "tokenizer.json", "meta.pkl", "*.index.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")

SCHEMA_VERSION = 1
"""Of every JSON."""


def finite(content: Any) -> Any:
    """Dictionaries and lists with None in the place of every number that is not finite."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


def plain(value: Any) -> Any:
    """What CSV and JSON hold of it: a shape as ``64x256``, and None for a number that is not finite."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return None if isinstance(value, float) and not isfinite(value) else value


def check_writable(outputs: Sequence[str | None], inputs: Sequence[str | None] = ()) -> None:
    """Refuse, before any work, what could not be written at the end, or would overwrite an input or another output."""
    read = {os.path.realpath(file) for path in inputs if path for file in (Path(path), *_with(Path(path)))}
    written = set()
    for path in outputs:
        if path is None:
            continue
        if path == "":
            raise UsageError("'': cannot be written: not the name of a file")
        target = path if path == "-" else os.path.realpath(path)
        if target in written:
            raise UsageError(f"two outputs cannot both go to {'stdout' if path == '-' else path}")
        written.add(target)
        if target in read:
            raise UsageError(f"{path}: is an input, and would be overwritten")
        if path != "-" and (why := _refusal(path, Path(target))):
            raise UsageError(f"{path}: cannot be written: {why}")


def _with(path: Path) -> Iterator[Path]:
    """What belongs to a checkpoint: the weights in a folder; and there, or beside a file, what tells of them."""
    folder = path if path.is_dir() else path.parent
    patterns = (*ABOUT, *WEIGHTS) if path.is_dir() else ABOUT
    yield from (file for pattern in patterns for file in folder.glob(pattern))


def _refusal(path: str, target: Path) -> str | None:
    """Why ``path``, which leads to ``target``, cannot be written."""
    if not os.path.basename(path):
        return "not the name of a file"
    try:
        Path(path).stat()
    except FileNotFoundError:
        places = [target.parent]
    except OSError as error:
        return error.strerror
    else:
        places = [Path(path)] if _is_stream(path) else [target.parent, target]
    if target.is_dir():
        return "a folder"
    if not all(os.access(place, os.W_OK) for place in places):
        return "no such folder, or no right to write there"
    return None


def deliver(outputs: Mapping[str | None, str | bytes], show: Callable[[], None]) -> None:
    """Write each content to its path, if it has one; where none goes to stdout, ``show`` prints there.

    An output that fails does not cost the others: ``UsageError`` comes at the end. stdout is last, as its reader may
    leave early, and that ends hess.
    """
    contents = {path: content for path, content in outputs.items() if path is not None}
    steps: list[Callable[[], None]] = [
        partial(write, path, contents[path]) for path in sorted(contents, key="-".__eq__)
    ]
    if "-" not in contents:
        steps.append(show)
    failures = []
    for step in steps:
        try:
            step()
            sys.stdout.flush()  # here, so that it fails with the others
        except UsageError as error:
            failures.append(str(error))
    if failures:
        raise UsageError("; ".join(failures))


def write(path: str, content: str | bytes) -> None:
    """Write all of ``content`` or nothing; ``-`` is stdout.  Of the main thread, as all that has to do with Ctrl-C."""
    if path == "-":
        sys.stdout.write(content if isinstance(content, str) else content.decode())
        return
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_stream(path):
            Path(path).write_bytes(data)
            return
        target = Path(os.path.realpath(path))  # a link stays one
        # Not a temporary file, which nobody else could read: a folder, and in it a file as any other.
        with _uninterrupted(), TemporaryDirectory(prefix=".hess-", dir=target.parent) as folder:
            whole = Path(folder, "whole")
            whole.write_bytes(data)
            whole.replace(target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C for the moment that a file takes: no way of cleaning up would survive being interrupted itself."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: asked.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked:
            signal.raise_signal(signal.SIGINT)


def _is_stream(path: str) -> bool:
    """Whether there is a pipe or a device, which is written to and not replaced: ``/dev/null`` must stay what it is."""
    return os.path.exists(path) and not os.path.isfile(path)
