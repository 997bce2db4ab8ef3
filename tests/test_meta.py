"""nanoGPT's meta.pkl: read as pickle reads it, with nothing run."""

import os
import pickle
import random
from io import BytesIO
from pathlib import Path

import pytest

from hesscore.checkpoints import meta
from hesscore.checkpoints.meta import read_meta
from hesscore.errors import InputError

SAMPLE = Path(__file__).parent.parent / "sample_runs" / "pydoc" / "meta.pkl"


def table(characters):
    return {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {character: key for key, character in enumerate(characters)},
    }


ABC = table("\nabc")
DAMAGED = "damaged, or not a table of characters:"
DUMP = "pickle.dump only dictionaries of texts and numbers"


def refusal(path):
    with pytest.raises(InputError) as caught:
        read_meta(path)
    name, _, message = str(caught.value).partition(f"{path}: ")
    assert (name, caught.value.code, "\n" in message) == ("", 3, False)
    return message


def written(folder, content, protocol=4):
    path = folder / "meta.pkl"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 65, 300, 70_000])
def test_a_table_of_characters(tmp_path, count, protocol):
    characters = [chr(code) for code in range(1, count + 2048) if not 0xD800 <= code < 0xE000][:count]
    random.Random(0).shuffle(characters)
    path = written(tmp_path, table(characters), protocol)
    assert read_meta(path) == pickle.loads(path.read_bytes()) == table(characters)


def test_the_table_of_the_sample_run():
    assert read_meta(SAMPLE) == pickle.loads(SAMPLE.read_bytes())


def test_what_else_is_in_it_is_left_out(tmp_path):
    assert read_meta(written(tmp_path, ABC | {"source": "pydoc", "sizes": (1, [2.5, None, True])})) == ABC


class Canary:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_is_run(tmp_path, protocol):
    canary = tmp_path / "canary"
    path = written(tmp_path, ABC | {"extra": Canary(canary)}, protocol)
    message = refusal(path)
    assert not canary.exists()
    asks = f"asks to run {os.system.__module__}.system on loading; nothing was run; {DUMP}"
    begins = "not a pickle of protocol 2 to 5: it begins with "
    assert message == asks if protocol >= 2 else message.startswith(begins)
    pickle.loads(path.read_bytes())
    assert canary.exists()  # so it was a canary


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"text", "not a pickle of protocol 2 to 5: it begins with b'te'"),
        (b"\x80\x06N.", r"not a pickle of protocol 2 to 5: it begins with b'\x80\x06'"),
        (b"\x80\x04C\1aN.", f"{DAMAGED} it holds more than containers, texts and numbers"),
        (pickle.dumps(ABC, 4)[:-20], DAMAGED),
        (pickle.dumps(ABC, 2)[:-1], f"{DAMAGED} pickle exhausted before seeing STOP"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", f"{DAMAGED} it puts its object 2 at place 2147483647"),
        (b"\x80\x02ctorch\nFloatStorage\n.", f"asks to run torch.FloatStorage on loading; nothing was run; {DUMP}"),
        (b"\x80\x04)" + b"\x94h\0h\0\x86" * 40 + b".", "holds a tuple, not a dictionary of vocab_size, itos and stoi"),
        (b"\x80\x04}" + b")h\0\x86\x94" + b"Ns.", DAMAGED),
        (b"\x80\x04})Ns.", f"a dictionary in it has a ints for a key, not a name or a number; {DUMP}"),
        ([1], "holds a list, not a dictionary of vocab_size, itos and stoi"),
        ({"itos": {}}, "not a table of characters: that has vocab_size, itos and stoi; this has itos"),
        (
            ABC | {"vocab_size": 4.0},
            "not a table of characters: that has vocab_size, itos and stoi; this has vocab_size, ",
        ),
        (
            ABC | {"vocab_size": True},
            "not a table of characters: that has vocab_size, itos and stoi; this has vocab_size, ",
        ),
        (ABC | {"itos": [1]}, "not a table of characters: that has vocab_size, itos and stoi; this has vocab_size, "),
        (ABC | {"vocab_size": 3}, "itos: 3 is no id below vocab_size, 3"),
        (ABC | {"itos": {0: "\n", 1: "ab"}}, "itos: 1 stands for 'ab', not for one character"),
        (ABC | {"itos": {0: 5}}, "itos: 0 stands for 5, not for one character"),
        (ABC | {"itos": {0: {}}}, "itos: 0 stands for a dict, not for one character"),
        (ABC | {"itos": {-1: "a"}}, "itos: -1 is no id below vocab_size, 4"),
        (ABC | {"itos": {True: "a"}}, "itos: True is no id below vocab_size, 4"),
        (ABC | {"itos": {"x": "a"}}, "itos: 'x' is no id below vocab_size, 4"),
        (ABC | {"itos": {0: "\n", 1: "b"}}, "itos and stoi differ: 1 is 'b', which is 2"),
        (ABC | {"itos": {0: "\n", 1: "x"}}, "itos and stoi differ: 1 is 'x', which is a NoneType"),
        (ABC | {"itos": {0: "\n", 1: "a"}}, "itos and stoi differ: the one has 2 characters, the other 4"),
        (ABC | {"stoi": ABC["stoi"] | {"b": 2.0}}, "itos and stoi differ: 2 is 'b', which is a float"),
    ],
)
def test_what_is_no_table_of_characters(tmp_path, content, message):
    assert refusal(written(tmp_path, content)).startswith(message)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    path = written(tmp_path, b"\x80" * (2**24 + 1))
    monkeypatch.delattr(Path, "read_bytes")
    assert refusal(path) == "16777217 bytes are too many for a table of characters"


def test_no_file(tmp_path):
    assert refusal(tmp_path / "meta.pkl") == "no such file"
    assert refusal(tmp_path) == "a folder with nothing in it"


def test_the_unpickler_itself_finds_no_class():
    with pytest.raises(pickle.UnpicklingError, match=r"^names builtins\.print$"):
        meta._Unpickler(BytesIO(pickle.dumps(print, 4))).load()
