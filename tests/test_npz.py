"""Arrays in an .npz: read as numpy saved them, or refused in one line before they take memory, and nothing is run."""

import hashlib
import io
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hesscore.errors import InputError
from hesscore.inputs.reading import read_data
from hesscore.inputs.stored import BYTES_PER_NUMBER
from hesscore.spec import Spec

IDS = torch.tensor([[1, 4, 4, 0, 9, 10], [7, 2, 3, 12, 11, 5]])
HOLES = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])


def spec(**fields):
    """A causal model, unless its vocabulary is taken from it."""
    return Spec(**{"d_model": 8, "d_ff": 12, "vocab": 13, "seq_len": 8, **fields})


STACK = {"vocab": None}


@pytest.fixture
def free(monkeypatch):
    """Say how much memory is free."""

    def say(size):
        left = psutil.virtual_memory()._replace(available=size)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: left)

    return say


def test_the_code_of_the_page_on_data_runs(tmp_path, monkeypatch):
    """Eight tokens, of which two are padding: four labels are behind another token."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs/data.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    data = read_data("data.npz", spec(vocab=18))
    assert data.target.tolist() == [[17, 3, 8, -100], [2, -100, -100, -100]]


def written(folder, compressed=False, **arrays):
    path = folder / "data.npz"
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def refusal(path, s=None):
    with pytest.raises(InputError) as caught:
        read_data(path, s or spec())
    name, _, message = str(caught.value).partition(f"{path}: ")
    assert (name, caught.value.code, "\n" in message) == ("", 3, False)
    return message


@pytest.mark.parametrize("compressed", [False, True])
def test_what_numpy_saved_is_read(tmp_path, compressed):
    labels = IDS.where(HOLES == 1, -100).numpy()
    labels[0, 2] = labels[0, 5] = labels[1, 3] = -100
    path = written(tmp_path, compressed, input_ids=IDS.numpy(), attention_mask=HOLES.numpy(), labels=labels)
    data = read_data(path, spec())
    assert data.target.tolist() == [[-100, -100, 0, 9, -100, -100], [2, -100, -100, 11, -100, -100]]
    assert (data.scored, data.notes, data.sha256) == (4, (), hashlib.sha256(path.read_bytes()).hexdigest())
    some = read_data(path, spec(), max_tokens=3)
    assert (some.scored, some.notes) == (3, ("only the first 3 of 4 tokens are scored",))


@pytest.mark.parametrize("kind", ["u1", "i2", ">i4", "<i8", "<u8"])
def test_ids_have_any_whole_type(tmp_path, kind):
    data = read_data(written(tmp_path, input_ids=IDS.numpy().astype(kind)), spec())
    assert (data.data.tolist(), data.data.dtype) == (IDS.tolist(), torch.int64)


@pytest.mark.parametrize("kind", ["f2", "<f4", ">f8", "g"])
def test_numbers_have_any_float_type(tmp_path, kind):
    x = np.random.default_rng(0).normal(size=(2, 2, 3, 8)).astype(kind)
    data = read_data(written(tmp_path, inputs_embeds=x[0], labels=x[1]), spec(**STACK))
    assert np.array_equal(data.data.numpy(), x[0].astype("f8"))
    assert np.array_equal(data.target.numpy(), x[1].astype("f8"))


def test_arrays_in_fortran_order(tmp_path):
    path = written(tmp_path, input_ids=np.asfortranarray(IDS.numpy()))
    assert read_data(path, spec()).data.tolist() == IDS.tolist()


def test_a_wide_id_is_none(tmp_path):
    path = written(tmp_path, input_ids=np.array([[1, 2**64 - 1]], "u8"))
    assert refusal(path) == "input_ids: -1 at row 0, position 1 is none of the 13 tokens of the vocabulary"


def test_a_float_that_64_bits_do_not_hold_is_not_finite(tmp_path, recwarn):
    if np.finfo("g").max == np.finfo("f8").max:
        pytest.skip("no wider float here")
    path = written(tmp_path, inputs_embeds=np.full((1, 2, 8), np.finfo("g").max))
    assert refusal(path, spec(**STACK)) == "inputs_embeds: inf at row 0, position 0, feature 0 is not finite"
    assert not recwarn.list


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([["a"]]), "input_ids holds <U1 values, not numbers"),
        (np.array([[1j]]), "input_ids holds complex128 values, not numbers"),
        (np.array([[1]], "M8[s]"), "input_ids holds datetime64[s] values, not numbers"),
        (np.zeros((2, 0), int), "input_ids has shape (2, 0): there is nothing in it"),
        (np.zeros(3, "i4,i4"), "input_ids holds [('f0', '<i4'), ('f1', '<i4')] values, not numbers"),
    ],
)
def test_arrays_that_are_no_numbers(tmp_path, array, message):
    assert refusal(written(tmp_path, input_ids=array)) == message


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_objects_are_refused_and_nothing_is_run(tmp_path):
    canary = tmp_path / "canary"
    path = written(tmp_path, input_ids=np.array([Canary(str(canary))], dtype=object))
    assert refusal(path) == "input_ids holds object values, not numbers"
    assert not canary.exists()
    np.load(path, allow_pickle=True)["input_ids"]
    assert canary.exists()  # so it was a canary


def test_files_that_are_cut_short_or_damaged(tmp_path):
    """Whatever byte is lost or turned, it is one line or, where no content depends on it, the same data."""
    path = written(tmp_path, compressed=True, input_ids=IDS.numpy(), attention_mask=HOLES.numpy())
    whole, expected = path.read_bytes(), read_data(path, spec())
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(300):
        content = bytearray(whole)
        if trial < 50:
            del content[rng.integers(len(whole)) :]
        else:
            content[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            data = read_data(path, spec())
        except InputError as error:
            assert error.code == 3 and "\n" not in str(error)
            refused += 1
        else:
            assert torch.equal(data.data, expected.data) and torch.equal(data.target, expected.target)
    assert refused > 200


def test_a_turned_bit_is_told_by_the_checksum(tmp_path):
    path = written(tmp_path, input_ids=IDS.numpy())
    content = bytearray(path.read_bytes())
    at = content.index(np.int64(9).tobytes())
    content[at] = 8
    path.write_bytes(content)
    assert refusal(path) == "not a sound .npz file: Bad CRC-32 for file 'input_ids.npy'"


@pytest.mark.parametrize("compressed", [False, True])
def test_the_checksum_of_all_is_compared(tmp_path, compressed):
    path = written(tmp_path, compressed, input_ids=IDS.numpy())
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 16] ^= 1
    path.write_bytes(content)
    assert refusal(path) == "not a sound .npz file: Bad CRC-32 for file 'input_ids.npy'"


def zipped(path, *entries, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return path


def npy(array, shape=None):
    """What numpy would save, with another shape in its header if one is given."""
    stream = io.BytesIO()
    if shape is None:
        np.save(stream, array)
    else:
        np.lib.format.write_array_header_1_0(stream, {"descr": array.dtype.str, "fortran_order": False, "shape": shape})
        stream.write(array.tobytes())
    return stream.getvalue()


def test_archives_that_numpy_never_saves(tmp_path):
    path, ids = tmp_path / "data.npz", npy(IDS.numpy())
    with pytest.warns(UserWarning, match="Duplicate name"):
        zipped(path, ("input_ids.npy", ids), ("input_ids.npy", ids))
    assert refusal(path) == "holds input_ids twice"
    zipped(path, ("input_ids.npy", ids), compression=zipfile.ZIP_BZIP2)
    assert refusal(path) == "input_ids is compressed as numpy never does: save it with numpy.savez"
    zipped(path, *((f"{i}.npy", ids) for i in range(17)))
    assert refusal(path) == "holds 17 arrays, more than a model takes"
    zipped(path, ("input_ids.npy", b"words"))
    assert refusal(path).startswith("not a sound .npz file: ")
    zipped(path, ("input_ids.npy", npy(IDS.numpy(), (3, 6))))
    assert refusal(path) == "input_ids: cut short: 224 bytes do not hold int64 values of shape (3, 6)"
    zipped(path, ("input_ids.npy", npy(IDS.numpy(), (2**40, 2**40))))
    assert refusal(path).startswith(
        "input_ids: cut short: 224 bytes do not hold int64 values of shape (1099511627776, "
    )
    zipped(path, ("input_ids.npy", ids + bytes(9)))
    assert refusal(path) == "input_ids has 9 bytes more than its shape says"
    zipped(path)
    assert refusal(path) == "no input_ids, which the model sees"
    path.write_bytes(b"words")
    assert refusal(path) == "not a sound .npz file: File is not a zip file"


def test_a_small_file_of_many_numbers_is_refused_before_they_are_unpacked(tmp_path, free):
    """Deflate makes a thousandth of zeros."""
    path = zipped(tmp_path / "data.npz", ("input_ids.npy", npy(np.zeros((1000, 10_000), "i1"))))
    assert path.stat().st_size < 20_000
    free(BYTES_PER_NUMBER * 10**7 - 1)
    tracemalloc.start()
    try:
        assert refusal(path).startswith("10000000 numbers would take 0.745 GiB of memory; ")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_is_not_unpacked_beyond_its_length(tmp_path):
    """64 megabytes of spaces, packed into less than one."""
    header = b"\x93NUMPY\2\0" + struct.pack("<I", 2**26) + b" " * 2**26
    path = zipped(tmp_path / "data.npz", ("input_ids.npy", header))
    del header
    tracemalloc.start()
    try:
        assert refusal(path) == "not a sound .npz file: EOF: reading array header, expected 67108864 bytes got 16372"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_size_that_is_a_lie_is_not_believed(tmp_path):
    """The archive says that there is more than is packed into it."""
    path = zipped(tmp_path / "data.npz", ("input_ids.npy", npy(np.zeros((2, 6), int), (10, 6))))
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 128 + 480)
    path.write_bytes(content)
    assert refusal(path).startswith("not a sound .npz file: ")
