"""Reports that were stored as JSON, read back and checked: whatever is made of one may rely on it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from hesscore.activations import Norm, Site, Units
from hesscore.analysis import Row
from hesscore.checkpoints.jsonfiles import read_object
from hesscore.errors import InputError, UsageError
from hesscore.fields import validated
from hesscore.files import naming
from hesscore.heterogeneity import Heterogeneity
from hesscore.report import Report
from hesscore.stability import Stability


class _Stored(BaseModel):
    """What has more fields than are relied on."""

    model_config = ConfigDict(allow_inf_nan=False)


_TYPES = get_type_hints(Row) | {"shape": str}
StoredRow: type[BaseModel] = create_model(
    "StoredRow",
    __base__=_Stored,
    **{column.name: (_TYPES[column.name], ...) for column in fields(Row)},  # type: ignore
)


class _Spectrum(_Stored):
    eigenvalues: list[float]
    weights: list[float]


class _Causes(_Stored):
    lambda_max: dict[str, float]
    trace: dict[str, tuple[float, float]]


class _Activations(_Stored):
    sites: list[Site]
    norms: list[Norm]
    units: list[Units]


class _Spec(_Stored):
    layers: int
    d_model: int


class StoredReport(_Stored):
    """The content of a report of a model; ``docs/report.md`` says what each field is."""

    schema_version: Literal[2]
    hess_version: str
    source: str
    data: str
    spec: _Spec
    n_params: int
    dtype: str
    seed: int
    loss: float
    loss_normalisation: str
    scored_tokens: int
    duration_seconds: float
    notes: list[str]
    skipped: dict[str, str]
    rows: list[StoredRow]  # type: ignore[valid-type]
    model: StoredRow | None  # type: ignore[valid-type]
    heterogeneity: Heterogeneity | None
    stability: Stability | None
    activations: _Activations | None
    kinds: dict[str, Literal["loss", "softmax", "norm", "activation", "product"]]
    causes: dict[str, _Causes]
    spectra: dict[str, _Spectrum]


def read_report(path: str | Path) -> dict[str, Any]:
    """The content of a report that ``hess analyze --json`` wrote; ``InputError`` for anything else."""
    content = read_object(Path(path))
    with naming(path):
        version = content.get("schema_version")
        if "rows" not in content or version is None:
            raise InputError("no report: give what hess analyze --json wrote")
        if version != Report.schema_version or content.get("scope") == "block":
            of = "blocks on their own" if content.get("scope") == "block" else f"version {version}"
            raise InputError(f"a report of {of}: reports of models are read, of version {Report.schema_version}")
        try:
            report = validated(StoredReport, content)
        except UsageError as error:
            raise InputError(f"not a sound report: {error}") from error
        for name, spectrum in report.spectra.items():
            if not spectrum.eigenvalues or len(spectrum.eigenvalues) != len(spectrum.weights):
                raise InputError(f"not a sound report: the spectrum of {name} has not a weight for each eigenvalue")
        nodes = {node for causes in report.causes.values() for node in (*causes.lambda_max, *causes.trace)}
        if missing := sorted(nodes - report.kinds.keys()):
            raise InputError(f"not a sound report: of what kind {missing[0]} is, it does not say")
    return content
