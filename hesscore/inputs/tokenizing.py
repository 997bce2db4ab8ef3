"""Token ids of a text, in a process of its own: ``main`` reads the text and writes the ids, on stdin and stdout.

The library tokenizers panics on files that are not sound, or aborts, and would take the caller's process with it.
Nothing that takes long to load is imported here.
"""

from __future__ import annotations

import sys
from array import array

import psutil
from tokenizers import Tokenizer


def main(tokenizer: str, length: str, memory: str) -> None:
    """Ids in int64 by the file ``tokenizer``, in no more than ``memory`` bytes.

    ``length`` is that of windows, each with its special tokens, of which only the last may be shorter; 0 leaves the
    text whole.
    """
    if psutil.LINUX:
        psutil.Process().rlimit(psutil.RLIMIT_AS, (int(memory), int(memory)))
    text = sys.stdin.buffer.read().decode()
    try:
        ids = encoded(Tokenizer.from_file(tokenizer), text, int(length))
    except BaseException as error:  # a panic is no Exception
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    sys.stdout.buffer.write(ids.tobytes())


def encoded(tokenizer: Tokenizer, text: str, length: int) -> array[int]:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if length:
        special = tokenizer.num_special_tokens_to_add(is_pair=False)
        if length <= special:
            raise ValueError(f"it puts {special} special tokens into each window of {length}")
        tokenizer.enable_truncation(length)
    whole = tokenizer.encode(text)
    return array("q", [id for part in (whole, *whole.overflowing) for id in part.ids])
