"""Bounds as they are written: the same columns in CSV and JSON, the scalars with them, and how each bound grows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

import hesscore
from hesscore.bounds.growth import Exponent, exponent
from hesscore.bounds.scalars import meaning
from hesscore.bounds.settings import Setting
from hesscore.bounds.tiers import COLUMNS, TIERS, BoundRow
from hesscore.output import SCHEMA_VERSION, plain

FITTED = ("published", "apriori", "swept", "exact")
"""The tiers whose growth is fitted."""


@dataclass
class BoundsReport:
    """Rows as they are finished, and what they rest on."""

    source: str
    tiers: Sequence[str]
    settings: Mapping[str, Any]
    swept: str | None = None
    """The quantity that has several values: ``seq_len``, ``input_norm``, ``heads`` or ``width``."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    blocks: list[Setting] = field(default_factory=list)
    rows: list[BoundRow] = field(default_factory=list)
    duration: float = 0.0

    @property
    def records(self) -> list[dict[str, Any]]:
        """``None`` for what is not finite: a bound that is infinite says nothing."""
        return [{name: plain(value) for name, value in asdict(row).items()} for row in self.rows]

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.records, columns=list(COLUMNS))

    def to_csv(self) -> str:
        return self.frame.to_csv(index=False)

    @property
    def growth(self) -> dict[tuple[str, str, str], dict[str, Exponent]]:
        """How each tier grows with what is swept, by row, column and part; empty if nothing is."""
        if self.swept is None:
            return {}
        found: dict[tuple[str, str, str], dict[str, list[tuple[float, float]]]] = {}
        for row in self.rows:
            series = found.setdefault((row.row, row.column, row.part), {})
            for tier in FITTED:
                if (value := getattr(row, tier)) is not None and row.converged:
                    series.setdefault(tier, []).append((getattr(row, self.swept), value))
        return {
            names: {tier: fit for tier, points in series.items() if (fit := exponent(*zip(*points, strict=True)))}
            for names, series in found.items()
        }

    def to_json(self) -> str:
        """Rows, the scalars they rest on with their origin, and the exponents of what is swept."""
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "hess_version": hesscore.__version__,
            "source": self.source,
            **self.provenance,
            **self.settings,
            "tiers": {tier: TIERS[tier]._asdict() for tier in self.tiers},
            "blocks": [
                {
                    "layer": block.layer,
                    "seq_len": block.length,
                    "spec": block.spec.model_dump(),
                    "scalars": [
                        {"name": name, "value": value, "origin": block.origin[name], "meaning": meaning(name)}
                        for name, value in block.scalars.items()
                    ],
                }
                for block in self.blocks
            ],
            "duration_seconds": round(self.duration, 3),
            "rows": self.records,
            "swept": self.swept,
            "growth": [
                {"row": a, "column": b, "part": part, "tier": tier, "exponent": fit.value, "stderr": plain(fit.stderr)}
                for (a, b, part), fits in self.growth.items()
                for tier, fit in fits.items()
            ],
        }
        return json.dumps(content, indent=1, allow_nan=False) + "\n"
