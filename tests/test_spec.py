"""Specs: what a file may say, and what is said of a file that is wrong."""

import os
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from hesscore.components.activation import ACTIVATIONS
from hesscore.curvature import Curvature
from hesscore.errors import InputError, UsageError
from hesscore.spec import Spec, read_spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters
from tests import reference

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture
def fault(tmp_path):
    """The message for a file with this text, less the path that it starts with; the code is that of usage."""

    def read(text):
        path = tmp_path / "spec.yaml"
        path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
        with pytest.raises(UsageError) as caught:
            read_spec(path)
        assert caught.value.code == 2
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(f"{path}: ")
        return message.removeprefix(f"{path}: ")

    return read


# --- the files in configs ---


@pytest.mark.parametrize("path", sorted((CONFIGS / "blocks").iterdir()), ids=lambda path: path.stem)
def test_every_config_is_a_spec_with_a_graph(path):
    spec = read_spec(path)
    assert spec.vocab is None
    weights, shapes = parameters(spec), reference.shapes(spec)
    assert {name: tuple(value.shape) for name, value in weights.items()} == shapes
    said = {"norm", "causal"} | ({"placement", "norm_eps"} if spec.norm != "none" else set())
    assert set(yaml.safe_load(path.read_text())) >= said | ({"activation"} if spec.d_ff else set())


SIZES = {  # of one block, by the sizes of its published model
    "gpt2-small": 7_087_872,
    "bert-base": 7_087_872,
    "vit-small": 1_774_464,
    "llama-style": 3_540_096,
    "paper-block": 2_080,
    "attention": 256,
}


def test_the_blocks_have_the_sizes_of_their_models():
    found = {path.stem: parameters(read_spec(path)).values() for path in (CONFIGS / "blocks").iterdir()}
    assert {name: sum(weight.numel() for weight in weights) for name, weights in found.items()} == SIZES


def test_the_paper_block_has_a_whole_hessian_that_is_symmetric():
    spec = read_spec(CONFIGS / "blocks/paper-block.yaml")
    weights, data = reference.draw(spec, batch=1)
    curvature = Curvature(model(spec), inputs(spec, **data) | weights)
    hessian = curvature.dense()
    assert hessian.shape == (2_080, 2_080)
    assert (hessian - hessian.T).norm() < 1e-14 * hessian.norm()


# --- what a spec says by itself ---


def test_defaults():
    spec = Spec(d_model=8, d_ff=16, heads=4)
    assert (spec.groups, spec.head_width, spec.placement, spec.norm) == (4, 2, "pre", "layernorm")
    assert Spec(d_model=8, d_ff=16, heads=4, kv_heads=2).groups == 2


def test_every_wiring_and_activation_can_be_named():
    for placement in BLOCKS:
        assert Spec.model_validate({"d_model": 4, "d_ff": 4, "placement": placement})
    for activation in ACTIVATIONS:
        assert Spec.model_validate({"d_model": 4, "d_ff": 4, "activation": activation})


# --- what is wrong with a file ---

MINIMUM = "d_model: 8\nd_ff: 16\n"

FAULTS = {
    "d_model: 8": "d_ff: field required",
    MINIMUM + "layer: 2": "unknown field layer, did you mean layers?",
    MINIMUM + "head: 2": "unknown field head, did you mean heads?",
    MINIMUM + "colour: red": "unknown field colour",
    MINIMUM + "d_modle: 8": "unknown field d_modle, did you mean d_model?",
    MINIMUM + "layers: 0": "layers: input should be greater than 0",
    MINIMUM + "layers: 1.5": "layers: input should be a valid integer",
    MINIMUM + "heads: many": "heads: input should be a valid integer",
    MINIMUM + "norm_eps: -1": "norm_eps: input should be greater than or equal to 0",
    MINIMUM + "norm_eps: .nan": "norm_eps: input should be a valid number",
    MINIMUM + "norm_eps: 1e999": "norm_eps: input should be a finite number",
    MINIMUM + "init_std: 1e999": "init_std: input should be a finite number",
    MINIMUM + "rotary_base: -.inf": "rotary_base: input should be a valid number",
    # numbers that are something else at a second look
    MINIMUM + "layers: true": "layers: input should be a valid integer",
    MINIMUM + "layers: '2'": "layers: input should be a valid integer",
    MINIMUM + "layers: 010": "layers: input should be a valid integer",
    MINIMUM + "layers: 0x10": "layers: input should be a valid integer",
    MINIMUM + "layers: 0b1": "layers: input should be a valid integer",
    MINIMUM + "layers: 1_0": "layers: input should be a valid integer",
    MINIMUM + "layers: 1:30": "layers: input should be a valid integer",
    MINIMUM + "layers: 2.0": "layers: input should be a valid integer",
    MINIMUM + "layers: 1e1": "layers: input should be a valid integer",
    MINIMUM + "norm_eps: true": "norm_eps: input should be a valid number",
    MINIMUM + "norm_eps: '1'": "norm_eps: input should be a valid number",
    MINIMUM + "norm_eps: 010": "norm_eps: input should be a valid number",
    MINIMUM + "rotary_base: 1:30": "rotary_base: input should be a valid number",
    MINIMUM + "causal: 1": "causal: input should be a valid boolean",
    MINIMUM + "causal: 'true'": "causal: input should be a valid boolean",
    MINIMUM + "causal:": "causal: input should be a valid boolean",
    MINIMUM + "layers: !!int '2'": "layers: line 3 is not one short value without a tag",
    # sizes that no machine has
    MINIMUM + f"layers: {10**28}": "layers: input should be less than or equal to 1000000000000",
    MINIMUM + "layers: " + "9" * 5000: "layers: line 3 is not one short value without a tag",
    # keys
    MINIMUM + "layers: 2\nd_ff: 8": "d_ff: given again in line 4",
    MINIMUM + "'d_model': 8": "d_model: given again in line 3",
    MINIMUM + "k" * 50_000 + ": 1": "not valid YAML",
    "{d_model: 8, " + "k" * 1000 + ": 1}": "d_ff: field required; unknown field " + "k" * 80 + "...",
    MINIMUM + '"a\\nb": 1': r"unknown field 'a\nb'",
    MINIMUM + "? [1]\n: 1": "line 3: a field has a name such as d_model",
    # what a spec has no use for
    MINIMUM + "layers: [2]": "layers: input should be a valid integer (line 3)",
    MINIMUM + "layers: {a: 2}": "layers: input should be a valid integer (line 3)",
    "d_model: &size 8\nd_ff: *size": "d_ff: line 2 is not one short value without a tag",
    "d_model: 8\nd_ff: 8\n---\nd_ff: 16": "a file holds one spec, without ---",
    MINIMUM + 'norm: "\\UFFFFFFFF"': "not valid YAML: Python int too large",
    MINIMUM + 'norm: "\\U00FFFFFF"': "not valid YAML: chr() arg not in range",
    "d_model: 8\0": "not valid YAML: unacceptable character",
    MINIMUM + "placement: before": "placement: input should be 'pre', 'post' or 'parallel'",
    MINIMUM + "activation: swish": "activation: input should be 'relu', ",
    MINIMUM + "norm: batchnorm": "norm: input should be 'layernorm', 'rmsnorm' or 'none'",
    MINIMUM + "positions: absolute": "positions: input should be 'none', 'learned' or 'rotary'",
    MINIMUM + "causal: perhaps": "causal: input should be a valid boolean",
    MINIMUM + "heads: 3": "d_model: 8 is not divisible by heads: 3",
    MINIMUM + "heads: 4\nkv_heads: 3": "heads: 4 is not divisible by kv_heads: 3",
    MINIMUM + "heads: 8\npositions: rotary": "positions: rotary needs an even head width, not 1",
    MINIMUM + "tied: true": "tied: True needs a vocab",
    MINIMUM + "positions: learned": "positions: learned needs a vocab",
    "- 1\n- 2": "a spec is a mapping of fields, such as d_model: 768",
    "# nothing": "a spec is a mapping of fields, such as d_model: 768",
    "just words": "a spec is a mapping of fields, such as d_model: 768",
    MINIMUM + "8: 8": "unknown field 8",
    MINIMUM + "<<: 8": "unknown field <<",
    "d_model: 8: 8": "not valid YAML: mapping values are not allowed here",
}


@pytest.mark.parametrize(("text", "message"), FAULTS.items())
def test_a_fault_names_its_field(fault, text, message):
    assert fault(text).startswith(message)


def test_all_faults_are_named_at_once(fault):
    assert fault("d_model: -8\nlayer: 2") == (
        "d_model: input should be greater than 0 (line 1); d_ff: field required; "
        "unknown field layer, did you mean layers? (line 2)"
    )


def test_code_in_a_file_is_not_run(fault, tmp_path):
    target = tmp_path / "made"
    assert "line 1" in fault(f"d_model: !!python/object/apply:pathlib.Path.touch [{target}]")
    assert not target.exists()


def test_many_faults_are_counted(fault):
    message = fault("\n".join(f"q{i}: 1" for i in range(2000)))
    assert message.startswith("d_model: field required; d_ff: field required; unknown field q0 (line 1); ")
    assert message.endswith("; and 1998 more")


@pytest.mark.parametrize(
    "text", ["d_model: " + "[" * 60_000, "- " * 30_000, "[" * 100_000, "{a: " * 15_000, "a" * 10**7]
)
def test_what_is_deep_or_long_is_refused_in_few_words(fault, text):
    assert len(fault(text)) < 200


def test_aliases_do_not_multiply(fault):
    bomb = "a0: &a0 [0, 0]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 30))
    assert fault(MINIMUM + bomb) == "a1.0: line 4 is not one short value without a tag"


def test_numbers_are_decimal_and_may_have_an_exponent(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(MINIMUM + "norm_eps: 1e-5\ninit_std: +.5\nrotary_base: 500000\ncausal: no\nvocab: ~\n")
    spec = read_spec(path)
    assert (spec.norm_eps, spec.init_std, spec.rotary_base, spec.causal, spec.vocab) == (1e-5, 0.5, 5e5, False, None)


def test_a_library_user_is_not_guessed_at_either():
    for field, value in ("d_model", 8.0), ("d_model", True), ("norm_eps", "1"), ("bias", 1):
        with pytest.raises(ValidationError, match=f"(?s)1 validation error.*{field}"):
            Spec.model_validate({"d_model": 8, "d_ff": 8, field: value})


# --- what cannot be read has the code of input, as a checkpoint has ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.touch(), "empty"),
        (lambda path: path.mkdir(), "a folder with nothing in it"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"d_model: \xff"), "not UTF-8 text: byte 9 is 0xff"),
    ],
    ids=["missing", "empty", "folder", "pipe", "device", "loop", "bytes"],
)
def test_what_cannot_be_read_is_a_fault_of_the_input(tmp_path, make, message):
    path = tmp_path / "spec.yaml"
    make(path)
    with pytest.raises(InputError) as caught:
        read_spec(path)
    assert str(caught.value) == f"{path}: {message}"
    assert caught.value.code == 3
