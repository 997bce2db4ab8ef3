"""A masked model without labels: a seeded share of its tokens is masked, and scored; special ones never are."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hesscore.errors import InputError
from hesscore.inputs import masking
from hesscore.inputs.masking import Special, masked, read_special
from hesscore.inputs.reading import read_data
from hesscore.spec import Spec

CLS, SEP, PAD, MASK = 1, 2, 0, 3
LINES = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "the", "[unused1]"]


def bert(vocab=50, length=10, **fields):
    return Spec(
        **{"d_model": 4, "d_ff": 4, "vocab": vocab, "seq_len": length, "causal": False, "loss": "masked_lm", **fields}
    )


@pytest.fixture
def folder(tmp_path):
    """Where a checkpoint lies whose mask token is 3."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "vocab.txt").write_text("\n".join(LINES))
    return place


def ids(count=200, seed=0):
    """Of text, none of them special."""
    return np.random.default_rng(seed).integers(4, 50, count)


def saved(folder, array, name="ids.npy"):
    np.save(folder / name, array)
    return folder / name


def test_a_share_of_the_tokens_is_masked_and_scored(tmp_path, folder):
    text = ids(250)
    data = read_data(saved(tmp_path, text), bert(length=50), seed=0, folder=folder)
    scored = data.target != -100
    assert data.scored == int(scored.sum()) == 38  # 15 % of 250 are 37.5
    assert data.notes == ("15 % of the tokens, 38 of 250, masked from seed 0",)
    assert (data.data[scored] == MASK).all()
    whole = torch.where(scored, data.target, data.data).flatten()
    assert whole.tolist() == text.tolist()
    assert not data.target.is_floating_point() and data.keep is None


def test_the_seed_chooses(tmp_path, folder):
    path = saved(tmp_path, ids())
    one, two, other = (read_data(path, bert(), seed=seed, folder=folder) for seed in (5, 5, 6))
    assert torch.equal(one.target, two.target)
    assert one.scored == other.scored and one.target.tolist() != other.target.tolist()


def test_each_token_is_as_likely_as_another():
    """Of 20, over 3000 seeds: 3 are masked each time, so each one 450 times, with a standard deviation of 20."""
    text, keep = torch.arange(4, 24)[None], torch.ones(1, 20, dtype=torch.bool)
    counts = sum((masked(text, keep, Special(MASK, (MASK,)), seed)[1] != -100).long() for seed in range(3000))
    assert isinstance(counts, torch.Tensor)
    assert int(counts.sum()) == 9000
    assert (counts - 450).abs().max() < 80


def test_special_tokens_and_padding_are_never_masked():
    text = torch.tensor([[CLS, 7, 8, 9, SEP, PAD], [CLS, 6, MASK, 9, 5, SEP]])
    keep = torch.tensor([[True] * 5 + [False], [True] * 6])
    keep[0, 3] = False
    special = Special(MASK, (PAD, CLS, SEP, MASK))
    chosen = torch.zeros_like(keep)
    for seed in range(200):
        seen, labels, note = masked(text, keep, special, seed)
        assert torch.equal(seen, torch.where(labels != -100, MASK, text))
        assert torch.equal(labels[labels != -100], text[labels != -100])
        assert note == f"15 % of the tokens, 1 of 5, masked from seed {seed}"
        chosen |= labels != -100
    assert chosen.tolist() == [[False, True, True, False, False, False], [False, True, False, True, True, False]]


def test_nothing_to_mask():
    text = torch.tensor([[CLS, SEP]])
    with pytest.raises(InputError, match=r"^nothing to mask: no token but special ones$"):
        masked(text, torch.ones_like(text).bool(), Special(MASK, (CLS, SEP)), 0)


def test_one_token_is_masked_at_least(tmp_path, folder):
    data = read_data(saved(tmp_path, ids(2)), bert(), folder=folder)
    assert (data.scored, data.notes) == (1, ("15 % of the tokens, 1 of 2, masked from seed 0",))


@pytest.mark.parametrize("shape", [(23,), (3, 23), (4, 10), (5, 4)])
def test_windows_hold_every_token_of_every_row_once(tmp_path, folder, shape):
    """The last window of a row is filled up with padding, which is not seen."""
    text = np.arange(4, 4 + np.prod(shape)).reshape(shape)
    data = read_data(saved(tmp_path, text), bert(200), folder=folder)
    seen = torch.ones_like(data.data, dtype=torch.bool) if data.keep is None else data.keep
    whole = torch.where(data.target != -100, data.target, data.data)
    windows = [row[kept].tolist() for row, kept in zip(whole, seen, strict=True)]
    rows = text.reshape(-1, shape[-1]).tolist()
    expected = [row[start : start + 10] for row in rows for start in range(0, len(row), 10)]
    scored = {min(window) for window in windows}
    assert windows == [window for window in expected if min(window) in scored]
    dropped = [window for window in expected if min(window) not in scored]
    assert sum(map(len, dropped)) + int(seen.sum()) == text.size
    assert (data.data[~seen] == 0).all()


def test_padding_has_no_position_where_there_is_an_offset(tmp_path, folder):
    """As of RoBERTa, whose token of padding is 1."""
    s = bert(positions="learned", position_offset=2)
    data = read_data(saved(tmp_path, np.arange(4, 29)), s, folder=folder)
    assert data.keep is not None and not data.keep.all()
    assert (data.data[~data.keep] == 1).all()


def test_as_much_is_read_as_holds_the_tokens_to_score(tmp_path, folder):
    """Whole windows, of which 15 % are masked all the same; what lies behind is not looked at."""
    text = np.concatenate([ids(60), [9999] * 1000])
    data = read_data(saved(tmp_path, text), bert(), max_tokens=9, seed=1, folder=folder)
    notes = "15 % of the tokens, 9 of 60, masked from seed 1", "only the first 60 of 1060 tokens are read"
    assert (data.scored, data.notes) == (9, notes)
    data = read_data(saved(tmp_path, text), bert(), max_tokens=7, seed=1, folder=folder)
    assert (data.scored, data.notes) == (
        7,
        (
            notes[0].replace("9 of 60", "8 of 50"),
            notes[1].replace("60", "50", 1),
            "only the first 7 of 8 tokens are scored",
        ),
    )
    rows = np.concatenate([ids(60).reshape(3, 20), np.full((7, 20), 9999)])
    data = read_data(saved(tmp_path, rows), bert(), max_tokens=4, seed=1, folder=folder)
    assert data.notes == (
        notes[0].replace("9 of 60", "6 of 40"),
        "only the first 40 of 200 tokens are read",
        "only the first 4 of 6 tokens are scored",
    )


# --- which token it is ---


def tokenizer(*tokens: Sequence[Any], **rest):
    """The part of a tokenizer.json that says which tokens are special."""
    added = [{"id": id, "content": content, "special": special} for id, content, special in tokens]
    return json.dumps({"version": "1.0", "added_tokens": added, "model": {"vocab": {}}, **rest})


@pytest.mark.parametrize("text", ["[MASK]", "<mask>"])
def test_the_mask_token_of_a_tokenizer(tmp_path, text):
    """Before that of a vocab.txt; it is special, said or not."""
    (tmp_path / "vocab.txt").write_text("[MASK]")
    (tmp_path / "tokenizer.json").write_text(tokenizer((7, text, False), (5, "<s>", True), (9, "hello", False)))
    special = read_special(tmp_path, 10)
    assert (special.mask, sorted(special.all)) == (7, [5, 7])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_mask_token_is_a_line_of_vocab_txt(tmp_path, end):
    (tmp_path / "vocab.txt").write_bytes(end.join(LINES).encode())
    special = read_special(tmp_path, 10)
    assert (special.mask, sorted(special.all)) == (3, [0, 1, 2, 3])


def test_odd_characters_in_vocab_txt_are_no_ends_of_lines(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"a\xe2\x80\xa8\n\x0c\n\xc2\x85\n\xff[MASK]\n[MASK]\n")
    assert read_special(tmp_path, 10).mask == 4


def test_without_a_tokenizer_labels_must_be_given(tmp_path, folder):
    path = saved(tmp_path, ids())
    by_hand = "give input_ids and labels in an .npz"
    for place, message in (
        (None, f"no tokenizer.json or vocab.txt, to tell the mask token: {by_hand}"),
        (tmp_path, f"no tokenizer.json or vocab.txt in {tmp_path}, to tell the mask token: {by_hand}"),
    ):
        with pytest.raises(InputError) as caught:
            read_data(path, bert(), folder=place)
        assert str(caught.value) == f"{path}: {message}"
    (folder / "vocab.txt").write_text("the\na")
    with pytest.raises(InputError) as caught:
        read_data(path, bert(), folder=folder)
    assert str(caught.value) == f"{path}: {folder}/vocab.txt: has no mask token, [MASK] or <mask>: {by_hand}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("words", "not sound: Invalid JSON: expected value at line 1 column 1"),
        ("[" * 10**6, "not sound: Invalid JSON: recursion limit exceeded at line 1 column "),
        ("{}", "not sound: added_tokens: Field required"),
        ("[]", "not sound: Input should be an object"),
        (tokenizer((-1, "[MASK]", True)), "not sound: added_tokens.0.id: Input should be greater than or equal to 0"),
        (tokenizer((1.5, "[MASK]", True)), "not sound: added_tokens.0.id: Input should be a valid integer, got a nu"),
        (tokenizer((3, 3, True)), "not sound: added_tokens.0.content: Input should be a valid string"),
        (tokenizer((3, "[mask]", True)), "has no mask token, [MASK] or <mask>: give input_ids and labels in an .npz"),
        (tokenizer((50, "[MASK]", True)), "its mask token 50 is beyond the vocabulary of 50: another model's?"),
        (tokenizer((10**30, "[MASK]", True)), "its mask token 1000000000000000000000000000000 is beyond the vocab"),
    ],
)
def test_tokenizers_that_are_not_sound(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_special(tmp_path, 50)
    assert str(caught.value).startswith(f"{path}: {message}") and "\n" not in str(caught.value)


def test_a_special_token_beyond_the_vocabulary_is_none_of_the_model(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer((3, "[MASK]", True), (10**30, "[X]", True)))
    assert read_special(tmp_path, 50).all == (3,)


def test_a_tokenizer_of_absurd_size_is_not_read(tmp_path, folder):
    with (folder / "vocab.txt").open("wb") as stream:
        stream.truncate(masking.LONGEST + 1)
    with pytest.raises(InputError, match=r"vocab.txt: 134217729 bytes are more than any tokenizer has$"):
        read_special(folder, 10)
