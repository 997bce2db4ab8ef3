"""nanoGPT's ``meta.pkl``: the characters of a vocabulary, and nothing run that the file brings."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from hesscore.checkpoints.pickles import PLAIN, scan
from hesscore.checkpoints.tensors import listed
from hesscore.errors import InputError
from hesscore.files import examine, naming, reason, short

MOST_BYTES = 2**24
"""All characters there are take less."""


PROTOCOLS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
"""How pickles begin."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"names {module}.{name}")


def read_meta(path: str | Path) -> dict[str, Any]:
    """``vocab_size``, ``itos`` (the character of each id) and ``stoi`` (the id of each character).

    ``InputError`` unless the latter two are the inverse of each other, with ids below ``vocab_size``.
    """
    with naming(path):
        file = examine(path)
        if file.size > MOST_BYTES:
            raise InputError(f"{file.size} bytes are too many for a table of characters")
        if not file.head.startswith(PROTOCOLS):
            raise InputError(f"not a pickle of protocol 2 to 5: it begins with {file.head[:2]!r}")
        return _checked(_unpickled(file.path.read_bytes()))


def _unpickled(pickled: bytes) -> object:
    try:
        scan(BytesIO(pickled), PLAIN)
        return _Unpickler(BytesIO(pickled)).load()
    except InputError:
        raise
    except Exception as error:  # of every kind there is, as nobody vouches for these bytes
        raise InputError(f"damaged, or not a table of characters: {reason(error)}") from error


def _checked(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise InputError(f"holds a {type(content).__name__}, not a dictionary of vocab_size, itos and stoi")
    size, itos, stoi = (content.get(name) for name in ("vocab_size", "itos", "stoi"))
    if type(size) is not int or type(itos) is not dict or type(stoi) is not dict:
        raise InputError(f"not a table of characters: that has vocab_size, itos and stoi; this has {listed(content)}")
    for key, character in itos.items():
        if type(character) is not str or len(character) != 1:
            raise InputError(f"itos: {short(key)} stands for {_shown(character)}, not for one character")
        if type(key) is not int or not 0 <= key < size:
            raise InputError(f"itos: {_shown(key)} is no id below vocab_size, {size}")
        if type(stoi.get(character)) is not int or stoi[character] != key:
            raise InputError(f"itos and stoi differ: {key} is {character!a}, which is {_shown(stoi.get(character))}")
    if len(stoi) != len(itos):
        raise InputError(f"itos and stoi differ: the one has {len(itos)} characters, the other {len(stoi)}")
    return {"vocab_size": size, "itos": itos, "stoi": stoi}


def _shown(value: object) -> str:
    return short(ascii(value)) if isinstance(value, str | int) else f"a {type(value).__name__}"
