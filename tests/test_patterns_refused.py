"""What is wrong with a ``--spec`` file, or with the tensors that it names, is said in one line with its place."""

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hesscore.checkpoints import load
from hesscore.checkpoints.patterns import LEAVES
from hesscore.errors import InputError, UsageError
from hesscore.spec import Spec
from hesscore.wiring.model import model
from tests.described import FIELDS, NAMES, fault, loaded, state_of

NOTHING = "SPEC: says nothing of the tensors: give names, or family: nn.TransformerEncoder"
FAULTS = {
    "no names": ({"names": dict.fromkeys(NAMES)}, NOTHING),
    "prefix alone": ({"prefix": "net."}, "SPEC: prefix: is for the names of a family; put it into names (line 9)"),
    "typo in a field": ({"haeds": 2}, "SPEC: unknown field haeds, did you mean heads? (line 9)"),
    "typo in names": ({"nmaes": {}}, "SPEC: unknown field nmaes, did you mean names? (line 9)"),
    "no heads": ({"heads": 0}, "SPEC: heads: input should be greater than 0 (line 1)"),
    "no number": ({"heads": "two"}, "SPEC: heads: input should be a valid integer (line 1)"),
    "no placement": (
        {"placement": None, "norm_eps": None, "causal": None},
        "SPEC: the tensors do not tell everything: add placement: pre, post or parallel; causal: true or false; "
        "norm_eps: NUMBER",
    ),
    "no loss": (
        {"loss": None},
        "SPEC: the tensors do not tell everything: "
        "add loss: causal_lm, masked_lm, token, sequence, regression or hidden",
    ),
    "no pool": (
        {"loss": "sequence"},
        "SPEC: the tensors do not tell everything: add pool: first, last, mean or first_mean",
    ),
    "rotary without a base": (
        {"positions": "rotary"},
        "SPEC: the tensors do not tell everything: add rotary_base: NUMBER",
    ),
    "contradiction": ({"kv_heads": 3}, "SPEC: heads: 2 is not divisible by kv_heads: 3"),
    "too deep": ({"layers": 20_000, "weight_sets": 2}, "SPEC: layers: 20000 are more than 10000 (line 9)"),
    # names of ours
    "unknown part": (
        {"names": {"blocks.{i}.attn.query": "net.{i}.out"}},
        "SPEC: no part of a model is blocks.{i}.attn.query, did you mean blocks.{i}.attn.q? (line 19)",
    ),
    "typo in a part": (
        {"names": {"blocks.{i}.mlp.donw": "net.{i}.down"}},
        "SPEC: no part of a model is blocks.{i}.mlp.donw, did you mean blocks.{i}.mlp.down? (line 19)",
    ),
    "typo in a leaf": (
        {"names": {"hed.weight": "out"}},
        "SPEC: no part of a model is hed.weight, did you mean head.weight? (line 19)",
    ),
    "one tensor for two parts": (
        {"names": {"blocks.2.scale1": "norm"}},
        "SPEC: norm.weight is named for final_norm and blocks.2.scale1 (line 19)",
    ),
    "one of each layer for two parts": (
        {"names": {"blocks.{i}.attn.q": "net.{i}.out"}},
        "SPEC: net.0.out.weight is named for blocks.{i}.attn.o and blocks.{i}.attn.q (line 19)",
    ),
    "no room": (
        {"gated": False, "names": {"blocks.{i}.mlp.gate": "net.{i}.extra"}},
        "SPEC: blocks.0.mlp.gate.weight is no part of this architecture (line 20)",
    ),
    "nameless": ({"names": {"blocks.{i}.norm2": None}}, "SPEC: no tensor is named for blocks.{i}.norm2.weight, "),
    "no attention": ({"names": {"blocks.{i}.attn.o": None}}, "SPEC: no tensor is named for blocks.{i}.attn.o.weight"),
    # names of theirs
    "typo in a tensor": (
        {"names": {"blocks.{i}.mlp.down": "net.{i}.donw"}},
        "SPEC: blocks.{i}.mlp.down: no tensor is named net.{i}.donw.weight, did you mean net.{i}.down? (line 16)",
    ),
    "typo in a tensor of a leaf": (
        {"names": {"head.weight": "uot"}},
        "SPEC: head.weight: no tensor is named uot, did you mean out? (line 18)",
    ),
    "no number in theirs": (
        {"names": {"blocks.{i}.norm1": "net.0.norm_a"}},
        "SPEC: blocks.{i}.norm1: net.0.norm_a is not a name in the file, with {i} where ours has it (line 11)",
    ),
    "no number in ours": (
        {"names": {"final_norm": "norm.{i}"}},
        "SPEC: final_norm: norm.{i} is not a name in the file, with {i} where ours has it (line 17)",
    ),
    "two numbers": (
        {"names": {"blocks.{i}.norm1": "net.{i}.{i}"}},
        "SPEC: blocks.{i}.norm1: net.{i}.{i} is not a name in the file, with {i} where ours has it (line 11)",
    ),
    "empty": (
        {"names": {"final_norm": ""}},
        "SPEC: final_norm: nothing is not a name in the file, with {i} where ours has it (line 17)",
    ),
    # words
    "unknown word": (
        {"names": {"final_norm": "norm transpose"}},
        "SPEC: final_norm: transpose is not one of transposed, interleaved, paired, did you mean transposed? (line 17)",
    ),
    "interleaved alone": (
        {"names": {"blocks.{i}.attn.o": "net.{i}.out interleaved"}},
        "SPEC: blocks.{i}.attn.o: interleaved is for q+k+v (line 13)",
    ),
    "paired elsewhere": (
        {"names": {"blocks.{i}.mlp.up": "net.{i}.up paired"}},
        "SPEC: blocks.{i}.mlp.up: paired is for q and k (line 15)",
    ),
    "paired but not rotary": (
        {"names": {"blocks.{i}.attn.q+k+v": "net.{i}.qkv paired"}},
        "SPEC: blocks.{i}.attn.q+k+v: paired needs positions: rotary (line 12)",
    ),
    "not side by side": (
        {"names": {"blocks.{i}.attn.o+q": "net.{i}.out"}},
        "SPEC: blocks.{i}.attn.o+q: only q, k and v, or up and gate, lie side by side in a tensor (line 19)",
    ),
    "itself": (
        {"names": {"blocks.{i}.attn.q+q": "net.{i}.out"}},
        "SPEC: blocks.{i}.attn.q+q: only q, k and v, or up and gate, lie side by side in a tensor (line 19)",
    ),
    # ignored
    "nothing ignored": (
        {"ignore": ["nte.*"]},
        "SPEC: ignore: no tensor is named like nte.*, did you mean net.*? (line 10)",
    ),
    "too much ignored": (
        {"ignore": ["*.norm_b.*"]},
        "SPEC: blocks.{i}.norm2: no tensor is named net.{i}.norm_b.weight, did you mean net.{i}.norm_a? (line 16)",
    ),
    # of the file
    "transposed": (
        {"names": {"blocks.{i}.mlp.up": "net.{i}.up transposed"}},
        "FILE: net.0.up.weight has shape (6, 4); its architecture asks for (4, 6)",
    ),
    "other heads": (
        {"kv_heads": 1},
        "FILE: net.0.qkv.weight has shape (12, 4); its architecture asks for (8, 4)",
    ),
}


@pytest.mark.parametrize(("fields", "message"), FAULTS.values(), ids=list(FAULTS))
def test_what_is_wrong_is_said_with_its_line(tmp_path, fields, message):
    names = fields.get("names", {})
    state = state_of() | ({f"net.{i}.extra.weight": torch.ones(6, 4) for i in (0, 1)} if "gated" in fields else {})
    code, said = fault(tmp_path, state, names, **{field: value for field, value in fields.items() if field != "names"})
    assert code == (3 if message.startswith("FILE") else 2)
    assert said == message or (message.endswith(", ") and said.startswith(message))


def test_a_tensor_that_is_neither_named_nor_ignored_is_named(tmp_path):
    more = {"net.0.extra.a": torch.ones(1), "side.x": torch.ones(1), "side.y": torch.ones(1), "z": torch.ones(1)}
    said = (
        "SPEC: 4 tensors are neither named nor ignored: net.0.extra.a, side.x, side.y, z; "
        "if they are not to be analysed, add ignore: [net.0.extra.*, side.*, z]"
    )
    assert fault(tmp_path, state_of() | more) == (2, said)
    found = loaded(tmp_path, state_of() | more, ignore=["net.0.extra.*", "side.*", "z"])
    assert found.left_out == dict.fromkeys(more, "ignored by spec.yaml")
    many = {f"{i}.x": torch.ones(1) for i in range(100)}
    assert fault(tmp_path, state_of() | many)[1].endswith(" 5.*, 6.*, 7.*, ...]")


def test_a_tensor_of_one_layer_that_is_missing_is_named(tmp_path):
    for name, leaf in ("net.1.up.weight", "weight"), ("net.0.qkv.bias", "bias"):
        state = state_of()
        del state[name]
        assert fault(tmp_path, state) == (3, f"FILE: lacks {name}, which other layers have"), leaf
    state = {name.replace("net.1.", "net.2."): leaf for name, leaf in state_of().items()}
    assert fault(tmp_path, state) == (3, "FILE: has tensors of layers 0 and 2, but none of layer 1")
    far = {name.replace("net.1.", f"net.{10**8}."): leaf for name, leaf in state_of().items()}
    assert fault(tmp_path, far) == (3, "FILE: has tensors of layers 0 and 100000000, but none of layer 1")
    beyond = state_of() | {f"net.{'9' * 300}.out.weight": torch.ones(4, 4)}
    assert fault(tmp_path, beyond)[1].startswith("SPEC: 1 tensors are neither named nor ignored: net.999")


def test_sizes_beyond_all_memory_are_refused_before_they_are_taken(tmp_path):
    rotary = {"positions": "rotary", "rotary_base": 1e4, "rotary_dim": 2, "head_dim": 10**12}
    code, said = fault(tmp_path, None, {"blocks.{i}.attn.q+k+v": "net.{i}.qkv paired"}, **rotary)
    assert (code, said.startswith("FILE: net.0.qkv.weight has shape (12, 4); its architecture asks for")) == (3, True)


def test_values_and_kinds_are_checked_as_in_any_family(tmp_path):
    state = state_of()
    state["net.1.up.weight"][0, 0] = torch.nan
    assert fault(tmp_path, state) == (
        3,
        "FILE: net.1.up.weight is NaN or infinite in 1 of 24 places: no curvature there",
    )
    whole = {name: leaf.to(torch.int64) for name, leaf in state_of().items()}
    assert fault(tmp_path, whole)[1].startswith("FILE: table.weight holds int64 values")


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0), (1,), (2, 2, 2, 2, 2, 2)])
@pytest.mark.parametrize("name", ["table.weight", "net.0.out.weight", "net.1.qkv.bias", "net.0.down.weight", "out"])
def test_tensors_of_odd_shapes_are_refused(tmp_path, name, shape):
    code, said = fault(tmp_path, state_of() | {name: torch.ones(shape)})
    assert code in (2, 3)
    assert len(said) < 200


def test_a_spec_file_that_cannot_be_read_is_named_alone(tmp_path):
    """It is read first: the other file may be large."""
    with pytest.raises(InputError, match=rf"^{tmp_path}/none.yaml: no such file$"):
        load(tmp_path / "none.pt", spec=tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UsageError, match=rf"^{tmp_path}/list.yaml: a spec is a mapping"):
        load(tmp_path / "none.pt", spec=tmp_path / "list.yaml")


VALUES: st.SearchStrategy[object] = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        2,
        3,
        10**12,
        1.5,
        "",
        "x",
        "{i}",
        "net.{i}.up",
        "*",
        "net.*",
        "rotary",
        "hidden",
        [],
        [1],
        {},
    ]
)


@given(st.data())
def test_no_spec_file_is_too_odd(tmp_path_factory, data):
    """Whatever it says, a model comes of it, or one line of what is wrong."""
    folder = tmp_path_factory.getbasetemp() / "odd"
    folder.mkdir(exist_ok=True)
    if not (folder / "model.pt").exists():
        torch.save(state_of(), folder / "model.pt")
    fields = FIELDS | data.draw(st.sampled_from([{}, {"family": "nn.TransformerEncoder"}]))
    fields |= data.draw(st.dictionaries(st.sampled_from([*Spec.model_fields, "prefix", "ignore"]), VALUES, max_size=3))
    ours = st.sampled_from([*NAMES, *LEAVES, "blocks.0.attn.o", "blocks.{i}.attn.q+k", "x", ""])
    text = st.sampled_from(
        [*NAMES.values(), "net.0.out", "net.{i}.up paired", "out transposed", "net.{i}.qkv interleaved"]
    )
    names = NAMES | data.draw(st.dictionaries(ours, text, max_size=3))
    for gone in data.draw(st.sets(st.sampled_from([*fields, *names]), max_size=2)):
        fields.pop(gone, None)
        names.pop(gone, None)
    (folder / "spec.yaml").write_text(yaml.safe_dump(fields | {"names": names}))
    try:
        found = load(folder / "model.pt", spec=folder / "spec.yaml")
    except (InputError, UsageError) as error:
        assert "\n" not in str(error)
    else:
        shapes = {name: tuple(leaf.shape) for name, leaf in found.parameters.items()}
        assert shapes == model(found.spec).parameters
