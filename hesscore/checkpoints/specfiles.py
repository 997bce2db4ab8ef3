"""What a ``--spec`` file says: the fields of a ``Spec``, the names of the tensors, and those that are not analysed."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.fields import FieldInfo

from hesscore.checkpoints import torch_encoder
from hesscore.checkpoints.family import WRAPPERS
from hesscore.checkpoints.patterns import Pattern, patterns
from hesscore.errors import UsageError
from hesscore.fields import Where, in_line, read_fields, validated
from hesscore.spec import Spec


class SpecFile(BaseModel):
    """What stands in it beside the fields of a ``Spec``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    family: Literal["nn.TransformerEncoder"] | None = None
    """Whose names are known: those in ``names`` come on top."""
    prefix: str = ""
    """What stands before the names of the family."""
    names: dict[str, str] = {}
    """Our names, and those of the file."""
    ignore: tuple[str, ...] = ()
    """Glob patterns."""


def _not_required(field: FieldInfo) -> FieldInfo:
    field = copy(field)
    field.default = None
    return field


_fields: dict[str, Any] = {name: (field.annotation, _not_required(field)) for name, field in Spec.model_fields.items()}
WholeFile = create_model("WholeFile", __base__=SpecFile, **_fields)
"""All that may stand in it: any fields of a ``Spec``, as the tensors tell others."""


@dataclass(frozen=True)
class Said:
    """A ``--spec`` file as it was read."""

    path: Path
    family: str
    """For reports: that of the file's names, or the file that gives them."""
    fields: dict[str, Any]
    """Of the ``Spec``."""
    defaults: dict[str, Any]
    """Fields of the family's, where neither the tensors nor ``fields`` say otherwise."""
    patterns: list[Pattern]
    ignore: tuple[str, ...]
    lines: dict[Where, int]

    def error(self, message: str, *where: str | int) -> UsageError:
        """The file, the message, and the line of what it is about."""
        return UsageError(f"{self.path}: {message}{in_line(self.lines, *where)}")


def own(key: str) -> str:
    """The name of a tensor without wrappers, which may be given or not."""
    return WRAPPERS.sub("", key)


def read_spec_file(path: str | Path) -> Said:
    """``InputError`` where there is no text to read, ``UsageError`` that names the line at fault."""
    try:
        values, lines = read_fields(path)
        file = validated(WholeFile, values, lines)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    fields = {name: value for name, value in values.items() if name in Spec.model_fields}
    defaults = torch_encoder.FIELDS if file.family else {}
    said = Said(Path(path), file.family or Path(path).name, fields, defaults, [], file.ignore, lines)
    if file.family is None and not file.names:
        raise said.error(f"says nothing of the tensors: give names, or family: {torch_encoder.NAME}")
    if file.family is None and file.prefix:
        raise said.error("prefix: is for the names of a family; put it into names", "prefix")
    known = torch_encoder.NAMES if file.family else {}
    for names, before in (known, file.prefix), (file.names, ""):
        for ours, theirs in names.items():
            try:
                said.patterns.extend(patterns(ours, own(before + theirs), optional=names is known))
            except UsageError as error:
                raise said.error(str(error), *(["prefix"] if names is known else ["names", ours])) from error
    return said
