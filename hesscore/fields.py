"""Fields by name from YAML, and what is said of those that are wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hesscore.errors import InputError, UsageError
from hesscore.files import File, examine, naming, short

Model = TypeVar("Model", bound=BaseModel)

Where: TypeAlias = tuple[str | int, ...]
"""The names of fields, and numbers of items in lists, that lead to a value."""

LONGEST_FILE = 2**16
"""Bytes; a spec takes a few hundred."""

LONGEST_VALUE = 256
"""Characters; the longest are names of tensors."""

DEEPEST = 4
"""Fields and lists within each other."""

FAULTS_SHOWN = 4

NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.[0-9]))(\.[0-9]*)?([eE][-+]?[0-9]+)?")
"""Decimal: YAML 1.1 would read 010 as 8, 1:30 as 90 and 1e-5 as text."""


class Fields(NamedTuple):
    """What a YAML file holds.  Its lists are tuples here."""

    values: dict[str, Any]
    lines: dict[Where, int]
    """Where each value stands, counted from 1."""


def read_fields(path: str | Path) -> Fields:
    """The fields of a YAML file: ``InputError`` where there is no text to read, ``UsageError`` if they are no fields.

    There are no tags and no aliases in it, so nothing is executed, and no file is larger than it looks.
    """
    with naming(path):
        text = _text(examine(path))
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    lines: dict[Where, int] = {}
    try:
        for start in yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.MappingStartEvent:
            if not isinstance(next(events), start):
                raise UsageError("a spec is a mapping of fields, such as d_model: 768")
        values = _mapping(events, (), lines)
        if not isinstance(next(events), yaml.DocumentEndEvent) or not isinstance(next(events), yaml.StreamEndEvent):
            raise UsageError("a file holds one spec, without ---")
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two are of absurd escapes
        said = " ".join(str(error).split())
        advice = "; text that begins with * is put in quotes" if "alias" in said else ""
        raise UsageError(f"not valid YAML: {said}{advice}") from error
    return Fields(values, lines)


def validated(model: type[Model], values: Mapping[str, object], lines: Mapping[Where, int] | None = None) -> Model:
    """``UsageError`` that names the fields at fault, and their ``lines`` where these are known."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        shown = error.errors()[:FAULTS_SHOWN]
        faults = [_explain(fault, model) + in_line(lines or {}, *fault["loc"]) for fault in shown]
        if error.error_count() > FAULTS_SHOWN:
            faults.append(f"and {error.error_count() - FAULTS_SHOWN} more")
        raise UsageError("; ".join(faults)) from error


def in_line(lines: Mapping[Where, int], *where: str | int) -> str:
    """The line of a value, or of what it is missing in, as the end of a message."""
    around = (where[:length] for length in range(len(where), 0, -1))
    return next((f" (line {lines[outer]})" for outer in around if outer in lines), "")


def instead(name: str, known: Iterable[str]) -> str:
    """The nearest of the names that there are, as the end of a message."""
    near = difflib.get_close_matches(name, known, 1)
    return f", did you mean {_shown(near[0])}?" if near else ""


def _text(file: File) -> str:
    if file.size > LONGEST_FILE:
        raise UsageError(f"{file.size} bytes are no spec, which takes {LONGEST_FILE} at most")
    try:
        return file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def _node(event: yaml.Event, events: Iterator[yaml.Event], where: Where, lines: dict[Where, int]) -> Any:
    """The value that begins with ``event``."""
    lines.setdefault(where, _line(event))
    if isinstance(event, yaml.ScalarEvent) and not event.tag and len(event.value) <= LONGEST_VALUE:
        return _value(event)
    if isinstance(event, yaml.CollectionStartEvent) and not event.tag and len(where) < DEEPEST:
        return (_mapping if isinstance(event, yaml.MappingStartEvent) else _sequence)(events, where, lines)
    raise UsageError(f"{_dotted(where)}: line {_line(event)} is not one short value without a tag")


def _mapping(events: Iterator[yaml.Event], where: Where, lines: dict[Where, int]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    while isinstance(key := next(events), yaml.ScalarEvent):
        inner = (*where, key.value)
        if key.value in fields:
            raise UsageError(f"{_dotted(inner)}: given again in line {_line(key)}")
        lines[inner] = _line(key)
        fields[key.value] = _node(next(events), events, inner, lines)
    if not isinstance(key, yaml.MappingEndEvent):
        raise UsageError(f"line {_line(key)}: a field has a name such as d_model")
    return fields


def _sequence(events: Iterator[yaml.Event], where: Where, lines: dict[Where, int]) -> tuple[Any, ...]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_node(event, events, (*where, len(items)), lines))
    return tuple(items)


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
    where = error["loc"]
    field = _dotted(where)
    if error["type"] == "extra_forbidden":
        return f"unknown field {field}{instead(str(where[-1]), _holder(model, where).model_fields)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message[0].lower()}{message[1:]}" if field else message


def _holder(model: type[BaseModel], where: Where) -> type[BaseModel]:
    """The model, ``model`` or one within it, that has the field at ``where``."""
    for part in where[:-1]:
        if part in model.model_fields:
            model = next(_models(model.model_fields[str(part)].annotation), model)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _dotted(where: Where) -> str:
    return _shown(".".join(map(str, where)))


def _shown(name: str) -> str:
    return short(name if name.isprintable() else ascii(name))
