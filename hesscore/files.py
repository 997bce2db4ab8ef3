"""Files that a user names: what can be said of one before its format is known."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hesscore.errors import InputError


@dataclass(frozen=True)
class File:
    """A regular file that is not empty; ``head`` is how it begins, ``size`` is in bytes."""

    path: Path
    size: int
    head: bytes

    def sha256(self) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()


def examine(path: str | Path) -> File:
    """Look at a file without reading it all; ``InputError`` where there is nothing to read."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if path.is_dir():
            inside = sorted(path.iterdir(), key=lambda child: (child.suffix != ".pt", child.name))
            advice = f": name a file in it, such as {inside[0].name}" if inside else " with nothing in it"
            raise InputError(f"a folder{advice}")
        if not path.is_file():  # opening a pipe would wait for its writer
            raise InputError("not a regular file")
        with path.open("rb") as stream:
            head = stream.read(64)
    except FileNotFoundError:
        raise InputError("no such file") from None
    except ValueError as error:  # a name that no file can have
        raise InputError(f"cannot be read: {error}") from error
    if not head:
        raise InputError("empty")
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise InputError("a Git LFS pointer, not the file that it stands for: run git lfs pull")
    return File(path, size, head)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Put the name of the file before what is wrong with it, be that its content or its disk."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def reason(error: Exception, most: int = 120) -> str:
    """What a library says of a file, cut to its first line."""
    return short((str(error).strip().splitlines() or [type(error).__name__])[0], most)


def short(text: object, most: int = 80) -> str:
    """What a file says, on one line and cut to a length that a message can carry."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text)[: most + 1])
    return text if len(text) <= most else f"{text[:most]}..."
