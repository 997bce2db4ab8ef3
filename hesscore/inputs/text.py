"""Texts as token ids: by the checkpoint's own tokenizer, or by the characters of nanoGPT's ``meta.pkl``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hesscore import memory
from hesscore.errors import InputError
from hesscore.files import File, naming, short
from hesscore.inputs.data import window
from hesscore.inputs.masking import TOKENIZER, read
from hesscore.inputs.stored import Stored
from hesscore.spec import Spec

META = "meta.pkl"

BYTES_PER_BYTE = 500
"""Of memory, that a byte of text takes while it is tokenised."""

SECONDS, BYTES_PER_SECOND = 60, 10_000
"""How long a tokenizer may take, before and for each byte of text; they do a hundred times as much."""

CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from hesscore.inputs.tokenizing import main; main(*sys.argv[2:])"
)
"""Where modules are found is what it is here: a working folder is no place for them."""


def read_text(file: File, spec: Spec, folder: Path | None) -> Stored:
    """The ids of a text, ``(T,)``: the whole of it for a causal model, else windows one after the other.

    These have ``window(spec)`` tokens with their special ones; the last may have fewer.
    """
    if said := memory.excess(file.size * BYTES_PER_BYTE):
        raise InputError(f"{file.size} bytes of text {said}: give a part of it")
    content = file.path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from error
    if folder and (folder / TOKENIZER).exists():
        ids = _tokenised(folder / TOKENIZER, content, 0 if spec.causal else window(spec))
    else:
        ids = _characters(_meta(file, folder), text)
    if len(ids) < 2:
        raise InputError(f"holds {len(ids)} token{'' if len(ids) == 1 else 's'}: there must be two")
    return ids


def _meta(file: File, folder: Path | None) -> Path:
    places = [place / META for place in (folder, file.path.parent) if place]
    meta = next((path for path in places if path.exists()), None)
    if meta is None:
        raise InputError(f"no {TOKENIZER} beside the checkpoint, nor nanoGPT's {META} there or here: give ids, as .npy")
    return meta


def _tokenised(path: Path, text: bytes, length: int) -> Stored:
    if not find_spec("tokenizers"):
        raise InputError("text needs the package tokenizers: pip install 'hess[text]'")
    with naming(path):
        read(path)
        words = [sys.executable, "-I", "-c", CHILD, json.dumps(sys.path), str(path), str(length), str(memory.free())]
        environment = os.environ | {"RUST_BACKTRACE": "0"}
        seconds = SECONDS + len(text) / BYTES_PER_SECOND
        try:
            done = subprocess.run(words, input=text, capture_output=True, env=environment, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise InputError(f"not done with {len(text)} bytes of text after {seconds:.0f} s") from error
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            *_, said = ["no word why", *(line for line in lines if line and not line.startswith("note: "))]
            raise InputError(f"not a sound tokenizer: {short(said, 120)}")
    return np.frombuffer(done.stdout, np.int64)


def _characters(path: Path, text: str) -> Stored:
    from hesscore.checkpoints.meta import read_meta

    ids = read_meta(path)["stoi"]
    unknown = next((position for position, character in enumerate(text) if character not in ids), None)
    if unknown is not None:
        raise InputError(
            f"character {short(repr(text[unknown]))} at position {unknown} is not one of the {len(ids)} of {path}"
        )
    return np.array([ids[character] for character in text], np.int64)
