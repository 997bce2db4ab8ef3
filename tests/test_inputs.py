"""Token files: which tokens are scored, each exactly once, and what is refused."""

import hashlib
import re

import numpy as np
import psutil
import pytest
import torch

from hesscore.errors import InputError, UsageError
from hesscore.inputs.data import Data, cut
from hesscore.inputs.reading import read_data
from hesscore.inputs.tokens import BYTES_PER_TOKEN, check_vocabulary, read_tokens, windows
from hesscore.spec import Spec


def gpt(vocab=100, length=8):
    """A causal model."""
    return Spec(d_model=4, d_ff=4, vocab=vocab, seq_len=length)


def written(folder, ids, name="data.npy"):
    path = folder / name
    if path.suffix == ".npy":
        np.save(path, np.asarray(ids))
    else:
        np.asarray(ids, dtype="<u2").tofile(path)
    return path


def test_bin_is_uint16_little_endian(tmp_path):
    path = tmp_path / "val.bin"
    path.write_bytes(bytes([1, 0, 0, 1, 255, 255]))
    ids = read_tokens(path)
    assert (ids.tolist(), ids.dtype) == ([1, 256, 65535], torch.int64)


@pytest.mark.parametrize("kind", ["u1", "i2", ">i4", "<i8", "<u8"])
@pytest.mark.parametrize("ids", [[3, 1, 2], [[3, 1], [2, 0]]])
def test_npy_of_every_integer_type(tmp_path, ids, kind):
    read = read_tokens(written(tmp_path, np.array(ids, dtype=kind)))
    assert (read.tolist(), read.dtype) == (ids, torch.int64)


def test_npy_in_fortran_order(tmp_path):
    ids = np.arange(6).reshape(2, 3)
    assert read_tokens(written(tmp_path, np.asfortranarray(ids))).tolist() == ids.tolist()


def test_windows_of_a_text():
    tokens, targets = windows(torch.arange(10, 18), 3)
    assert tokens.tolist() == [[10, 11, 12], [13, 14, 15], [16, 0, 0]]
    assert targets.tolist() == [[11, 12, 13], [14, 15, 16], [17, -100, -100]]


def test_windows_of_rows_do_not_cross_rows():
    tokens, targets = windows(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), 2)
    assert tokens.tolist() == [[1, 2], [3, 0], [5, 6], [7, 0]]
    assert targets.tolist() == [[2, 3], [4, -100], [6, 7], [8, -100]]


def test_windows_that_fit_are_not_padded():
    tokens, targets = windows(torch.arange(7), 3)
    assert (tokens.shape, int((targets == -100).sum())) == ((2, 3), 0)


def test_a_short_text_is_one_short_window():
    tokens, targets = windows(torch.tensor([7, 8, 9]), 128)
    assert (tokens.tolist(), targets.tolist()) == ([[7, 8]], [[8, 9]])


@pytest.mark.parametrize("length", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("size", [2, 3, 8, 29])
def test_every_next_token_is_scored_once(size, length):
    ids = torch.arange(100, 100 + size)
    tokens, targets = windows(ids, length)
    scored = targets != -100
    assert targets[scored].tolist() == ids[1:].tolist()
    assert tokens[scored].tolist() == ids[:-1].tolist()
    assert scored.any(1).all()


def test_cut_scores_the_first_and_drops_what_is_left_unscored():
    data = cut(gpt(), Data(*windows(torch.arange(10, 18), 3)), 4)
    assert data.data.tolist() == [[10, 11, 12], [13, 14, 15]]
    assert data.target.tolist() == [[11, 12, 13], [14, -100, -100]]


@pytest.mark.parametrize("name", ["data.bin", "data.npy"])
def test_read_data_scores_all_by_default(tmp_path, name):
    path = written(tmp_path, [1, 2, 3, 4], name)
    data = read_data(path, gpt(5, 2))
    assert (data.data.tolist(), data.target.tolist()) == ([[1, 2], [3, 0]], [[2, 3], [4, -100]])
    assert (data.scored, data.notes) == (3, ())
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_read_data_cuts_and_says_so(tmp_path):
    data = read_data(written(tmp_path, [1, 2, 3, 4, 9], "data.bin"), gpt(5, 2), max_tokens=3)
    assert data.target.tolist() == [[2, 3], [4, -100]]  # the 9 is not looked at
    assert (data.scored, data.notes) == (3, ("only the first 3 of 4 tokens are scored",))


def test_read_data_cuts_rows_in_order(tmp_path):
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    data = read_data(written(tmp_path, rows), gpt(10, 2), max_tokens=3)
    assert data.target.tolist() == [[2, 3], [5, -100]]
    assert (data.scored, data.notes) == (3, ("only the first 3 of 6 tokens are scored",))


def test_read_data_beyond_the_end_is_no_cut(tmp_path):
    data = read_data(written(tmp_path, [1, 2, 3]), gpt(5, 2), max_tokens=100)
    assert (data.scored, data.notes) == (2, ())


def test_max_tokens_is_a_setting():
    with pytest.raises(UsageError, match="max_tokens is 0: at least one token must be scored"):
        read_data("unread.bin", gpt(), max_tokens=0)


def refusal(path, vocab=100):
    with pytest.raises(InputError) as caught:
        read_data(path, gpt(vocab))
    assert caught.value.code == 3
    return str(caught.value).removeprefix(f"{path}: ")


def test_ids_beyond_the_vocabulary_are_named(tmp_path):
    path = written(tmp_path, [1, 2, 65, 64], "data.bin")
    expected = "token 65 at position 2 is beyond the vocabulary of 65: another model's?"
    assert refusal(path, vocab=65) == expected
    path = written(tmp_path, [[1, 2], [3, 104]])
    expected = "token 104 at row 1, position 1 is beyond the vocabulary of 100: another model's?"
    assert refusal(path) == expected
    check_vocabulary(torch.tensor([64]), 65)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, -3], "token -3 at position 2 is not an id: negative, or too large for int64"),
        (
            np.array([1, 2**64 - 1], dtype=np.uint64),
            "token -1 at position 1 is not an id: negative, or too large for int64",
        ),
        ([1.0, 2.0], "holds float64 values, not integer token ids"),
        ([True, False], "holds bool values, not integer token ids"),
        (["a", "b"], "holds <U1 values, not integer token ids"),
        ([5], "has shape (1,): (T,) or (B, T) is read, with T of 2 or more"),
        ([[5], [6]], "has shape (2, 1): (T,) or (B, T) is read, with T of 2 or more"),
        (np.zeros((0, 5), int), "has shape (0, 5): (T,) or (B, T) is read, with T of 2 or more"),
        (np.zeros(0, int), "has shape (0,): (T,) or (B, T) is read, with T of 2 or more"),
        (np.zeros((2, 2, 2), int), "has shape (2, 2, 2): (T,) or (B, T) is read, with T of 2 or more"),
        (5, "has shape (): (T,) or (B, T) is read, with T of 2 or more"),
    ],
)
def test_arrays_that_are_no_tokens(tmp_path, ids, message):
    assert refusal(written(tmp_path, ids)) == message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.bin", b"", "empty"),
        ("data.bin", b"\1\0\2", "3 bytes, an odd number, are not uint16 ids: cut short?"),
        ("data.bin", b"\1\0", "has shape (1,): (T,) or (B, T) is read, with T of 2 or more"),
        ("data.bin", b"\x93NUMPY\1\0", "a .npy file by its content: rename it"),
        (
            "data.bin",
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer, not the file that it stands for: run git lfs pull",
        ),
        ("data.csv", b"words", "no data by its name: .npz, .npy, .bin, .txt are read"),
    ],
)
def test_files_that_are_no_tokens(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(path) == message


def test_missing_files_and_folders(tmp_path):
    assert refusal(tmp_path / "none.bin") == "no such file"
    assert refusal(tmp_path) == "a folder with nothing in it"


def test_npy_files_that_are_not_sound(tmp_path):
    whole = written(tmp_path, range(1000)).read_bytes()
    path = tmp_path / "broken.npy"
    for content in (b"words", whole[:5], whole[:100], whole[:-1], b"PK\x03\x04" + whole):
        path.write_bytes(content)
        message = refusal(path)
        assert message.startswith(("not a sound .npy file: ", "cut short: "))
        assert "\n" not in message


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (("'<i8'", "(True,)"), "has shape (True,): (T,) or (B, T) is read, with T of 2 or more"),
        (("'<i8'", "(True, 3)"), "has shape (True, 3): (T,) or (B, T) is read, with T of 2 or more"),
        (("'<i8'", "(-1, 3)"), "has shape (-1, 3): (T,) or (B, T) is read, with T of 2 or more"),
        (("'<i8'", "(11,)"), "cut short: 208 bytes do not hold int64 values of shape (11,)"),
        (
            ("'<i8'", f"({2**32}, {2**32})"),
            f"cut short: 208 bytes do not hold int64 values of shape ({2**32}, {2**32})",
        ),
        (("'<i8'", f"(2, {2**63 - 1})"), f"cut short: 208 bytes do not hold int64 values of shape (2, {2**63 - 1})"),
        (("'<i8'", "(0x" + "f" * 8000 + ",)"), "not a sound .npy file: a size in its shape is beyond all memory"),
        (("'<i8'", "(" + "1," * 70 + ")"), f"has shape ({'1, ' * 26}1...: (T,) or (B, T) is read, with T of 2 or more"),
        (("'|b1'", "(10,)"), "holds bool values, not integer token ids"),
        (
            ("'" + "i4," * 100 + "i4'", "(2,)"),
            f"holds {str([(f'f{i}', '<i4') for i in range(9)])[:80]}... values, not integer token ids",
        ),
        (("'x'", "(10,)"), "not a sound .npy file: descr is not a valid dtype descriptor: 'x'"),
        (("-" * 5000 + "1", "(10,)"), "not a sound .npy file: "),
    ],
)
def test_npy_headers_that_are_odd(tmp_path, header, message, recwarn):
    descr, shape = header
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(118 - 1) + b"\n"
    path = tmp_path / "data.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + b"\0" * 80)
    assert refusal(path).startswith(message)
    assert not recwarn.list


def test_npy_of_an_unknown_version(tmp_path):
    path = tmp_path / "data.npy"
    path.write_bytes(b"\x93NUMPY\x09\0" + bytes(100))
    assert refusal(path) == "not a sound .npy file: version (9, 0)"


def test_more_tokens_than_memory_holds_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "data.bin"
    tokens = psutil.virtual_memory().total // BYTES_PER_TOKEN + 1
    with path.open("wb") as stream:
        stream.truncate(2 * tokens)  # a hole: it takes no room on the disk
    assert re.fullmatch(
        rf"{tokens} tokens would take [\d.]+ GiB of memory; [\d.]+ are free: score fewer, with --max-tokens",
        refusal(path),
    )


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_npy_of_objects_is_refused_and_runs_nothing(tmp_path):
    canary = tmp_path / "canary"
    path = tmp_path / "data.npy"
    np.save(path, np.array([Canary(str(canary))], dtype=object), allow_pickle=True)
    assert refusal(path) == "holds object values, not integer token ids"
    assert not canary.exists()
    np.load(path, allow_pickle=True)
    assert canary.exists()  # so it was a canary


@pytest.mark.parametrize("kind", ["<i4", "<i8"])
def test_wider_ids_in_a_bin_file_are_told_apart(tmp_path, kind):
    """Read as uint16, every second of them would be 0, and the loss would be of nonsense."""
    path = tmp_path / "wide.bin"
    np.arange(1, 60).astype(kind).tofile(path)
    with pytest.raises(InputError, match="every second id is 0, as of ids in int32 read as uint16"):
        read_data(path, gpt())
    np.zeros(60, "<u2").tofile(path)  # all of them
    with pytest.raises(InputError, match="every second id is 0"):
        read_data(path, gpt())
    np.array([5, 0, 7, 0, 9, 1], "<u2").tofile(path)
    assert read_data(path, gpt()).scored == 5


# --- what has no label ---


def encoder(**fields):
    """A bidirectional model without a head."""
    return Spec(**{"d_model": 4, "d_ff": 4, "vocab": 50, "seq_len": 3, "causal": False, "loss": "hidden", **fields})


DRAWN = "scored by the squared error to a target drawn from seed {}"


@pytest.mark.parametrize("name", ["data.bin", "data.npy"])
def test_every_token_of_a_model_without_a_head_is_scored(tmp_path, name):
    data = read_data(written(tmp_path, [7, 8, 9, 10, 11], name), encoder(), seed=4)
    assert data.data.tolist() == [[7, 8, 9], [10, 11, 0]]
    assert data.keep is not None
    assert data.keep.tolist() == [[True] * 3, [True, True, False]]
    assert (data.scored, data.notes, data.target.shape) == (5, (DRAWN.format(4),), (2, 3, 4))


def test_windows_of_rows_are_scored_up_to_max_tokens(tmp_path):
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 99]]
    data = read_data(written(tmp_path, rows), encoder(), max_tokens=6)  # the 99 is not looked at
    assert data.data.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 7]]
    assert data.weights is not None
    assert data.weights.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert (data.scored, data.notes) == (6, (DRAWN.format(0), "only the first 6 of 12 tokens are scored"))


def test_a_window_is_no_longer_than_attention_can_bear(tmp_path):
    data = read_data(written(tmp_path, np.arange(3000) % 50), gpt(50, 10**6))
    assert (data.data.shape, data.scored) == ((3, 1024), 2999)


VIT = {"vocab": None, "image_size": 4, "patch_size": 2, "class_token": True, "channels": 1}


@pytest.mark.parametrize("kind", ["f2", "f4", ">f8"])
def test_pixels(tmp_path, kind):
    """A patch of each image holds its pixels; it has five tokens, with that of its class."""
    pixels = np.arange(48).reshape(3, 1, 4, 4).astype(kind)
    data = read_data(written(tmp_path, pixels), encoder(**VIT), seed=2)
    assert data.data[1].tolist() == [[16, 17, 20, 21], [18, 19, 22, 23], [24, 25, 28, 29], [26, 27, 30, 31]]
    assert (data.scored, data.target.shape, data.notes) == (15, (3, 5, 4), (DRAWN.format(2),))
    some = read_data(tmp_path / "data.npy", encoder(**VIT), max_tokens=7, seed=2)
    assert (len(some.data), some.scored) == (2, 7)
    assert some.notes == (DRAWN.format(2), "only the first 7 of 15 tokens are scored")


def test_activations(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 5, 4))
    data = read_data(written(tmp_path, np.asfortranarray(x)), encoder(vocab=None), max_tokens=8)
    assert data.data.tolist() == x[:2].tolist()
    assert (data.scored, data.notes) == (8, (DRAWN.format(0), "only the first 8 of 15 tokens are scored"))


@pytest.mark.parametrize(
    ("fields", "name", "array", "message"),
    [
        (VIT, "data.npy", np.zeros((1, 1, 4, 4), "u1"), "holds uint8 values, not pixel_values in floats"),
        (VIT, "data.npy", np.zeros((1, 4, 4)), "has shape (1, 4, 4): (B, C, H, W) is read"),
        (VIT, "data.npy", np.zeros((1, 3, 4, 4)), "pixel_values has shape (1, 3, 4, 4), not (B, 1, 4, 4)"),
        (VIT, "data.bin", [1, 2], "the model has no vocabulary: give pixel_values, in an .npy or .npz"),
        ({"vocab": None}, "data.txt", [1, 2], "the model has no vocabulary: give inputs_embeds, in an .npy or .npz"),
        ({"vocab": None}, "data.npy", np.zeros((2, 0, 4)), "has shape (2, 0, 4): (B, L, d) is read"),
        ({"vocab": None}, "data.npy", np.zeros((2, 4)), "has shape (2, 4): (B, L, d) is read"),
        ({"vocab": None}, "data.npy", np.zeros((2, 3, 5)), "inputs_embeds has shape (2, 3, 5), not (B, L, 4)"),
        (
            {"vocab": None},
            "data.npy",
            np.full((1, 2, 4), np.nan),
            "inputs_embeds: nan at row 0, position 0, feature 0 is not finite",
        ),
        ({}, "data.npy", np.zeros((2, 3)), "holds float64 values, not integer token ids"),
        ({}, "data.npy", [4, 50], "token 50 at position 1 is beyond the vocabulary of 50: another model's?"),
        (
            {"loss": "token", "labels": 3},
            "data.bin",
            [1, 2],
            "a loss of token needs labels: give them and input_ids in an .npz",
        ),
        (
            {**VIT, "loss": "sequence", "labels": 3},
            "data.npy",
            np.zeros((1, 1, 4, 4)),
            "a loss of sequence needs labels: give them and pixel_values in an .npz",
        ),
    ],
)
def test_files_without_what_the_model_needs(tmp_path, fields, name, array, message):
    path = written(tmp_path, array, name)
    with pytest.raises(InputError) as caught:
        read_data(path, encoder(**fields))
    assert str(caught.value) == f"{path}: {message}"


def test_pixels_that_are_cut_short(tmp_path):
    path = written(tmp_path, np.zeros((2, 1, 4, 4)))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"cut short: 376 bytes do not hold float64 values of shape \(2, 1, 4, 4\)$"):
        read_data(path, encoder(**VIT))


def test_more_pixels_than_memory_holds_are_refused_but_not_if_few_are_scored(tmp_path, monkeypatch):
    path = written(tmp_path, np.zeros((1000, 1, 4, 4), "f4"))
    left = psutil.virtual_memory()._replace(available=10**6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    with pytest.raises(
        InputError, match=r"16000 numbers would take .* are free: score fewer tokens, with --max-tokens$"
    ):
        read_data(path, encoder(**VIT))
    assert read_data(path, encoder(**VIT), max_tokens=50).scored == 50
