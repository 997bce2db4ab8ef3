"""Specs: what a file may say, and what is said of a file that is wrong."""

from pathlib import Path

import pytest
import yaml

from hesscore.components.activation import ACTIVATIONS
from hesscore.curvature import Curvature
from hesscore.errors import UsageError
from hesscore.spec import Spec, read_spec
from hesscore.wiring.block import BLOCKS
from hesscore.wiring.model import inputs, model, parameters
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


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_a_spec_with_a_graph(path):
    spec = read_spec(path)
    assert spec.vocab is None
    weights, shapes = parameters(spec), reference.shapes(spec)
    assert {name: tuple(value.shape) for name, value in weights.items()} == shapes
    assert set(yaml.safe_load(path.read_text())) >= {"placement", "norm", "norm_eps", "causal", "activation"}


SIZES = {  # of one block, by the sizes of its published model
    "gpt2-small": 7_087_872,
    "bert-base": 7_087_872,
    "vit-small": 1_774_464,
    "llama-style": 3_540_096,
    "paper-block": 2_080,
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
    assert (spec.groups, spec.head_dim, spec.placement, spec.norm) == (4, 2, "pre", "layernorm")
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
    MINIMUM + "norm_eps: .nan": "norm_eps: input should be a finite number",
    MINIMUM + "norm_eps: .inf": "norm_eps: input should be a finite number",
    MINIMUM + "init_std: .inf": "init_std: input should be a finite number",
    MINIMUM + "rotary_base: .inf": "rotary_base: input should be a finite number",
    MINIMUM + "placement: before": "placement: input should be 'pre', 'post' or 'parallel'",
    MINIMUM + "activation: swish": "activation: input should be 'relu', ",
    MINIMUM + "norm: batchnorm": "norm: input should be 'layernorm' or 'rmsnorm'",
    MINIMUM + "positions: absolute": "positions: input should be 'none', 'learned' or 'rotary'",
    MINIMUM + "causal: perhaps": "causal: input should be a valid boolean",
    MINIMUM + "heads: 3": "d_model: 8 is not divisible by heads: 3",
    MINIMUM + "heads: 4\nkv_heads: 3": "heads: 4 is not divisible by kv_heads: 3",
    MINIMUM + "heads: 8\npositions: rotary": "positions: rotary needs an even head width, not 1",
    MINIMUM + "tied: true": "tied: True needs a vocab",
    MINIMUM + "positions: learned": "positions: learned needs a vocab",
    "- 1\n- 2": "a spec is a mapping of fields such as d_model, not list",
    "": "a spec is a mapping of fields such as d_model, not NoneType",
    "just words": "a spec is a mapping of fields such as d_model, not str",
    MINIMUM + "8: 8": "field names must be text",
    "d_model: [": "not valid YAML: ",
    b"\xff\xfe\x00": "cannot be read: ",
}


@pytest.mark.parametrize(("text", "message"), FAULTS.items())
def test_a_fault_names_its_field(fault, text, message):
    assert fault(text).startswith(message)


def test_all_faults_are_named_at_once(fault):
    assert fault("d_model: -8\nlayer: 2") == (
        "d_model: input should be greater than 0; d_ff: field required; unknown field layer, did you mean layers?"
    )


def test_code_in_a_file_is_not_run(fault, tmp_path):
    target = tmp_path / "made"
    assert "not valid YAML" in fault(f"d_model: !!python/object/apply:pathlib.Path.touch [{target}]")
    assert not target.exists()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.yaml: cannot be read: .*No such file"):
        read_spec(tmp_path / "nowhere.yaml")
