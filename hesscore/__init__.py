"""Exact curvature (Hessians) of Transformers.

Public names are loaded on first use, so that ``import hesscore`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_PUBLIC = {"Curvature": "hesscore.curvature", "analyze": "hesscore.run"}

__all__ = ["Curvature", "__version__", "analyze"]

if TYPE_CHECKING:
    from hesscore.curvature import Curvature
    from hesscore.run import analyze
else:

    def __getattr__(name):
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
