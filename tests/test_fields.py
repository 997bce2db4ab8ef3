"""Fields within fields and lists, from YAML: their values, their lines, and what is said of those that are wrong."""

import pytest
from pydantic import BaseModel, ConfigDict

from hesscore.errors import UsageError
from hesscore.fields import DEEPEST, LONGEST_VALUE, read_fields, validated


class Limit(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    most: float | None = None


class Limits(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    limits: tuple[Limit, ...] = ()
    names: dict[str, str] = {}
    only: Limit | None = None


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "fields.yaml"
        path.write_text(text)
        return path

    return write


def fault(path):
    with pytest.raises(UsageError) as caught:
        validated(Limits, *read_fields(path))
    message = str(caught.value)
    assert "\n" not in message
    return message


TEXT = """
# a comment
limits:
- name: trace
  most: 1.5e3
- {name: norm, most:
    7}
names:
  a.{i}.b: c d
  "e": '2'
only: {name: ~}
"""


def test_values_and_their_lines(file):
    values, lines = read_fields(file(TEXT))
    assert values == {
        "limits": ({"name": "trace", "most": 1500.0}, {"name": "norm", "most": 7}),
        "names": {"a.{i}.b": "c d", "e": "2"},
        "only": {"name": None},
    }
    assert lines == {
        ("limits",): 3,
        ("limits", 0): 4,
        ("limits", 0, "name"): 4,
        ("limits", 0, "most"): 5,
        ("limits", 1): 6,
        ("limits", 1, "name"): 6,
        ("limits", 1, "most"): 6,
        ("names",): 8,
        ("names", "a.{i}.b"): 9,
        ("names", "e"): 10,
        ("only",): 11,
        ("only", "name"): 11,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limits:\n- name: a\n- naem: b", "limits.1.name: field required (line 3); "),
        ("limits:\n- name: a\n- name: b\n  mots: 1", "unknown field limits.1.mots, did you mean most? (line 4)"),
        ("limits:\n- name: a\n  most: much", "limits.0.most: input should be a valid number (line 3)"),
        ("only:\n  nam: a\n  name: b", "unknown field only.nam, did you mean name? (line 2)"),
        ("names:\n  limit: 1", "names.limit: input should be a valid string (line 2)"),
        ("names:\n  a: b\n  a: c", "names.a: given again in line 3"),
        ("names:\n  ? [a]\n  : 1", "line 2: a field has a name such as d_model"),
        ("limits: {}", "limits: input should be a valid tuple (line 1)"),
        ("limit: []", "unknown field limit, did you mean limits? (line 1)"),
        ("names: !!map {}", "names: line 1 is not one short value without a tag"),
        ("names:\n  a: &x b\n  c: *x", "names.c: line 3 is not one short value without a tag"),
        ("names:\n  a: " + "b" * (LONGEST_VALUE + 1), "names.a: line 2 is not one short value without a tag"),
        ("names: " + "[" * 9 + "]" * 9, "names.0.0.0: line 1 is not one short value without a tag"),
    ],
)
def test_a_fault_has_its_line(file, text, message):
    assert fault(file(text)).startswith(message)


def test_text_that_looks_like_an_alias_wants_quotes(file):
    assert fault(file("limits: [*.bias]")).endswith("; text that begins with * is put in quotes")
    assert read_fields(file('limits: ["*.bias"]')).values == {"limits": ("*.bias",)}


def test_what_is_as_deep_and_as_long_as_it_may_be_is_read(file):
    deep = "[" * (DEEPEST - 1) + "b" * LONGEST_VALUE + "]" * (DEEPEST - 1)
    assert read_fields(file(f"a: {deep}")).values == {"a": ((("b" * LONGEST_VALUE,),),)}
