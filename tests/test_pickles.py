"""The pickle in a checkpoint: nothing in it is run, and none takes longer than its bytes warrant."""

import os
import pickle
import re
import sys
import zipfile
from collections import Counter, OrderedDict
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hesscore.checkpoints import load, pickles
from hesscore.checkpoints.reading import read
from hesscore.checkpoints.torchfiles import LEGACY
from hesscore.errors import InputError
from tests.checkpoints import ARGS, NO_TENSORS, RESAVE, assert_same_model, refusal, saved, zipped
from tests.reference_nanogpt import state_dict

C_FC, LN_F = "transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.weight"


class Canary:
    """Unpickled by the usual means, this makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("way", ["zip", "legacy", "plain"])
def test_a_pickle_that_wants_code_is_refused_and_runs_nothing(tmp_path, way, protocol):
    path, canary = tmp_path / "ckpt.pt", tmp_path / "canary"
    content = {"model": Canary(canary), "model_args": ARGS}
    if way == "plain":
        path.write_bytes(pickle.dumps(content, protocol))
    else:
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=way == "zip")
    message = refusal(path)
    assert not canary.exists()
    if protocol >= 2 and way == "plain":
        assert message == f"a pickle, but not by torch.save; {RESAVE}"
    elif protocol == 2:
        assert message == f"asks to run {os.system.__module__}.system on loading; nothing was run; {RESAVE}"
    if way == "plain":
        pickle.loads(path.read_bytes())
        assert canary.exists()  # so it was a canary


@pytest.mark.parametrize("modern", [True, False])
def test_a_whole_module_is_code(tmp_path, modern):
    path = tmp_path / "ckpt.pt"
    torch.save({"model": torch.nn.Linear(2, 2)}, path, _use_new_zipfile_serialization=modern)
    assert refusal(path) == f"asks to run torch.nn.modules.linear.Linear on loading; nothing was run; {RESAVE}"


def test_the_result_of_a_call_is_not_called(tmp_path):
    method = pickle.dumps(Path.touch, 2)  # getattr(Path, "touch")
    path = zipped(tmp_path / "ckpt.pt", method[:-1] + b")R.")
    assert refusal(path) == f"asks to run __builtin__.getattr on loading; nothing was run; {RESAVE}"
    zipped(path, b"\x80\x02ctorch\ndevice\nX\x03\0\0\0cpu\x85R)R.")
    assert refusal(path) == "not sound: calls device(), which torch.save never does; nothing was run"


def test_another_pickle_protocol_is_explained(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save({"model": state_dict(ARGS), "model_args": ARGS}, path, pickle_protocol=4)
    assert refusal(path) == (
        "damaged, or not a checkpoint: its pickle protocol is not torch.save's own; "
        "torch.save it without pickle_protocol"
    )


@pytest.mark.parametrize("modern", [True, False])
def test_harmless_containers_and_scalars_are_read(tmp_path, modern):
    beside = {
        "loss": np.float32(0.5),
        "done": np.bool_(True),
        "best": torch.tensor(0.25, dtype=torch.float64),
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "milestones": Counter({30: 1, 60: 2}),
        "names": {"a", "b"},
        "raw": b"\xff\0",
        "nested": [OrderedDict(a=(1, None)), {2: {3.5: "c"}}],
    }
    path = tmp_path / "ckpt.pt"
    torch.save({"model": {"w": torch.ones(2)}, **beside}, path, _use_new_zipfile_serialization=modern)
    assert read(path).beside == beside
    assert {name: type(value) for name, value in read(path).beside.items()} == {n: type(v) for n, v in beside.items()}


class Subclass(Tensor):
    pass


def test_tensors_that_are_more_than_tensors_are_refused(tmp_path):
    state = state_dict(ARGS)
    noted = state[C_FC].clone()
    noted.note = 1
    for odd in state[C_FC].as_subclass(Subclass), noted:
        expected = f"asks to run torch._tensor._rebuild_from_type_v2 on loading; nothing was run; {RESAVE}"
        assert refusal(saved(tmp_path, state | {C_FC: odd})) == expected


def test_a_state_dict_of_many_tensors_with_what_torch_notes_on_it(tmp_path):
    """``_metadata`` is put on the dictionary once that is full, be it as large as it may."""
    args = ARGS | {"n_layer": 10}
    state = OrderedDict(state_dict(args))
    vars(state)["_metadata"] = OrderedDict({"": {"version": 1}})
    assert len(state) > 100
    assert_same_model(saved(tmp_path, state, args), state_dict(args), args)


def test_attributes_in_the_pickle_shadow_no_method(tmp_path):
    shadows = {name.upper(): "no method" for name in ("items", "keys", "values", "__len__")}
    state = OrderedDict(state_dict(ARGS))
    state.__dict__.update(shadows)
    path = saved(tmp_path, state)
    with zipfile.ZipFile(path) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    pickled = entries.pop("data.pkl")
    for name in shadows:
        assert pickled.count(name.encode()) == 1
        pickled = pickled.replace(name.encode(), name.lower().encode())
    del entries["version"]
    assert_same_model(zipped(path, pickled, **entries), state_dict(ARGS), ARGS)


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


ORDERED = b"ccollections\nOrderedDict\n"
FLOATS = b"ctorch\nFloatStorage\n"


def storage(count, view=b""):
    """A persistent id: a storage of ``count`` numbers."""
    return b"(" + text("storage") + FLOATS + text("0") + text("cpu") + pickle.dumps(count, 2)[2:-1] + view + b"tQ"


def view(of, size, stride):
    """A call for a tensor."""
    sizes = b"".join(pickle.dumps(one, 2)[2:-1] + b"\x85" for one in (size, stride))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + of + b"K\0" + sizes + b"\x89" + ORDERED + b")RtR"


ENDLESS = view(storage(1), 10**12, 0)
"""A tensor of 10^12 numbers, all of them in the same place."""


def legacy(content, keys=b"]"):
    """A file of torch.save's older kind, with no number in it."""
    return LEGACY + b"".join(b"\x80\x02" + part + b"." for part in (b"}", content, keys))


def test_more_memory_than_the_file_holds_is_refused(tmp_path):
    args = text("model_args") + pickle.dumps(ARGS, 2)[2:-1]
    path = tmp_path / "ckpt.pt"
    large = view(storage(2**29, b"N"), 2**29, 1)  # 2 GiB, nowhere in the file
    path.write_bytes(legacy(b"}(" + args + text("model") + b"}" + text("a") + large + b"su"))
    assert re.fullmatch(r"its tensors are 2147483648 bytes, the file only \d+: save it again, whole", refusal(path))


BOMB = b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))
"""t = (t, t), sixty times over."""
COLLIDING = b"".join(b"\x8a\x09" + (7 + n * (2**61 - 1)).to_bytes(9, "little") + b"N" for n in range(1000))
"""Numbers that all have the hash 7, with ``None`` for each."""
MANY = b"}(" + b"".join(text(str(n)) + b"N" for n in range(1000)) + b"u"


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"}" + BOMB + b"Ns", f"a dictionary in it has a tuple for a key, not a name or a number; {RESAVE}"),
        (b"}(" + COLLIDING + b"u", f"a dictionary in it has a large int for a key, not a name or a number; {RESAVE}"),
        (BOMB + b")R", "tuple()"),
        (b"c__builtin__\nset\n](" + b"K\1" * 101 + b"e\x85R", "__builtin__.set(large list)"),
        (b"c__builtin__\nset\n](" + COLLIDING + b"e\x85R", "__builtin__.set(large list)"),
        (b"c__builtin__\nset\n](" + COLLIDING[12:24] + b"e\x85R", "__builtin__.set(list)"),
        (b"c__builtin__\nset\n]" + BOMB + b"a\x85R", "__builtin__.set(list)"),
        (b"ccollections\nCounter\n" + MANY + b"\x85R", "collections.Counter(large dict)"),
        (b"Nr\xff\xff\xff\x7f", "damaged, or not a checkpoint: it puts its object 2 at place 2147483647"),
        (b"]q\0(h\0h\0e)R", "list()"),
        (ORDERED + ENDLESS + b"\x85R", "collections.OrderedDict(tensor)"),
        (ORDERED + ENDLESS + b"R", "collections.OrderedDict(...)"),
        (ORDERED + MANY + b"\x85R", "collections.OrderedDict(large dict)"),
        (ORDERED + b")R" + MANY + b"b", "build(OrderedDict, large dict)"),
        (ORDERED + b")R" + ENDLESS + b"b", "build(OrderedDict, tensor)"),
        (ENDLESS + b"Q", "persistent_load(...)"),
        (b"c_codecs\nencode\n" + text("a") + text("idna") + b"\x86R", "_codecs.encode(str, str)"),
        (b"c_codecs\nencode\n" + text("a" * 1001) + text("latin1") + b"\x86R", "_codecs.encode(long str, 'latin1')"),
        (b"ctorch\nSize\n(" + b"K\1" * 65 + b"t\x85R", "torch.Size(tuple)"),
        (b"cnumpy\ndtype\n" + text("O") + b"\x89\x88\x87R", "numpy.dtype(str, bool, bool)"),
        (b"cbuiltins\nbytearray\nJ\0\0\0\x40\x85R", "asks to run builtins.bytearray on loading"),
        (b"ctorch\nDoubleTensor\nJ\0\0\0\x10\x85R", "asks to run torch.DoubleTensor on loading"),
        (b"ctorch._utils\n_rebuild_sparse_tensor\n", "asks to run torch._utils._rebuild_sparse_tensor on loading"),
        (b"(l" * 10**5, "damaged, or not a checkpoint: its pickle protocol is not torch.save's own"),
        (b"(" * 10**4 + b"t" * 10**4, "holds a tuple, not a dictionary"),
        (b")" + b"\x85" * 10**5, "holds a tuple, not a dictionary"),
        (b"X\xff\xff\xff\xff", "damaged, or not a checkpoint: expected 4294967295 bytes in a unicodestring4"),
    ],
)
def test_what_would_take_for_ever_is_refused(tmp_path, pickled, message):
    if message.endswith(")"):
        message = f"not sound: calls {message}, which torch.save never does; nothing was run"
    path = tmp_path / "ckpt.pt"
    assert refusal(zipped(path, b"\x80\x02" + pickled + b".")).startswith(message)
    path.write_bytes(legacy(pickled))
    assert refusal(path).startswith(message)


def test_a_pickle_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MOST_STEPS", 100)
    path = zipped(tmp_path / "ckpt.pt", b"\x80\x02" + b"N" * 99 + b".")
    assert refusal(path) == f"not sound: its pickle has more than 100 steps; {RESAVE}"


@pytest.mark.parametrize("keys", [b"]" + BOMB + b"a", ENDLESS, BOMB, b"]" + text("a" * 1001) + b"a"])
def test_the_names_of_storages_are_short_texts(tmp_path, keys):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(legacy(b"}", keys))
    assert refusal(path) == "damaged, or not a checkpoint: its storages have no names"


def test_a_pickle_by_another_name_is_scanned_too(tmp_path):
    path = zipped(tmp_path / "ckpt.pt", b"\x80\x02}.", **{"DATA.PKL": b"\x80\x02" + ORDERED + ENDLESS + b"R."})
    assert refusal(path).startswith("not sound: calls collections.OrderedDict(...)")


def test_deep_nesting_is_no_trouble(tmp_path):
    deep = b"\x80\x02" + b"}X\x01\0\0\0a" * 5000 + b"N" + b"s" * 5000 + b"."
    assert refusal(zipped(tmp_path / "ckpt.pt", deep)) == f"{NO_TENSORS} a: save model.state_dict()"


PIECES = [
    *(bytes([code]) for code in b"()]}N0125Rlabdestuo.Q\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"),
    *(b"%c%c" % (code, place) for code in b"qh" for place in range(3)),
    *(
        b"K\1",
        b"\x8c\1a",
        b"\x95" + bytes(8),
        b"\x8a\x01\x05",
        text("a"),
        text("model_args"),
        ORDERED,
        ENDLESS,
        storage(1),
        pickle.dumps(ARGS, 2)[2:-1],
    ),
]


@settings(max_examples=300)
@given(
    st.sampled_from([pickles.TORCH, pickles.PLAIN]),
    st.lists(st.tuples(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.sampled_from([1, 1, 2, 2000]))),
)
def test_every_pickle_takes_steps_in_proportion_to_its_bytes(tmp_path_factory, dialect, parts):
    pickled = b"\x80\x02" + b"".join(b"".join(pieces) * times for pieces, times in parts) + b"."
    steps = 0

    def count(*_):
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        with suppress(Exception):
            pickles.scan(BytesIO(pickled), dialect)
    finally:
        sys.settrace(before)
    assert steps < 200 * len(pickled)
    with suppress(InputError):
        load(zipped(tmp_path_factory.getbasetemp() / "ckpt.pt", pickled))
