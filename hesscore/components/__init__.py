"""The maps, one a file.  Importing this package imports every file in it, and so registers every map."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
