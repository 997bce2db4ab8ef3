"""Trained models from files: read safely, and checked before anything is computed.

One file a family; importing this package imports every file in it, and so registers every family.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from hesscore.checkpoints.described import described
from hesscore.checkpoints.family import Checkpoint, Family
from hesscore.checkpoints.reading import read
from hesscore.checkpoints.specfiles import own, read_spec_file
from hesscore.checkpoints.tensors import listed
from hesscore.checkpoints.torch_encoder import advice
from hesscore.errors import InputError
from hesscore.files import naming
from hesscore.spec import Loss

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Checkpoint", "load"]


def load(path: str | Path, loss: Loss | None = None, spec: str | Path | None = None) -> Checkpoint:
    """Read a checkpoint of any known family, to be scored by ``loss``, or by the head that it has.

    Of a file of any other kind, the YAML file ``spec`` says what its tensors are.  Nothing in the file is executed, and
    nothing is made up for what it lacks: whatever is wrong with it is an ``InputError`` of one line; ``UsageError`` of
    what ``spec`` says.
    """
    said = None if spec is None else read_spec_file(spec)
    with naming(path):
        stored = read(path)
        if said is not None:
            return described(stored, said, loss)
        for family in Family.registry.values():
            if family.recognises(map(family.own, stored.tensors), stored):
                return family.checkpoint(stored, loss)
        if written := advice(dict.fromkeys(map(own, stored.tensors))):
            raise InputError(written)
        known, keys = ", ".join(Family.registry), listed(stored.tensors)
        raise InputError(f"of no known family ({known}): say with --spec what its tensors are; its keys are {keys}")
