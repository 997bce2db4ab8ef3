"""The arrays of transformers: which loss they stand for, what padding is, and what is refused."""

from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from hesscore.chain import Point
from hesscore.curvature import Curvature
from hesscore.errors import InputError, UsageError
from hesscore.inputs.arrays import of_arrays, patches
from hesscore.inputs.data import cut
from hesscore.problem import split
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters
from tests.oracle import assert_same, made, saved

SIZES: dict[str, Any] = {"d_model": 8, "d_ff": 12, "heads": 2, "layers": 2, "seq_len": 8}
IDS = torch.tensor([[1, 4, 4, 0, 9, 10], [7, 2, 3, 12, 11, 5]])
HOLES = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])


def spec(loss=None, **fields):
    """A small model with a vocabulary, unless that is taken from it."""
    labels = 3 if loss in ("token", "sequence") else fields.pop("labels", 1) if loss == "regression" else None
    return Spec(**{**SIZES, "vocab": 13, "loss": loss, "labels": labels, **fields})


IMAGES = {"vocab": None, "causal": False, "image_size": 6, "patch_size": 2, "class_token": True, "positions": "learned"}
STACK = {"vocab": None}


def curvature(s, data):
    return Curvature(model(s), parameters(s, 1), split(s, data))


def logits(s, data):
    constants = inputs(s, data.data, data.target, data.keep, data.weights, data.segments)
    return Point(model(s), parameters(s, 1) | constants, watch={"head"}).watched["head"]


# --- what is scored ---


def test_the_labels_of_a_causal_model_are_shifted_to_where_they_are_predicted():
    labels = torch.tensor([[5, -100, 7, 8, -100, 2], [1, 2, 3, 4, 5, 6]])
    data = of_arrays(spec(), {"input_ids": IDS, "labels": labels})
    assert data.target.tolist() == [[-100, 7, 8, -100, 2, -100], [2, 3, 4, 5, 6, -100]]
    assert torch.equal(data.data, IDS)
    assert (data.keep, data.segments, data.weights, data.notes) == (None, None, None, ())


def test_a_causal_model_scores_its_own_tokens_by_default():
    assert of_arrays(spec(), {"input_ids": IDS}).target.tolist() == [[4, 4, 0, 9, 10, -100], [2, 3, 12, 11, 5, -100]]


def test_by_default_nothing_is_predicted_on_padding_or_from_it():
    data = of_arrays(spec(), {"input_ids": IDS, "attention_mask": HOLES})
    assert data.target.tolist() == [[-100, -100, 0, 9, 10, -100], [2, -100, -100, 11, -100, -100]]
    assert data.keep is not None
    assert torch.equal(data.keep, HOLES.bool())


def test_a_mask_of_ones_is_no_mask():
    assert of_arrays(spec(), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}).keep is None


@pytest.mark.parametrize("loss", ["masked_lm", "token"])
def test_other_labels_stay_where_they_are(loss):
    labels = torch.tensor([[-100, 2, -100, -100, 0, 1], [-100, -100, -100, -100, -100, -100]])
    data = of_arrays(spec(loss, causal=False), {"input_ids": IDS, "labels": labels})
    assert torch.equal(data.target, labels)
    assert data.scored == 3


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_a_sequence_has_one_class(shape):
    data = of_arrays(spec("sequence"), {"input_ids": IDS, "labels": torch.tensor([2, -100]).reshape(shape)})
    assert (data.target.tolist(), data.scored) == ([[2], [-100]], 1)


@pytest.mark.parametrize(("labels", "shape"), [(1, (2,)), (1, (2, 1)), (3, (2, 3))])
def test_a_sequence_has_numbers(labels, shape):
    numbers = torch.linspace(-1, 2, 2 * labels)
    data = of_arrays(spec("regression", labels=labels), {"input_ids": IDS, "labels": numbers.reshape(shape)})
    assert torch.equal(data.target, numbers.double().reshape(2, 1, labels))
    assert data.scored == 2


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_are_promoted(kind):
    x, y = torch.randn(2, 2, 5, 8).to(kind)
    data = of_arrays(spec(**STACK), {"inputs_embeds": x, "labels": y})
    assert (data.data.dtype, data.target.dtype) == (torch.float64, torch.float64)
    assert torch.equal(data.data, x.double()) and torch.equal(data.target, y.double())


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.int64, torch.bool, torch.float32])
def test_a_mask_has_any_type(kind):
    data = of_arrays(spec(), {"input_ids": IDS.int(), "attention_mask": HOLES.to(kind)})
    assert data.keep is not None
    assert torch.equal(data.keep, HOLES.bool())
    assert data.data.dtype == torch.int64


def test_segments_are_read():
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    s = spec("sequence", segments=2)
    data = of_arrays(s, {"input_ids": IDS, "token_type_ids": kinds, "labels": torch.tensor([0, 1])})
    assert data.segments is not None
    assert torch.equal(data.segments, kinds)


def test_patches_are_those_of_a_convolution():
    pixels, kernel = torch.randn(2, 3, 6, 6).double(), torch.randn(5, 3, 2, 2).double()
    expected = F.conv2d(pixels, kernel, stride=2).flatten(2).mT
    assert torch.allclose(patches(spec("hidden", **IMAGES), pixels) @ kernel.flatten(1).T, expected, atol=1e-14)


def test_the_target_of_a_stack_is_drawn_where_there_is_none():
    """From the seed, alike with padding and without; a note says so."""
    s = spec("hidden", causal=False)
    one, two, other = (of_arrays(s, {"input_ids": IDS[:1]}, seed) for seed in (3, 3, 4))
    assert torch.equal(one.target, two.target)
    assert not torch.equal(one.target, other.target)
    assert (one.target.shape, one.scored) == ((1, 6, 8), 6)
    assert one.notes == ("scored by the squared error to a target drawn from seed 3",)
    padded = of_arrays(s, {"input_ids": F.pad(IDS[:1], (2, 3)), "attention_mask": F.pad(torch.ones(1, 6), (2, 3))}, 3)
    assert torch.equal(padded.target[:, 2:8], one.target)
    assert padded.scored == 6


# --- the loss of transformers ---


def test_next_tokens_around_padding_as_transformers_has_them(tmp_path):
    """On the left and in the middle.  Its labels are ours by default."""
    config = GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2)
    oracle = made(GPT2LMHeadModel, config)
    labels = torch.tensor([[-100, -100, -100, 0, 9, 10], [-100, 2, -100, -100, 11, -100]])
    batch = {"input_ids": IDS, "attention_mask": HOLES}
    assert_same(oracle, saved(oracle, tmp_path), batch | {"labels": labels})
    default, given = of_arrays(spec(), batch), of_arrays(spec(), batch | {"labels": labels})
    assert torch.equal(default.target, given.target)


def test_the_last_token_is_the_right_most_one_that_is_no_padding_as_transformers_has_it(tmp_path):
    """Of which the right-most may stand before padding, behind it, or beside some in the middle."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    ids = torch.where(mask == 1, torch.arange(24).reshape(4, 6) % 12, 12)
    config = GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=2, n_head=2, num_labels=3, pad_token_id=12)
    oracle = made(GPT2ForSequenceClassification, config)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([2, 0, 1, 1])}
    assert_same(oracle, saved(oracle, tmp_path), batch)


@pytest.mark.parametrize("loss", ["masked_lm", "token", "sequence", "regression"])
def test_the_loss_is_the_mean_that_transformers_takes(loss):
    """Its line for each kind of head, on the outputs of ours."""
    s = spec(loss, causal=False, positions="learned")
    labels = {
        "masked_lm": torch.tensor([[-100, 2, -100, 12, 0, 1], [-100, -100, 7, -100, -100, -100]]),
        "token": torch.tensor([[-100, 2, -100, 1, 0, 1], [-100, -100, 1, -100, -100, -100]]),
        "sequence": torch.tensor([2, 0]),
        "regression": torch.tensor([0.5, -2]).double(),
    }[loss]
    data = of_arrays(s, {"input_ids": IDS, "labels": labels})
    found = logits(s, data)
    if loss == "regression":
        expected = F.mse_loss(found.squeeze(), labels)
    else:
        expected = F.cross_entropy(found.reshape(-1, found.shape[-1]), labels.flatten())
    assert float(curvature(s, data).loss) == pytest.approx(float(expected), rel=1e-14)


# --- padding ---

BIDIRECTIONAL: dict[str, Any] = {"causal": False, "placement": "post", "embed_norm": True, "segments": 2}
PADDED: dict[str, dict[str, Any]] = {
    "causal": {"positions": "learned"},
    "causal, rotary": {"positions": "rotary", "norm": "rmsnorm", "window": 3},
    "masked": {"loss": "masked_lm", "positions": "learned", **BIDIRECTIONAL},
    "masked, with an offset": {"loss": "masked_lm", "positions": "learned", "position_offset": 2, **BIDIRECTIONAL},
    "token": {"loss": "token", "positions": "learned", **BIDIRECTIONAL},
    "first": {"loss": "sequence", "pool": "first", "pooler": True, "positions": "learned", **BIDIRECTIONAL},
    "last": {"loss": "sequence", "pool": "last", "positions": "learned"},
    "mean": {"loss": "sequence", "pool": "mean", "positions": "learned", **BIDIRECTIONAL},
    "first, mean": {"loss": "regression", "pool": "first_mean", **BIDIRECTIONAL},
    "hidden": {"loss": "hidden", "positions": "learned", **BIDIRECTIONAL},
    "hidden, drawn": {"loss": "hidden"},
}
PADS = 40


def padded(arrays, offset, left=0):
    """``PADS`` more tokens on the right, or some of them on the left: whatever they are, none is seen."""
    found = {}
    for name, array in arrays.items():
        fill: Any = {"input_ids": 1 if offset else 9, "labels": -100, "attention_mask": 0, "token_type_ids": 1}[name]
        if array.ndim > 1:
            sides = (0, 0) * (array.ndim - 2) + (left, PADS - left)
            array = F.pad(array, sides, value=0.5 if array.is_floating_point() else fill)
        found[name] = array
    return found


def assert_nothing_changes(s, plain, more):
    """Neither the loss, nor the gradient, nor a product, by more than rounding."""
    one, two = (curvature(s, data) for data in (plain, more))
    assert float(two.loss) == pytest.approx(float(one.loss), rel=1e-13)
    tangent = parameters(s, 2)
    for a, b in (one.gradient, two.gradient), (one.hvp(tangent), two.hvp(tangent)):
        total = torch.cat([leaf.flatten() for leaf in a.values()]).norm()
        assert total > 1e-3
        for name, leaf in a.items():
            assert (leaf - b[name]).norm() <= 1e-13 * leaf.norm() + 1e-15 * total, name


def labelled(s):
    """Ids, none of which is the padding of ``position_offset``, and labels."""
    ids, rng = IDS.clamp(min=2), torch.Generator().manual_seed(5)
    arrays = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    if s.objective in ("masked_lm", "token"):
        arrays["labels"] = torch.tensor([[0, 2, -100, 1, 0, -100], [-100, 1, 1, 2, -100, -100]])
    elif s.objective == "sequence":
        arrays["labels"] = torch.tensor([2, 0])
    elif s.objective == "regression":
        arrays["labels"] = torch.tensor([0.5, -1.5])
    elif s.objective == "hidden" and s.segments:
        arrays["labels"] = torch.randn(2, 6, 8, generator=rng)
    if s.segments:
        arrays["token_type_ids"] = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    if s.position_offset:
        arrays["input_ids"] = ids.where(arrays["attention_mask"] == 1, 1)
    return arrays


@pytest.mark.parametrize("fields", PADDED.values(), ids=PADDED)
def test_forty_pads_change_nothing(fields):
    """The table of positions ends before the pads where these have no positions."""
    s = spec(**({"seq_len": 6 if "position_offset" in fields else 6 + PADS} | fields))
    arrays = labelled(s)
    assert_nothing_changes(s, of_arrays(s, arrays), of_arrays(s, padded(arrays, s.position_offset)))


@pytest.mark.parametrize("name", ["causal, rotary", "masked, with an offset", "mean", "hidden, drawn"])
def test_pads_on_the_left_change_nothing_where_positions_do_not_shift(name):
    length = 6 if "position_offset" in PADDED[name] else 6 + PADS
    s = spec(**({"seq_len": length} | PADDED[name] | ({"positions": "none"} if name == "mean" else {})))
    arrays = labelled(s)
    more = padded(arrays, s.position_offset, left=30)
    assert_nothing_changes(s, of_arrays(s, arrays), of_arrays(s, more))


def test_a_token_alone_is_what_it_is_among_others():
    """Each sequence padded beside a longer one weighs as much as without."""
    s = spec("token", causal=False)
    labels = torch.tensor([[0, 1, 2, 0, 1, 2], [2, 1, 0, -100, -100, -100]])
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    both = of_arrays(s, {"input_ids": IDS, "attention_mask": mask, "labels": labels})
    long = of_arrays(s, {"input_ids": IDS[:1], "labels": labels[:1]})
    short = of_arrays(s, {"input_ids": IDS[1:, :3], "labels": labels[1:, :3]})
    whole, first, second = (curvature(s, data) for data in (both, long, short))
    assert float(whole.loss) == pytest.approx((6 * float(first.loss) + 3 * float(second.loss)) / 9, rel=1e-14)
    for name, slope in whole.gradient.items():
        expected = (6 * first.gradient[name] + 3 * second.gradient[name]) / 9
        assert torch.allclose(slope, expected, rtol=1e-12, atol=1e-15)


# --- max_tokens ---


def test_the_first_labels_are_scored():
    labels = torch.tensor([[-100, 2, -100, 1, 0, 1], [1, -100, -100, -100, -100, 2]])
    data = of_arrays(spec("token"), {"input_ids": IDS, "labels": labels})
    some = cut(spec("token"), data, 5)
    assert some.target.tolist() == [[-100, 2, -100, 1, 0, 1], [1, -100, -100, -100, -100, -100]]
    assert (some.scored, some.notes) == (5, ("only the first 5 of 6 tokens are scored",))
    fewer = cut(spec("token"), data, 2)
    assert fewer.target.tolist() == [[-100, 2, -100, 1, -100, -100]]
    assert fewer.data.tolist() == IDS[:1].tolist()
    assert cut(spec("token"), data, 6).notes == cut(spec("token"), data, None).notes == ()


def test_sequences_of_which_nothing_is_scored_are_dropped():
    kinds = torch.zeros_like(IDS)
    arrays = {"input_ids": IDS, "labels": torch.tensor([-100, 1]), "attention_mask": HOLES, "token_type_ids": kinds}
    s = spec("sequence", segments=2)
    data = cut(s, of_arrays(s, arrays), None)
    assert (data.data.tolist(), data.target.tolist(), data.notes) == (IDS[1:].tolist(), [[1]], ())
    assert data.keep is not None and data.segments is not None
    assert (data.keep.tolist(), data.segments.shape) == (HOLES[1:].bool().tolist(), (1, 6))


@pytest.mark.parametrize("loss", ["sequence", "regression"])
def test_sequences_are_scored_whole_while_their_tokens_are_no_more_than_asked(loss):
    """Padding is no token."""
    s = spec(loss)
    labels = torch.tensor([0, 1, 2, 0]) if loss == "sequence" else torch.zeros(4)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    data = of_arrays(s, {"input_ids": IDS.repeat(2, 1), "attention_mask": mask, "labels": labels})
    for most, scored in (3, 1), (8, 1), (9, 2), (10, 2), (11, 3), (12, 4), (99, 4):
        some = cut(s, data, most)
        assert (len(some.data), some.scored) == (scored, scored)
        said = (f"only the first {scored} of 4 sequences are scored",) if scored < 4 else ()
        assert some.notes == said
    with pytest.raises(
        UsageError, match=r"^max_tokens is 2: a sequence is scored whole, and the first has 3 tokens, so"
    ):
        cut(s, data, 2)


def test_an_image_has_as_many_tokens_as_patches_and_one():
    s = spec("sequence", **IMAGES)
    data = of_arrays(s, {"pixel_values": torch.zeros(4, 3, 6, 6), "labels": torch.tensor([0, 1, 2, -100])})
    assert cut(s, data, None).scored == 3
    assert [cut(s, data, most).scored for most in (10, 19, 20, 30)] == [1, 1, 2, 3]
    with pytest.raises(UsageError, match="the first has 10 tokens"):
        cut(s, data, 9)


def test_the_squared_error_is_over_the_first_tokens_alone():
    """Those of their sequence that are not scored are seen all the same."""
    s = spec("hidden", **STACK, causal=False)
    x, y = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = of_arrays(s, {"inputs_embeds": x, "labels": y, "attention_mask": torch.tensor([[1] * 5 + [0], [1] * 6])})
    output = model(s).nodes[model(s).nodes[-1].sources[0]].name
    constants = inputs(s, data.data, data.target, data.keep)
    found = Point(model(s), parameters(s, 1) | constants, watch={output}).watched[output]
    errors = (found - y).square().mean(2)
    for most in 3, 5, 7:
        some = cut(s, data, most)
        expected = torch.cat([errors[0, :5], errors[1]])[:most].mean()
        assert float(curvature(s, some).loss) == pytest.approx(float(expected), rel=1e-14)
        assert (some.scored, some.notes) == (most, (f"only the first {most} of 11 tokens are scored",))
        assert len(some.data) == 1 + (most > 5)


# --- what is refused ---

CLASSES, NUMBERS = torch.tensor([0, 1]), torch.tensor([0.5, 1.5])
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"labels": IDS}, "no input_ids, which the model sees"),
    ({}, {"input_ids": IDS, "lables": IDS}, "lables is nothing that the model takes: did you mean labels?"),
    (
        {},
        {"input_ids": IDS, "position_ids": IDS},
        "position_ids is nothing that the model takes: it takes input_ids, labels, attention_mask",
    ),
    ({}, {"inputs_embeds": IDS}, "inputs_embeds is nothing that the model takes: did you mean input_ids?"),
    (
        {},
        {"input_ids": IDS, "token_type_ids": IDS},
        "token_type_ids is nothing that the model takes: it takes input_ids, labels, attention_mask",
    ),
    (
        {"loss": "hidden", **IMAGES},
        {"pixel_values": torch.zeros(1, 3, 6, 6), "attention_mask": IDS},
        "attention_mask is nothing that the model takes: it takes pixel_values, labels",
    ),
    ({}, {"input_ids": IDS.double()}, "input_ids holds float64 values: whole numbers are read"),
    ({}, {"input_ids": IDS > 1}, "input_ids holds bool values: whole numbers are read"),
    ({}, {"input_ids": IDS[0]}, "input_ids has shape (6,), not (B, L)"),
    ({}, {"input_ids": IDS[:0]}, "input_ids has shape (0, 6), not (B, L)"),
    ({}, {"input_ids": IDS[:, :1]}, "sequences of 1 token have no next one to score"),
    (
        {},
        {"input_ids": IDS.where(IDS != 11, 13)},
        "input_ids: 13 at row 1, position 4 is none of the 13 tokens of the vocabulary",
    ),
    (
        {},
        {"input_ids": IDS.where(IDS != 11, -1)},
        "input_ids: -1 at row 1, position 4 is none of the 13 tokens of the vocabulary",
    ),
    (
        {"positions": "learned", "seq_len": 5},
        {"input_ids": IDS},
        "input_ids: sequences of 6 tokens, but the model has 5 positions: cut them",
    ),
    (
        {"positions": "learned", "seq_len": 4, "position_offset": 2},
        {"input_ids": torch.tensor([[5, 5, 1, 5, 1, 1], [5, 5, 5, 5, 5, 1]])},
        "input_ids: sequences of 5 tokens, but the model has 4 positions: cut them",
    ),
    (
        {},
        {"input_ids": IDS, "attention_mask": HOLES[:, 1:]},
        "attention_mask has shape (2, 5), not (2, 6)",
    ),
    (
        {},
        {"input_ids": IDS, "attention_mask": 2 * HOLES},
        "attention_mask: 2 at row 0, position 2 is neither 1 nor, for padding, 0",
    ),
    (
        {},
        {"input_ids": IDS, "attention_mask": torch.full((2, 6), torch.nan)},
        "attention_mask: nan at row 0, position 0 is neither 1 nor, for padding, 0",
    ),
    (
        {},
        {"input_ids": IDS, "attention_mask": torch.tensor([[1] * 6, [0] * 6])},
        "attention_mask: row 1 is all padding: leave it out",
    ),
    (
        {"segments": 2},
        {"input_ids": IDS, "token_type_ids": IDS},
        "token_type_ids: 4 at row 0, position 1 is none of the 2 segments",
    ),
    ({}, {"input_ids": IDS, "labels": IDS[:1]}, "labels has shape (1, 6), not (2, 6)"),
    ({}, {"input_ids": IDS, "labels": IDS.float()}, "labels holds float32 values: whole numbers are read"),
    (
        {},
        {"input_ids": IDS, "labels": IDS.where(IDS != 12, 64)},
        "labels: 64 at row 1, position 3 is none of the 13 tokens of the vocabulary",
    ),
    (
        {},
        {"input_ids": IDS, "labels": IDS.where(IDS != 12, -1)},
        "labels: -1 at row 1, position 3 is none of the 13 tokens of the vocabulary",
    ),
    (
        {},
        {"input_ids": IDS, "labels": IDS, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])},
        "labels: 11 at row 1, position 4 is on padding, so it must be -100",
    ),
    (
        {},
        {"input_ids": IDS, "labels": IDS.where(HOLES == 1, -100), "attention_mask": HOLES},
        "labels: 4 at row 0, position 2 follows padding, so it must be -100",
    ),
    (
        {"loss": "token"},
        {"input_ids": IDS, "labels": torch.ones_like(IDS), "attention_mask": HOLES},
        "labels: 1 at row 0, position 0 is on padding, so it must be -100",
    ),
    ({}, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}, "nothing is scored: no labels but -100"),
    (
        {},
        {"input_ids": IDS, "labels": torch.tensor([[3] + [-100] * 5] * 2)},
        "nothing is scored: no labels but -100",
    ),
    ({"loss": "masked_lm"}, {"input_ids": IDS}, "no labels, which a loss of masked_lm needs"),
    ({"loss": "token"}, {"input_ids": IDS}, "no labels, which a loss of token needs"),
    ({"loss": "sequence"}, {"input_ids": IDS}, "no labels, which a loss of sequence needs"),
    (
        {"loss": "token"},
        {"input_ids": IDS, "labels": torch.tensor([[0, 1, 2, 3, 4, 5]] * 2)},
        "labels: 3 at row 0, position 3 is none of the 3 classes",
    ),
    (
        {"loss": "sequence"},
        {"input_ids": IDS, "labels": torch.tensor([0, 3])},
        "labels: 3 at row 1 is none of the 3 classes",
    ),
    (
        {"loss": "sequence"},
        {"input_ids": IDS, "labels": NUMBERS},
        "labels holds float32 values: whole numbers are read",
    ),
    ({"loss": "sequence"}, {"input_ids": IDS, "labels": IDS}, "labels has shape (2, 6), not (2,)"),
    ({"loss": "regression"}, {"input_ids": IDS, "labels": CLASSES}, "labels holds int64 values: floats are read"),
    ({"loss": "regression"}, {"input_ids": IDS, "labels": NUMBERS[:1]}, "labels has shape (1,), not (2,)"),
    (
        {"loss": "regression", "labels": 3},
        {"input_ids": IDS, "labels": NUMBERS},
        "labels has shape (2,), not (2, 3)",
    ),
    (
        {"loss": "regression"},
        {"input_ids": IDS, "labels": NUMBERS / 0},
        "labels: inf at row 0 is not finite",
    ),
    (
        {"loss": "hidden", **IMAGES},
        {"pixel_values": torch.zeros(2, 3, 8, 6)},
        "pixel_values has shape (2, 3, 8, 6), not (B, 3, 6, 6)",
    ),
    (
        {"loss": "hidden", **IMAGES},
        {"pixel_values": torch.zeros(2, 1, 6, 6)},
        "pixel_values has shape (2, 1, 6, 6), not (B, 3, 6, 6)",
    ),
    (
        {"loss": "hidden", **IMAGES},
        {"pixel_values": torch.zeros(2, 3, 6, 6).byte()},
        "pixel_values holds uint8 values: floats are read",
    ),
    (
        {"loss": "hidden", **IMAGES},
        {"pixel_values": torch.zeros(2, 3, 6, 6).index_put((torch.tensor(1),) * 4, torch.tensor(torch.nan))},
        "pixel_values: nan at row 1, channel 1, height 1, width 1 is not finite",
    ),
    ({**STACK}, {"inputs_embeds": torch.zeros(2, 5, 7)}, "inputs_embeds has shape (2, 5, 7), not (B, L, 8)"),
    (
        {**STACK},
        {"inputs_embeds": torch.zeros(2, 5, 8), "labels": torch.zeros(2, 5)},
        "labels has shape (2, 5), not (2, 5, 8)",
    ),
    (
        {**STACK},
        {"inputs_embeds": torch.zeros(2, 5, 8), "labels": torch.full((2, 5, 8), -torch.inf)},
        "labels: -inf at row 0, position 0, feature 0 is not finite",
    ),
]


@pytest.mark.parametrize(("fields", "arrays", "message"), WRONG, ids=[message[:60] for _, _, message in WRONG])
def test_what_transformers_would_not_score_is_refused(fields, arrays, message):
    with pytest.raises(InputError) as caught:
        of_arrays(spec(**fields), arrays)
    assert (str(caught.value), caught.value.code) == (message, 3)


def test_a_target_that_does_not_fit_in_memory_is_not_drawn(monkeypatch):
    left = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    with pytest.raises(InputError, match=r"^a target for 12 tokens would take .* are free: give fewer$"):
        of_arrays(spec("hidden"), {"input_ids": IDS})
