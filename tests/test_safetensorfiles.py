"""Files of safetensors: read to the bit, and refused where their header and their bytes do not agree."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hesscore.checkpoints.jsonfiles import MOST_BYTES
from hesscore.checkpoints.reading import read
from tests.checkpoints import refusal

REAL = "save it in float32, as weights are real numbers"
DAMAGED = "cut short or damaged:"
PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def written(folder, header, data=b"", length=None):
    """A file with a header that is a dictionary or bytes."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


def test_every_dtype_is_read_to_the_bit(tmp_path):
    numbers = torch.arange(-3, 9).view(1, 1, 3, 4) / 4
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
    state = {str(kind): numbers.to(kind) for kind in kinds}
    integers = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    state |= {str(kind): torch.arange(12).view(1, 1, 3, 4).to(kind) for kind in integers}
    state |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}
    path = tmp_path / "any.name"
    save_file(state, path, {"format": "pt"})
    stored = read(path)
    assert stored.tensors.keys() == state.keys()
    for name, tensor in state.items():
        found = stored.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    assert (stored.beside, stored.config, stored.notes) == ({}, None, [])


def test_tensors_that_lie_at_odd_places_are_read(tmp_path):
    header = {
        "mask": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    data = b"\1" + torch.tensor([0.5, -2.0]).numpy().tobytes()
    for spaces in range(4):
        found = read(written(tmp_path, json.dumps(header).encode() + b" " * spaces, data)).tensors
        assert (found["w"].tolist(), found["mask"].tolist()) == ([0.5, -2.0], [True])
        assert found["w"].data_ptr() % 4 == 0


def test_what_was_read_stays_when_the_file_changes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1000)}, path)
    tensors = read(path).tensors
    with path.open("r+b") as stream:
        stream.truncate(100)
    assert tensors["w"].sum() == 1000


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"w": PAIR}, bytes(8), 1000, f"{DAMAGED} its header takes 1000 bytes, the file 77; copy it again"),
        ({"w": PAIR}, bytes(8), 2**40, f"{DAMAGED} its header takes 1099511627776 bytes, the file 77; copy it again"),
        ({"w": PAIR}, bytes(7), None, f"{DAMAGED} incomplete metadata, file not fully covered; copy it again"),
        ({"w": PAIR}, bytes(9), None, f"{DAMAGED} incomplete metadata, file not fully covered; copy it again"),
        (
            {"w": PAIR, "v": {**PAIR, "data_offsets": [4, 12]}},
            bytes(12),
            None,
            f"{DAMAGED} invalid offset for tensor `v`; copy it again",
        ),
        (
            {"w": PAIR, "v": {**PAIR, "data_offsets": [12, 20]}},
            bytes(20),
            None,
            f"{DAMAGED} invalid offset for tensor `v`; copy it again",
        ),
        (
            {"w": {**PAIR, "shape": [3]}},
            bytes(8),
            None,
            f"{DAMAGED} invalid shape, data type, or offset for tensor; copy it again",
        ),
        (
            {"w": {**PAIR, "shape": [2**40, 2**40]}},
            bytes(8),
            None,
            f"{DAMAGED} overflow computing buffer size from shape and/or element type; copy it again",
        ),
        (b'{"w":' + json.dumps(PAIR).encode() + b',"w":' + json.dumps(PAIR).encode() + b"}", bytes(8), None, "twice"),
        (b'{"w":', b"", None, "its header: not sound JSON: Expecting value: line 1 column 6 (char 5)"),
        (b'{"\xff":1}', b"", None, "its header: not UTF-8 text: byte 2 is 0xff"),
        (b'{"w":' + b"[" * 10**5, b"", None, "its header: not sound: its JSON is nested too deeply"),
        ({"w": {**PAIR, "dtype": "Q8"}}, bytes(8), None, f"w holds Q8 values: {REAL}"),
        ({"w": {**PAIR, "dtype": "F8_E4M3"}}, bytes(2), None, f"w holds F8_E4M3 values: {REAL}"),
        ({"w": {**PAIR, "dtype": "F4"}}, bytes(1), None, f"w holds F4 values: {REAL}"),
        (
            {"w": {"dtype": "I8", "shape": [2, 2], "data_offsets": [0, 4]}},
            bytes(4),
            None,
            f"w holds int8 values: {REAL}",
        ),
        (
            {"q.lora_A.w": PAIR},
            bytes(8),
            None,
            "q.lora_A.w is of an adapter, which is no model without its base model: ",
        ),
        ({}, b"", None, "holds no dictionary of tensors; its keys are none: save model.state_dict()"),
        ({"n" * 200: {**PAIR, "dtype": "Q8"}}, bytes(8), None, f"{'n' * 80}... holds Q8 values: {REAL}"),
    ],
)
def test_files_that_are_damaged_or_hold_no_real_weights(tmp_path, header, data, length, message):
    message = "its header: not sound JSON: w is there twice" if message == "twice" else message
    assert refusal(written(tmp_path, header, data, length)).startswith(message)


def test_a_header_that_is_too_long(tmp_path):
    path = written(tmp_path, b"{" + b" " * MOST_BYTES)
    assert refusal(path) == f"its header: {MOST_BYTES + 1} bytes of JSON: no more than {MOST_BYTES} are read"
