"""What all pictures share: their formats, their style, and the same bytes for the same content."""

from __future__ import annotations

from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hesscore.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")


def style() -> AbstractContextManager[None]:
    """In which a figure is drawn and written."""
    from matplotlib import rc_context

    return rc_context({"svg.fonttype": "none", "svg.hashsalt": "hess", "font.size": 8})


def check_format(option: str, path: str) -> None:
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"{option} {path}: give a name that ends in {' or '.join(FORMATS)}")


def written(figure: Figure, path: str, **options: Any) -> bytes:
    """In the format of ``path``, without a date or an address."""
    content = BytesIO()
    kind = Path(path).suffix[1:].lower()
    figure.savefig(
        content, format=kind, dpi=160, metadata=dict.fromkeys(("Date", "Creator")) if kind == "svg" else {}, **options
    )
    return content.getvalue()
