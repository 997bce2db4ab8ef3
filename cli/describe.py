"""``hess describe``: what a checkpoint holds, and what analysing it would take."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, cast

import typer

from .options import Dtype, Json, Loss, MaxTokens, Spec
from .render import show, table

if TYPE_CHECKING:
    from hesscore import spec as specs
    from hesscore.describe import Description


def describe(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint, a file or a folder; or a block spec.")],
    loss: Loss = None,
    spec: Spec = None,
    max_tokens: MaxTokens = None,
    dtype: Dtype = None,
    json: Json = None,
) -> None:
    """Say what a checkpoint holds and how long it takes.

    What of it is analysed, on which data, in which time and memory; no curvature is computed.
    """
    from hesscore import describe as job
    from hesscore.output import check_writable, deliver
    from hesscore.problem import MAX_TOKENS

    check_writable([json], [source, spec])
    found = job.describe(source, dtype, cast("specs.Loss | None", loss), spec, max_tokens or MAX_TOKENS)
    deliver({json: found.to_json()}, lambda: _show(found))


def _show(found: Description) -> None:
    model = found.spec
    layers = f"{model.layers} layer{'s' if model.layers > 1 else ''}"
    show(
        f"{found.source}: {found.family}, {layers}, d_model {model.d_model}, {model.heads} heads, "
        f"{found.n_params:,} parameters",
        f"scored by {model.objective}",
        *(f"note: {note}" for note in found.notes),
        "",
    )
    table(
        ("component", "parameter", "layers", "shape", "parameters", "tensor in the file"),
        [
            (
                part.component,
                part.parameter,
                part.layers,
                "x".join(map(str, part.shape)),
                f"{part.n_params:,}",
                part.tensor,
            )
            for part in found.parts
        ],
    )
    for why, count in Counter(found.left_out.values()).items():
        names = [name for name, reason in found.left_out.items() if reason == why][:3]
        more = f" and {count - len(names)} more" if count > len(names) else ""
        show(f"left out: {', '.join(names)}{more} ({why})")
    if found.wants:
        show("", "data that --data takes:", *(f"  {want}" for want in found.wants))
    show(
        "",
        f"hess analyze on {found.tokens:,} tokens in {found.dtype}: about {_duration(found.seconds)}, "
        f"{found.memory / 2**30:.2g} GiB of memory",
    )


def _duration(seconds: float) -> str:
    """Within a factor of two or so, in one unit."""
    for unit, size in ("hours", 3600), ("minutes", 60):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} seconds"
