"""JSON from files that nobody vouches for: one object of bounded size, no key twice, and no number but JSON's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from hesscore.errors import InputError
from hesscore.files import examine, naming, reason

MOST_BYTES = 2**24
"""What is read of JSON takes less by far, but for the index of the largest models."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``InputError``, under the file's name, for anything else."""
    with naming(path.name):
        file = examine(path)
        check_size(file.size)
        return parsed(file.path.read_bytes())


def check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise InputError(f"{size} bytes of JSON: no more than {MOST_BYTES} are read")


def parsed(text: bytes) -> dict[str, Any]:
    """The object that a JSON text is; ``InputError`` for anything else."""
    try:
        content = json.loads(
            text.decode(), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_doubles
        )
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {text[error.start]:#04x}") from None
    except RecursionError:
        raise InputError("not sound: its JSON is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"not sound JSON: {reason(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"its JSON is of type {type(content).__name__}, not an object with named fields")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond all floats")
    return number


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key} is there twice")
        content[key] = value
    return content
