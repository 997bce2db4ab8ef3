"""Names of tensors, given by somebody: whatever the layout of a file, the leaves come out as they went in."""

import random

import pytest
import torch
import yaml

from hesscore.checkpoints import load
from hesscore.checkpoints.patterns import LEAVES, merges
from hesscore.verify.models import grid
from hesscore.wiring.model import model
from tests.described import NAMES, SPEC, drawn, fault, loaded, state_of

SPECS = grid()

SAID = (
    "heads kv_heads head_dim placement norm norm_eps causal window window_from activation positions position_offset "  # noqa: SIM905
    "rotary_base rotary_dim rotary_scale image_size patch_size loss pool pooled_norm batch".split()
)
"""Fields that neither names nor shapes tell."""

TABLES = ("embed.token", "embed.segment", "embed.position", "embed.class", "head.weight")


# --- every option of a spec, in layouts at random ---


def stored(spec, weights, rng):
    """The names and the tensors of a file, each laid in one of the ways that can be said."""
    sets = spec.weight_sets or spec.layers
    names, state = {}, {}

    def put(ours, theirs, tensor, words=()):
        """One tensor, or one for each block; ``tensor`` gives it in our layout, by the start of the block's names."""
        kind = ours.rpartition(".")[2]
        turn = rng.random() < 0.5
        apart = rng.random() < 0.5
        for number in range(sets if "{i}" in ours else 1):
            whole = tensor(f"blocks.{number * spec.layers // sets}.")
            if whole.ndim == 2 and turn == ours.startswith(TABLES):
                whole = whole.T
            if apart and ours.startswith("embed.patch.weight"):
                whole = whole.unflatten(0 if turn else 1, (spec.channels, spec.patch_size, spec.patch_size))
            elif apart:
                whole = whole[None]
            state[f"{theirs}.{kind}".replace("{i}", str(number + 3))] = whole.contiguous()
        names[ours] = " ".join([f"{theirs}.{kind}", *words, *(["transposed"] if turn else [])])

    rest = dict.fromkeys(leaf for leaf in LEAVES if leaf.replace("{i}", "0") in weights)
    way = rng.choice(["side by side", "interleaved", "k and v", "apart"])
    for kind in ("weight", "bias"):
        parts = ("k", "v") if way == "k and v" else ("v", "q", "k")
        if way != "apart" and f"blocks.{{i}}.attn.q.{kind}" in rest:
            for part in parts:
                del rest[f"blocks.{{i}}.attn.{part}.{kind}"]
            pieces = spec.groups if way == "interleaved" else 1

            def fused(start, parts=parts, kind=kind, pieces=pieces):
                own = [weights[f"{start}attn.{part}.{kind}"].chunk(pieces, -1) for part in parts]
                return torch.cat([part[piece] for piece in range(pieces) for part in own], -1)

            words = ["interleaved"] if way == "interleaved" else []
            put(f"blocks.{{i}}.attn.{'+'.join(parts)}.{kind}", "net.{i}.fused", fused, words)
    for leaf in rest:
        theirs = leaf.rpartition(".")[0].replace("blocks.{i}", "net.{i}")
        put(leaf, theirs, lambda start, leaf=leaf: weights[leaf.replace("blocks.{i}.", start)])
    return names, state


def meaning(spec):
    """The fields that say what is computed, whether given or not."""
    shifts = [leaf for leaf in model(spec).parameters if leaf.endswith(".bias") and leaf != "head.bias"]
    return spec.model_dump() | {
        "weight_sets": spec.weight_sets or spec.layers,
        "kv_heads": spec.groups,
        "head_dim": spec.head_width,
        "bias": any(".attn." not in leaf and ".mlp." not in leaf for leaf in shifts),
        "qkv_bias": spec.biased("attn.q"),
        "out_bias": spec.biased("attn.o"),
        "mlp_bias": spec.biased("mlp.up") and spec.d_ff > 0,
        "embed_norm": spec.embed_norm and spec.norm != "none",
        "loss": spec.objective,
        "final_norm": spec.ends_normed,
        "seq_len": spec.length,
        "init_std": None,
    }


@pytest.mark.parametrize(("number", "spec"), list(enumerate(SPECS.values())), ids=list(SPECS))
def test_every_option_in_every_layout(tmp_path, number, spec):
    rng = random.Random(number)
    weights = drawn(spec)
    names, state = stored(spec, weights, rng)
    fields = {field: getattr(spec, field) for field in SAID if getattr(spec, field) is not None}
    fields |= {"layers": spec.layers, "weight_sets": spec.weight_sets} if spec.weight_sets else {}
    fields |= {} if spec.positions == "learned" else {"seq_len": spec.seq_len}
    fields |= {"loss": spec.objective, "names": names}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(fields))
    torch.save(state, tmp_path / "model.pt")
    found = load(tmp_path / "model.pt", spec=tmp_path / "spec.yaml")
    assert meaning(found.spec) == meaning(spec)
    assert found.parameters.keys() == weights.keys()
    for name, leaf in weights.items():
        assert torch.equal(found.parameters[name], leaf), name


# --- one file, in many ways ---


def test_what_the_others_are_like(tmp_path):
    found = loaded(tmp_path)
    assert found.family == "spec.yaml"
    assert meaning(found.spec) == meaning(SPEC)
    assert found.tensors["blocks.1.attn.k.bias"] == "net.1.qkv.bias[4:8]"
    assert found.left_out == {}
    for name, leaf in drawn(SPEC).items():
        assert torch.equal(found.parameters[name], leaf)


def test_sizes_may_be_given_and_must_agree(tmp_path):
    sizes = {"d_model": 4, "d_ff": 6, "layers": 2, "vocab": 5, "bias": True}
    assert loaded(tmp_path, **sizes).spec == loaded(tmp_path).spec
    for field in "d_model", "d_ff", "layers", "vocab":
        said = f"SPEC: {field}: {sizes[field] + 1} is not what the tensors have: {sizes[field]} (line 9)"
        assert fault(tmp_path, **{field: sizes[field] + 1}) == (2, said)


def test_a_head_that_is_the_table_is_tied(tmp_path):
    state = state_of()
    state["out"] = state["table.weight"].clone()
    found = loaded(tmp_path, state)
    assert found.spec.tied
    assert found.left_out == {"out": "tied: it is table.weight"}
    assert not loaded(tmp_path, state, tied=False).spec.tied
    assert loaded(tmp_path, state | {"out": state["table.weight"]}).spec.tied  # one tensor by two names
    del state["out"]
    assert loaded(tmp_path, state, {"head.weight": None}).spec.tied
    said = "SPEC: head.weight is no part of this architecture (line 19)"
    assert fault(tmp_path, tied=True) == (2, said)


def test_the_loss_is_the_heads_or_none(tmp_path):
    found = loaded(tmp_path, asked="hidden")
    assert (found.spec.objective, found.spec.outputs) == ("hidden", None)
    assert found.left_out == {"out": "of a head, which is not scored"}
    assert loaded(tmp_path, loss="hidden").spec == found.spec
    state = state_of()
    del state["out"]
    bare = loaded(tmp_path, state, {"head.weight": None}, loss=None)
    assert (bare.spec, bare.left_out) == (found.spec, {})
    assert (
        loaded(tmp_path, asked="causal_lm").spec
        == loaded(tmp_path).spec
        == loaded(tmp_path, asked="causal_lm", loss=None).spec
    )
    assert loaded(tmp_path, asked="token", loss=None).spec.labels == 5
    said = "SPEC: loss: causal_lm is what the head is scored by; --loss can be that or hidden, not token (line 8)"
    assert fault(tmp_path, asked="token") == (2, said)
    assert loaded(tmp_path, asked="hidden", loss="sequence", pool="mean", labels=5).spec == found.spec


def test_layers_may_be_named_one_by_one(tmp_path):
    """As where one of them has names of its own."""
    state = {name.replace("net.1.out", "last"): tensor for name, tensor in state_of().items()}
    found = loaded(
        tmp_path, state, {"blocks.{i}.attn.o": None, "blocks.0.attn.o": "net.0.out", "blocks.1.attn.o": "last"}
    )
    assert found.parameters.keys() == drawn(SPEC).keys()
    assert torch.equal(found.parameters["blocks.1.attn.o.weight"], drawn(SPEC)["blocks.1.attn.o.weight"])


def test_one_set_of_weights_for_all_layers(tmp_path):
    state = {
        name.replace("net.0.", "net."): leaf for name, leaf in state_of(SPEC.model_copy(update={"layers": 1})).items()
    }
    items = NAMES.items()
    names = dict.fromkeys(NAMES) | {ours.replace("{i}", "0"): theirs.replace(".{i}", "") for ours, theirs in items}
    spec = loaded(tmp_path, state, names, layers=3, weight_sets=1).spec
    assert (spec.layers, spec.weight_sets) == (3, 1)


def test_wrappers_may_be_given_or_not(tmp_path):
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in state_of().items()}
    found = loaded(tmp_path, wrapped)
    assert found.tensors["head.weight"] == "module._orig_mod.out"
    given = loaded(tmp_path, wrapped, {ours: f"module.{theirs}" for ours, theirs in NAMES.items()})
    assert given.tensors == found.tensors


def test_a_description_goes_before_what_is_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    assert loaded(tmp_path).family == "spec.yaml"


def test_half_precision_is_noted(tmp_path):
    assert loaded(tmp_path, {name: leaf.half() for name, leaf in state_of().items()}).notes == [
        "weights stored in float16"
    ]


def test_axes_that_lie_beside_each_other_may_be_apart():
    assert merges((384, 3, 16, 16), (384, 768))
    assert merges((1, 197, 384), (197, 384))
    assert merges((12, 64, 768), (768, 768))
    assert merges((4,), (1, 4))
    assert not merges((12, 768, 64), (768, 768))
    assert not merges((768, 384), (384, 768))
    assert not merges((16, 16, 3, 384), (384, 768))
