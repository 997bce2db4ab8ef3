"""What a masked model is scored on where nobody says: a seeded share of the tokens, behind the mask token."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from pydantic import BaseModel, NonNegativeInt, ValidationError
from torch import Generator, Tensor

from hesscore.errors import InputError
from hesscore.files import examine, naming, short
from hesscore.inputs.data import MASKED, UNSCORED

MASKS = ("[MASK]", "<mask>")
SPECIAL = (*MASKS, "[CLS]", "[SEP]", "[PAD]", "[UNK]", "<cls>", "<s>", "</s>", "<eos>", "<pad>", "<unk>")
"""In a ``vocab.txt``, which says no more than the tokens' texts."""

TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.txt"

LONGEST = 2**27
"""Bytes of either file; those of the largest vocabularies take a third."""

BY_HAND = "give input_ids and labels in an .npz"


class Special(NamedTuple):
    """Ids of tokens that are no text."""

    mask: int
    all: tuple[int, ...]


def masked(ids: Tensor, keep: Tensor, special: Special, seed: int) -> tuple[Tensor, Tensor, str]:
    """What the model sees, the labels, ``(W, L)`` each, and a note on how many of the tokens were masked."""
    text = keep & ~torch.isin(ids, torch.tensor(special.all))
    places = text.flatten().nonzero()[:, 0]
    if not len(places):
        raise InputError("nothing to mask: no token but special ones")
    count = max(1, round(MASKED * len(places)))
    rng = Generator().manual_seed(seed ^ crc32(b"mask"))
    chosen = torch.zeros_like(text)
    chosen.view(-1)[places[torch.randperm(len(places), generator=rng)[:count]]] = True
    note = f"{MASKED * 100:.0f} % of the tokens, {count} of {len(places)}, masked from seed {seed}"
    return ids.masked_fill(chosen, special.mask), ids.where(chosen, UNSCORED), note


def read_special(folder: Path | None, vocab: int) -> Special:
    """From the tokenizer beside a checkpoint; ``InputError`` if there is none, or one without a mask token."""
    path = next((folder / name for name in (TOKENIZER, VOCABULARY) if folder and (folder / name).exists()), None)
    if path is None:
        where = f" in {folder}" if folder else ""
        raise InputError(f"no {TOKENIZER} or {VOCABULARY}{where}, to tell the mask token: {BY_HAND}")
    with naming(path):
        ids = (_of_json if path.name == TOKENIZER else _of_lines)(read(path))
        mask = next((ids[text] for text in MASKS if text in ids), None)
        if mask is None:
            raise InputError(f"has no mask token, {' or '.join(MASKS)}: {BY_HAND}")
        if mask >= vocab:
            raise InputError(f"its mask token {mask} is beyond the vocabulary of {vocab}: another model's?")
        return Special(mask, tuple(id for id in ids.values() if id < vocab))


def read(path: Path) -> bytes:
    """A file of a tokenizer, if it is none of absurd size."""
    file = examine(path)
    if file.size > LONGEST:
        raise InputError(f"{file.size} bytes are more than any tokenizer has")
    return file.path.read_bytes()


class _Token(BaseModel):
    id: NonNegativeInt
    content: str
    special: bool


class _Tokenizer(BaseModel):
    added_tokens: list[_Token]


def _of_json(content: bytes) -> dict[str, int]:
    """Ids of the special tokens by their texts."""
    try:
        tokens = _Tokenizer.model_validate_json(content).added_tokens
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise InputError(f"not sound: {short(f'{where}: ' * bool(where) + fault['msg'], 120)}") from error
    return {token.content: token.id for token in tokens if token.special or token.content in MASKS}


def _of_lines(content: bytes) -> dict[str, int]:
    lines = content.decode(errors="replace").split("\n")
    return {text: id for id, line in enumerate(lines) if (text := line.rstrip("\r")) in SPECIAL}
