"""An ``nn.TransformerEncoder`` of which nobody says enough is refused with what to write."""

import pytest
import torch
from torch import nn

from hesscore.checkpoints import load
from hesscore.errors import InputError, UsageError
from tests.encoders import made, saved, written


def said_of(path, spec=None):
    with pytest.raises((InputError, UsageError)) as caught:
        load(path, spec=spec)
    assert "\n" not in str(caught.value)
    return caught.value.code, str(caught.value).replace(str(path), "FILE").replace(str(spec), "SPEC")


def test_without_a_spec_it_is_said_what_to_write(tmp_path):
    state = made(final=True).state_dict() | {"head.weight": torch.ones(2, 6), "encoder.scale": torch.ones(1)}
    assert said_of(saved(tmp_path, state)) == (
        3,
        "FILE: holds an nn.TransformerEncoder without its heads, norm_first and activation: write "
        "{family: nn.TransformerEncoder, prefix: encoder., heads: NHEAD, placement: post (pre if norm_first), "
        "activation: relu or gelu, ignore: [head.*, encoder.scale]} into a file, and give it with --spec",
    )


def test_what_is_said_to_be_written_can_be_read(tmp_path):
    state = made().state_dict() | {"head.weight": torch.ones(2, 6), "encoder.scale": torch.ones(1)}
    path = saved(tmp_path, state)
    text = said_of(path)[1].partition("write ")[2].partition(" into a file")[0]
    spec = tmp_path / "written.yaml"
    for vague, definite in ("NHEAD", "3"), ("post (pre if norm_first)", "post"), ("relu or gelu", "relu"):
        assert vague in text
        spec.write_text(text)
        with pytest.raises(UsageError):
            load(path, spec=spec)
        text = text.replace(vague, definite)
    spec.write_text(text)
    assert load(path, spec=spec).spec.heads == 3


def test_of_several_encoders_the_first_is_proposed(tmp_path):
    state = made().encoder.state_dict()
    both = {f"{tower}.{name}": tensor for tower in ("text", "image") for name, tensor in state.items()}
    said = said_of(saved(tmp_path, both))[1]
    assert "holds the first of 2 nn.TransformerEncoder without" in said
    assert "prefix: text., " in said
    assert "ignore: [image.*]" in said


def test_a_decoder_is_no_encoder(tmp_path):
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 3, 10), 1)
    assert "of no known family" in said_of(saved(tmp_path, decoder.state_dict()))[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": None}, "the tensors do not tell everything: add heads: NUMBER"),
        (
            {"placement": None, "activation": None},
            "the tensors do not tell everything: add placement: pre, post or parallel; "
            "activation: relu, relu_squared, gelu, gelu_tanh, silu or tanh",
        ),
        ({"heads": 4}, "d_model: 6 is not divisible by heads: 4"),
        ({"d_ff": 12}, "d_ff: 12 is not what the tensors have: 10 (line 6)"),
        ({"layers": 3}, "layers: 3 is not what the tensors have: 2 (line 6)"),
        ({"prefix": None}, "no tensor is named for blocks.{i}.attn.o.weight; prefix: encoder. has layers"),
        ({"prefix": "en coder."}, "blocks.{i}.norm1: en coder.layers.{i}.norm1 is not a name in the file, with {i} "),
        ({"prefix": '"{i}."'}, "blocks.{i}.norm1: {i}.layers.{i}.norm1 is not a name in the file, with {i} where "),
        ({"prefix": "[a]"}, "prefix: input should be a valid string (line 2)"),
        ({"family": "nn.Transformer"}, "family: input should be 'nn.TransformerEncoder' (line 1)"),
        ({"final_norm": "true"}, "no tensor is named for final_norm.weight, final_norm.bias"),
        ({"bias": "false"}, "blocks.0.norm1.bias is no part of this architecture"),
        ({"norm": "rmsnorm"}, "blocks.0.norm1.bias is no part of this architecture"),
    ],
)
def test_a_fault_in_the_spec_file(tmp_path, fields, message):
    path = saved(tmp_path, made().state_dict())
    code, said = said_of(path, written(tmp_path, **fields))
    assert code == 2
    assert said.startswith(f"SPEC: {message}")


def test_a_tensor_that_is_missing_is_named(tmp_path):
    state = made().state_dict()
    del state["encoder.layers.1.linear2.weight"]
    said = "FILE: lacks encoder.layers.1.linear2.weight, which other layers have"
    assert said_of(saved(tmp_path, state), written(tmp_path)) == (3, said)


def test_a_layer_that_is_missing_is_named(tmp_path):
    state = {name: leaf for name, leaf in made(layers=3).state_dict().items() if ".1." not in name}
    said = "FILE: has tensors of layers 0 and 2, but none of layer 1"
    assert said_of(saved(tmp_path, state), written(tmp_path)) == (3, said)


def test_layers_of_other_widths_are_refused(tmp_path):
    state = made().state_dict()
    state["encoder.layers.1.linear1.bias"] = torch.ones(9)
    said = "FILE: encoder.layers.1.linear1.bias has shape (9,); its architecture asks for (10,)"
    assert said_of(saved(tmp_path, state), written(tmp_path)) == (3, said)
