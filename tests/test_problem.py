"""From a spec or a checkpoint to a problem: its size is told before it is built, and what does not fit is refused."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hesscore import memory
from hesscore.component import Component
from hesscore.components.cross_entropy import CrossEntropy
from hesscore.curvature import Curvature
from hesscore.errors import InputError, UsageError
from hesscore.inputs.data import UNSCORED, Data
from hesscore.problem import open_problem, split
from hesscore.spec import Spec
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model, parameters
from hesscore.wiring.size import kept, parameter_count
from tests import reference

FOLDER = Path(__file__).parent.parent / "sample_runs/pydoc"
VAL, CHECKPOINT = FOLDER / "val.bin", FOLDER / "ckpt-end.pt"


@pytest.fixture
def spec_file(tmp_path):
    def write(name="spec.yaml", **fields):
        path = tmp_path / name
        path.write_text("\n".join(f"{k}: {v}" for k, v in {"d_model": 16, "d_ff": 32, "seq_len": 8, **fields}.items()))
        return path

    return write


@pytest.fixture
def free(monkeypatch):
    """Say how much memory is free."""

    def say(size):
        monkeypatch.setattr(memory, "free", lambda: size)

    return say


# --- what is told is what is taken ---

SPECS: dict[str, dict[str, Any]] = {
    "pre": {"heads": 2},
    "post": {"placement": "post", "norm_eps": 0.0, "causal": False, "bias": False},
    "parallel": {"placement": "parallel", "heads": 4, "tied": True, "vocab": 7, "layers": 3},
    "llama": {"norm": "rmsnorm", "positions": "rotary", "gated": True, "heads": 4, "kv_heads": 2, "bias": False},
    "gpt": {"vocab": 65, "positions": "learned", "layers": 2, "heads": 4, "d_ff": 64},
    "relu squared": {"activation": "relu_squared", "d_ff": 100, "vocab": 300, "batch": 3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS)
def test_sizes_are_told_from_the_spec_alone(fields, dtype):
    spec = Spec(**{"d_model": 16, "d_ff": 32, "layers": 4, "seq_len": 24, "batch": 2, **fields})
    weights = parameters(spec)
    assert parameter_count(spec) == sum(weight.numel() for weight in weights.values())
    _, data = reference.draw(spec, batch=spec.batch)
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    point = Curvature(model(spec), inputs(spec, **data) | cast).points[0]
    there = point.nbytes + data["data"].nbytes + data["target"].nbytes
    assert dtype.itemsize * spec.batch * kept(spec, spec.seq_len) == pytest.approx(there, rel=0.03)


def test_what_any_number_of_layers_takes_is_told_at_once():
    """Not by building them: that would never end."""
    spec = Spec(d_model=10**12, d_ff=10**12, layers=10**12, vocab=10**12, seq_len=10**12)
    assert parameter_count(spec) == pytest.approx(6e36, rel=1e-9)
    assert kept(spec, spec.seq_len) == pytest.approx(26e36, rel=1e-9)


# --- a spec that is too large ---

ABSURD: list[tuple[str, dict[str, Any]]] = [
    ("layers", {"layers": 10_000, "d_model": 1024}),
    ("d_model", {"d_model": 10**9}),
    ("d_model", {"d_model": 10**9, "heads": 10**9}),
    ("d_model", {"d_model": 10**12, "d_ff": 10**12}),
    ("d_ff", {"d_ff": 10**9}),
    ("vocab", {"vocab": 10**9}),
    ("batch", {"batch": 10**9}),
    ("seq_len", {"seq_len": 10**9}),
    ("seq_len", {"seq_len": 200_000}),
    ("seq_len", {"seq_len": 10**12, "vocab": 50, "positions": "learned"}),
]


@pytest.mark.parametrize(("field", "fields"), ABSURD)
def test_the_field_that_makes_a_spec_too_large_is_named_at_once(spec_file, free, field, fields, monkeypatch):
    """Before weights or data are drawn."""
    free(16 * 2**30)
    path = spec_file(**fields)
    for drawing in "randn", "randint", "full", "empty":
        monkeypatch.delattr(torch, drawing)
    with pytest.raises(UsageError) as caught:
        open_problem(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: {field}: {fields[field]} is too large: ")
    assert said.endswith(" GiB of memory; 16 are free")


def test_the_sizes_are_said(spec_file, free):
    free(2**30)
    with pytest.raises(UsageError, match=r"batch: 100000 is too large: 2,224 parameters and 800,000 tokens would take"):
        open_problem(spec_file(batch=100_000))


def test_no_stack_is_so_deep_that_its_graph_takes_minutes(spec_file):
    with pytest.raises(UsageError, match="layers: 10001 are more than 10000"):
        open_problem(spec_file(layers=10_001))


def test_a_thousand_layers_are_none_too_many(spec_file, monkeypatch):
    curvature = open_problem(spec_file(layers=1000, d_model=4, d_ff=4)).curvature()
    block = curvature.block("blocks.999.norm2.bias")
    visited = []

    def counted(jvp):
        def counting(*args):
            visited.append(args)
            return jvp(*args)

        return counting

    for cls in Component.registry.values():
        monkeypatch.setattr(cls, "jvp", counted(cls.jvp))
    block @ torch.ones(4, dtype=torch.float64)
    assert 0 < len(visited) < 10  # of the 20,000 maps in the model
    assert block.at_once * curvature.part <= 2**28


# --- data that are too many ---


@pytest.fixture
def many(tmp_path):
    """A token file of a million tokens."""
    path = tmp_path / "many.npy"
    np.save(path, np.resize(np.fromfile(VAL, "<u2"), 10**6))
    return path


def test_tokens_that_do_not_fit_are_refused_at_once_with_a_number_that_does(many, free, monkeypatch):
    free(2**30)
    with monkeypatch.context() as patch, pytest.raises(InputError) as caught:
        patch.delattr("hesscore.problem.split")  # so no part of the data is made before
        open_problem(CHECKPOINT, many, max_tokens=900_000)
    said, advice = str(caught.value).split(": --max-tokens ")
    assert said.startswith(f"{many}: 900000 tokens would take 1")
    assert said.endswith(" GiB of memory; 1 are free")
    most = int(advice.removesuffix(" fits"))
    problem = open_problem(CHECKPOINT, many, max_tokens=most)
    assert problem.scored == most > 1000
    problem.curvature()
    with pytest.raises(InputError, match=f"--max-tokens {most} fits"):
        open_problem(CHECKPOINT, many, max_tokens=most + 1)


def test_every_thread_has_a_part_of_its_own(monkeypatch):
    """Where the data are few: a part for all of them would leave the other threads idle."""
    for threads, parts in (1, [512]), (2, [256, 256]), (3, [256, 256]), (4, [128] * 4), (9, [128] * 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        problem = open_problem(CHECKPOINT, VAL, max_tokens=512)
        assert [batch.constants["tokens"].numel() for batch in problem.batches] == parts


def test_where_no_window_fits_no_number_is_given(free):
    free(2**22)
    for tokens in VAL, None:
        with pytest.raises(InputError, match=r"are free: not even 128 tokens fit$"):
            open_problem(CHECKPOINT, tokens)


def test_a_loss_that_is_another_one_the_second_time_is_refused(monkeypatch):
    problem, value, calls = open_problem(CHECKPOINT, VAL, max_tokens=512), CrossEntropy.value, count()

    def noisy(self, *args):
        loss, kept = value(self, *args)
        return loss * (1 + 1e-9 * next(calls)), kept

    problem.curvature()
    monkeypatch.setattr(CrossEntropy, "value", lambda self, *args: noisy(self, *args))
    with pytest.raises(InputError, match=r"the loss is .* and then .*: this machine is not deterministic"):
        problem.curvature()


# --- parts of the data ---


def test_the_shares_of_the_parts_are_exact():
    """Three windows of 3, 2 and 1 scored tokens: in float32 their shares would not add up to one."""
    spec = Spec(d_model=4, d_ff=4, vocab=400, seq_len=512)
    target = torch.full((3, 512), UNSCORED)
    for row, some in enumerate((3, 2, 1)):
        target[row, :some] = 7
    batches = split(spec, Data(torch.zeros(3, 512, dtype=torch.int64), target))
    assert [batch.share for batch in batches] == [3 / 6, 2 / 6, 1 / 6]


def test_parts_share_what_is_the_same_for_all():
    spec = Spec(d_model=4, d_ff=4, vocab=400, seq_len=512, positions="rotary")
    data = torch.arange(3 * 512).view(3, 512) % 400
    batches = split(spec, Data(data, data.roll(-1, 1)))
    assert len(batches) == 3
    for name in "mask", "rotary.cos", "rotary.sin":
        assert all(batch.constants[name] is batches[0].constants[name] for batch in batches)
    for name, whole in inputs(spec, data, data.roll(-1, 1)).items():
        if name in ("tokens", "targets", "weights"):
            assert torch.equal(torch.cat([batch.constants[name] for batch in batches]), whole)


# --- what is asked for ---


@pytest.mark.parametrize("name", ["spec.yaml", "spec.yml", "spec.YAML", "spec.Yml"])
def test_a_spec_is_known_by_its_suffix(spec_file, name):
    assert open_problem(spec_file(name)).spec.d_model == 16


def test_a_file_has_a_name():
    with pytest.raises(UsageError, match=r"^SOURCE is empty: name a file$"):
        open_problem("")
    with pytest.raises(UsageError, match=r"^--data is empty: name a file$"):
        open_problem(CHECKPOINT, "")


def test_where_the_data_came_from_is_kept(spec_file):
    assert open_problem(CHECKPOINT, VAL).provenance["max_tokens"] == 4096
    assert open_problem(CHECKPOINT, VAL, max_tokens=100).provenance["max_tokens"] == 100
    assert open_problem(CHECKPOINT).provenance["max_tokens"] is None
    assert open_problem(spec_file()).provenance["max_tokens"] is None


def test_memory_is_said_in_whole_words(free):
    free(3 * 2**30)
    assert memory.excess(3 * 2**30) is None
    assert memory.excess(10**30) == "would take 9.31e+20 GiB of memory; 3 are free"
