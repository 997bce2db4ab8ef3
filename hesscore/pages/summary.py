"""What a report says first."""

from __future__ import annotations

from typing import Any, NamedTuple

from hesscore.measured import Measured
from hesscore.pages import Content
from hesscore.pages.style import name_of, norm_of
from hesscore.pages.tables import short

SHARPEST = 5

CAUSES = 3


class Sharp(NamedTuple):
    """A block, its top eigenvalue, and the maps that cause most of it."""

    name: str
    lambda_max: str
    causes: str


class Summary(NamedTuple):
    title: str
    facts: list[str]
    verdicts: list[str]
    sharpest: list[Sharp]
    notes: list[str]


def summary(content: Content, count: int = SHARPEST) -> Summary:
    """Of the ``count`` sharpest blocks."""
    verdicts = list((content["stability"] or {}).get("verdict", ()))
    if content["heterogeneity"]:
        verdicts.append(content["heterogeneity"]["verdict"])
    rows = [row for row in content["rows"] if row["lambda_max"] is not None and norm_of(row)]
    rows = sorted(rows, key=lambda row: -row["lambda_max"])[:count]
    unfinished = sum(not row["converged"] for row in content["rows"])
    skipped = len(content["skipped"])
    what = content["loss_normalisation"].removeprefix("mean over scored ")
    took = f"{content['duration_seconds']:.1f} s"
    facts = [
        f"{content['n_params']:,} parameters, {content['spec']['layers']} layers, d_model {content['spec']['d_model']}",
        f"loss {content['loss']:.6g}, mean over {content['scored_tokens']:,} scored {what} of {content['data']}",
        f"{len(content['rows'])} blocks in {took}, {content['dtype']}, seed {content['seed']}",
    ]
    notes = list(content["notes"])
    if unfinished:
        notes.append(f"{unfinished} of {len(content['rows'])} blocks have not converged: their errors say how far")
    if skipped:
        notes.append(f"{skipped} parameters have no row")
    sharpest = [Sharp(name_of(row), lambda_max(row), main_causes(content, row)) for row in rows]
    return Summary(content["source"], facts, verdicts, sharpest, notes)


def lambda_max(row: dict[str, Any]) -> str:
    return str(Measured(row["lambda_max"], row["lambda_max_error"]))


def main_causes(content: Content, row: dict[str, Any]) -> str:
    """``loss 98 %, 0.mlp.activation 13 %, 0.norm1 -5 %``"""
    name = "model" if row["component"] == "model" else name_of(row)
    causes = content["causes"].get(name) or content["causes"].get(f"blocks.{name}") or {"lambda_max": {}}
    parts = sorted(causes["lambda_max"].items(), key=lambda cause: -abs(cause[1]))[:CAUSES]
    shares = [(short(node), 100 * part / row["lambda_max"]) for node, part in parts]
    return ", ".join(f"{node} {share:.0f} %" for node, share in shares if round(share))
