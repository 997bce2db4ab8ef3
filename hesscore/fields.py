"""Fields by name from YAML, and what is said of those that are wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hesscore.errors import InputError, UsageError
from hesscore.files import File, examine, naming, short

Model = TypeVar("Model", bound=BaseModel)

LONGEST_FILE = 2**16
"""Bytes; a spec takes a few hundred."""

LONGEST_VALUE = 80
"""Characters."""

FAULTS_SHOWN = 4

NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.[0-9]))(\.[0-9]*)?([eE][-+]?[0-9]+)?")
"""Decimal: YAML 1.1 would read 010 as 8, 1:30 as 90 and 1e-5 as text."""


def read_fields(path: str | Path) -> dict[str, object]:
    """The fields of a YAML file: ``InputError`` where there is no text to read, ``UsageError`` if they are no fields.

    Their values are not nested, so that no file can be deeper or larger than it looks.
    """
    with naming(path):
        text = _text(examine(path))
    return _fields(text)


def validated(model: type[Model], fields: Mapping[str, object]) -> Model:
    """``UsageError`` that names the fields at fault."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        faults = [_explain(fault, model) for fault in error.errors()[:FAULTS_SHOWN]]
        if error.error_count() > FAULTS_SHOWN:
            faults.append(f"and {error.error_count() - FAULTS_SHOWN} more")
        raise UsageError("; ".join(faults)) from error


def _text(file: File) -> str:
    if file.size > LONGEST_FILE:
        raise UsageError(f"{file.size} bytes are no spec, which takes {LONGEST_FILE} at most")
    try:
        return file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def _fields(text: str) -> dict[str, object]:
    fields: dict[str, object] = {}
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    try:
        for start in yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.MappingStartEvent:
            if not isinstance(next(events), start):
                raise UsageError("a spec is a mapping of fields, such as d_model: 768")
        while isinstance(key := next(events), yaml.ScalarEvent):
            name, value = _shown(key.value), next(events)
            if key.value in fields:
                raise UsageError(f"{name}: given again in line {_line(key)}")
            if not isinstance(value, yaml.ScalarEvent) or value.tag or len(value.value) > LONGEST_VALUE:
                raise UsageError(f"{name}: line {_line(value)} is not one short value without a tag")
            fields[key.value] = _value(value)
        if not isinstance(key, yaml.MappingEndEvent):
            raise UsageError(f"line {_line(key)}: a field has a name such as d_model")
        if not isinstance(next(events), yaml.DocumentEndEvent) or not isinstance(next(events), yaml.StreamEndEvent):
            raise UsageError("a file holds one spec, without ---")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two are of absurd escapes
        raise UsageError(f"not valid YAML: {' '.join(str(error).split())}") from error
    return fields


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return event.start_mark.line + 1


def _value(scalar: yaml.ScalarEvent) -> object:
    text: str = scalar.value
    if scalar.style is not None:  # in quotes
        return text
    if text in ("", "~", "null"):
        return None
    number = NUMBER.fullmatch(text)
    if number is not None:
        return float(text) if number[2] or number[3] else int(text)
    return yaml.SafeLoader.bool_values.get(text.lower(), text)


def _explain(error: ErrorDetails, model: type[BaseModel]) -> str:
    field = _shown(".".join(map(str, error["loc"])))
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, model.model_fields, 1)
        return f"unknown field {field}" + (f", did you mean {near[0]}?" if near else "")
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message[0].lower()}{message[1:]}" if field else message


def _shown(name: str) -> str:
    return short(name if name.isprintable() else ascii(name))
