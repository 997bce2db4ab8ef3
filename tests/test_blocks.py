"""Every block on its own: against the dense Hessian by double backward of a plain PyTorch block, at its real input."""

import re
import weakref
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hesscore import blocks, capacity, memory
from hesscore.analysis import select
from hesscore.blocks import BlockRow, analyze, by_layer, check, count, is_small_block, open_blocks
from hesscore.errors import InputError, UsageError
from hesscore.explicit.block import block_hessian
from hesscore.explicit.size import kept
from hesscore.heatmap import draw
from hesscore.inputs.reading import read_data
from hesscore.report import BlockReport
from tests import reference, reference_nanogpt
from tests.command import CHECKPOINT, ROOT, VAL, strict
from tests.test_hessian import flat, twice, unflat

ARGS = {"n_layer": 3, "n_head": 2, "n_embd": 8, "block_size": 6, "vocab_size": 11, "bias": True}
SPECS = {
    "pre": "",
    "post": "placement: post\nactivation: relu\n",
    "parallel": "placement: parallel\nnorm: rmsnorm\nheads: 2\nkv_heads: 1\n",
    "rotary": "positions: rotary\nbias: false\ncausal: false\n",
}


def opened(tmp_path, text, seed=0):
    path = tmp_path / "spec.yaml"
    path.write_text(f"d_model: 4\nd_ff: 6\nseq_len: 3\nbatch: 2\n{text}")
    return open_blocks(path, seed=seed)


def rows_of(opened_, layer=0, target="input", **changed):
    names = by_layer(select(opened_))[layer]
    curvature = opened_.block(layer, target)
    return list(analyze(curvature, opened_.spec, layer, names, **changed)), names


def twice_block(spec, weights, x, target, scored=None):
    """The dense Hessian of a plain block's mean squared error, and the gradient-free output it starts from."""
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    scored = keep if scored is None else scored

    def loss(flat_weights):
        out = reference.output(spec, unflat(flat_weights, weights), x, keep)
        return mse_loss(out[scored], target[scored])

    return twice(loss, flat(weights.values()))[1]


def definitions(matrix, symmetric):
    """All that a row says, by numpy, from the words of the documentation."""
    matrix = matrix.numpy()
    values = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.svd(matrix, compute_uv=False)
    sizes = np.abs(values)
    share = sizes[sizes > 1e-11 * sizes.max()] / sizes.sum()
    return {
        "frobenius": np.sqrt((matrix**2).sum()),
        "spectral_norm": sizes.max(),
        "condition": share.max() / share.min(),
        "spectral_entropy": -(share * np.log(share)).sum(),
        "trace": matrix.trace() if symmetric else None,
        "lambda_max": values.max() if symmetric else None,
        "lambda_min": values.min() if symmetric else None,
        "negative_mass": sizes[values < 0].sum() / sizes.sum() if symmetric else None,
    }


@pytest.mark.parametrize("target", ["input", "zero"])
@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
def test_every_number_is_that_of_the_dense_hessian_by_double_backward(tmp_path, text, target):
    p = opened(tmp_path, text)
    found, names = rows_of(p, target=target)
    weights = {name: p.parameters[name] for name in names}
    x = torch.cat([batch.constants["input"] for batch in p.batches])
    dense = twice_block(p.spec, weights, x, x if target == "input" else torch.zeros_like(x))
    at, start = {"block": slice(None)}, 0
    for name, weight in weights.items():
        at[name.removeprefix("blocks.0.")] = slice(start, start + weight.numel())
        start += weight.numel()
    full = [row for row in found if row.part == "full"]
    assert len(full) == len(names) * (len(names) + 1) // 2 + 1 == count(names) / 3
    told, rounding = 0, 1e-15 * float(dense.norm())  # of double backward, which sums what cancels in a small pair
    for row in full:
        assert row.exact
        assert row.converged
        matrix, symmetric = dense[at[row.row], at[row.column]], row.row == row.column
        assert (row.n_rows, row.n_columns) == matrix.shape
        if row.note:
            assert row.note == "no curvature beyond rounding"
            assert ".k.bias" in row.row + row.column or matrix.norm() < 1e-13 * dense.norm()
            assert row.condition is row.spectral_entropy is row.negative_mass is None
            assert float(matrix.norm()) < 1e-13 * float(dense.norm())
            continue
        wanted = definitions(matrix, symmetric)
        for name in ("spectral_norm", "lambda_max", "lambda_min"):
            if wanted[name] is not None:
                error = getattr(row, f"{name}_error")
                assert abs(getattr(row, name) - wanted[name]) <= error + rounding
                assert error < 2e-11 * wanted["spectral_norm"] + 1e-12 * float(dense.norm())
        for name in ("frobenius", "trace", "spectral_entropy", "negative_mass"):
            assert getattr(row, name) == (wanted[name] and pytest.approx(wanted[name], rel=1e-9, abs=1e-9))
        if wanted["condition"] < 1e6:
            assert row.condition == pytest.approx(wanted["condition"], rel=1e-5)
            told += 1
    assert told > len(full) / 4


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
def test_pairs_add_up_to_the_whole_and_parts_to_the_full(tmp_path, text):
    found, names = rows_of(opened(tmp_path, text))
    for part in blocks.PARTS:
        pairs = [row for row in found if row.part == part and row.row != "block"]
        (whole,) = (row for row in found if row.part == part and row.row == "block")
        squares = sum(row.frobenius**2 * (1 if row.row == row.column else 2) for row in pairs)
        assert squares == pytest.approx(whole.frobenius**2, rel=1e-12)
        traces = [row.trace for row in pairs if row.row == row.column]
        assert sum(traces) == pytest.approx(whole.trace, abs=1e-12 * whole.frobenius * len(names))
        assert all(row.trace is None for row in pairs if row.row != row.column)
    by_part = {part: {(r.row, r.column): r for r in found if r.part == part} for part in blocks.PARTS}
    for place, row in by_part["full"].items():
        if row.trace is not None:
            parts = by_part["outer"][place].trace + by_part["functional"][place].trace
            assert row.trace == pytest.approx(parts, abs=1e-12 * by_part["full"]["block", "block"].frobenius)
    assert {row.negative_mass for row in by_part["outer"].values()} <= {0.0, None}


def test_outer_is_gauss_newton(tmp_path):
    p = opened(tmp_path, "")
    found, names = rows_of(p)
    weights = {name: p.parameters[name] for name in names}
    x = torch.cat([batch.constants["input"] for batch in p.batches])
    keep = torch.ones(x.shape[:2], dtype=torch.bool)

    def output(flat_weights):
        return reference.output(p.spec, unflat(flat_weights, weights), x, keep).flatten()

    jacobian = torch.func.jacfwd(output)(flat(weights.values()))
    right = 2 / x.numel() * jacobian.T @ jacobian
    (row,) = (row for row in found if row.part == "outer" and row.row == "block")
    assert row.frobenius == pytest.approx(float(right.norm()), rel=1e-12)
    assert row.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(right)[-1]), rel=1e-11)


def test_where_it_is_too_large_only_the_ends_are_told_within_their_errors(tmp_path, monkeypatch):
    p = opened(tmp_path, "heads: 2\n")
    exact, _ = rows_of(p)
    monkeypatch.setattr(blocks, "EXACT_UP_TO", 3)
    told, _ = rows_of(p)
    assert len(told) == len(exact)
    for row, right in zip(told, exact, strict=True):
        assert (row.row, row.column, row.part) == (right.row, right.column, right.part)
        assert not row.exact
        assert row.condition is row.spectral_entropy is row.negative_mass is None
        assert row.frobenius == pytest.approx(right.frobenius, rel=1e-7, abs=1e-12)
        if right.note:
            assert row.note == right.note
            continue
        assert row.note == "too large for its whole spectrum"
        assert row.converged
        assert row.trace == (right.trace and pytest.approx(right.trace, rel=1e-10, abs=1e-12))
        for name in ("spectral_norm", "lambda_max", "lambda_min"):
            value, wanted = getattr(row, name), getattr(right, name)
            assert (value is None) == (wanted is None)
            if wanted is not None:
                error = getattr(row, f"{name}_error")
                assert abs(value - wanted) <= error + 1e-11 * right.spectral_norm
                assert error <= 1.1e-3 * right.spectral_norm


@pytest.mark.parametrize("exact_up_to", [4096, 3], ids=["exact", "estimated"])
def test_nothing_of_the_outer_part_is_negative(tmp_path, monkeypatch, exact_up_to):
    """Its null spaces are wide, and rounding would put some of their eigenvalues below zero."""
    monkeypatch.setattr(blocks, "EXACT_UP_TO", exact_up_to)
    found = [row for row in rows_of(opened(tmp_path, ""))[0] if row.row == row.column]
    outer = [row for row in found if row.part == "outer"]
    assert {row.exact for row in outer} == {exact_up_to > 3}
    assert 0 <= min(row.lambda_min for row in outer) < 1e-20
    assert min(row.lambda_min for row in found) < 0


def test_what_has_not_converged_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "EXACT_UP_TO", 3)
    monkeypatch.setattr("hesscore.spectrum.ends.EXACT_UP_TO", 3)
    monkeypatch.setattr("hesscore.spectrum.ends.MAX_STEPS", 3)
    p = opened(tmp_path, "")
    exact = [row for row in rows_of(p)[0] if row.row == "block"]
    for row in exact:
        assert not row.converged
        assert row.note == "too large for its whole spectrum; not converged"
        assert row.lambda_max_error > 1e-3 * row.spectral_norm


# --- the real input ---


def nanogpt(tmp_path, tokens=9):
    state = reference_nanogpt.state_dict(ARGS)
    torch.save({"model": state, "model_args": ARGS}, tmp_path / "model.pt")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 11, 30))
    return open_blocks(tmp_path / "model.pt", tmp_path / "ids.npy", max_tokens=tokens), state


@pytest.mark.parametrize("target", ["input", "zero", "random"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_of_a_checkpoint_is_taken_at_its_real_input(tmp_path, layer, target):
    """Nine tokens are a whole window, and half of one of which the rest weighs nothing."""
    p, state = nanogpt(tmp_path)
    data = read_data(tmp_path / "ids.npy", p.spec, 9)
    scored = data.target != -100
    assert (scored.numel(), int(scored.sum())) == (12, 9)
    x = state["transformer.wte.weight"][data.data] + state["transformer.wpe.weight"]

    def block(layer, x):
        h = f"transformer.h.{layer}."
        x = x + reference_nanogpt._attention(state, h, reference_nanogpt._norm(state, f"{h}ln_1", x), 2)
        return x + reference_nanogpt._mlp(state, h, reference_nanogpt._norm(state, f"{h}ln_2", x))

    for before in range(layer):
        x = block(before, x)
    curvature = p.block(layer, target, seed=3)
    (point,) = curvature.points
    assert torch.allclose(point.leaves["input"], x, rtol=1e-13, atol=1e-13)
    aim = {"input": x, "zero": torch.zeros_like(x), "random": point.leaves["target"]}[target]
    assert float(curvature.loss) == pytest.approx(float(mse_loss(block(layer, x)[scored], aim[scored])), rel=1e-12)
    if target == "random":
        assert abs(float(aim.mean())) < 0.5
        assert 0.5 < float(aim.std()) < 1.5
        again, other = (p.block(layer, target, seed).points[0].leaves["target"] for seed in (3, 4))
        assert torch.equal(aim, again)
        assert not torch.equal(aim, other)
        return
    weights = {name.replace(f".{layer}.", ".0."): p.parameters[name] for name in by_layer(select(p))[layer]}
    dense = twice_block(p.spec.alone, weights, x, aim, scored)
    found, _ = rows_of(p, layer, target)
    (whole,) = (row for row in found if (row.row, row.part) == ("block", "full"))
    assert whole.layer == layer
    assert whole.frobenius == pytest.approx(float(dense.norm()), rel=1e-11)
    assert whole.lambda_min == pytest.approx(float(torch.linalg.eigvalsh(dense)[0]), abs=1e-10 * float(dense.norm()))


def test_parts_of_the_data_change_nothing(tmp_path, monkeypatch):
    one, _ = nanogpt(tmp_path)
    monkeypatch.setattr(capacity, "CACHED_ELEMENTS", 1)
    many, _ = nanogpt(tmp_path)
    assert len(many.batches) == 2
    whole, parted = (p.block(1).points[0].leaves for p in (one, many))
    for name in ("input", "weights"):
        assert torch.allclose(whole[name], parted[name], rtol=1e-13, atol=1e-13)


def test_a_selection_holds_the_pairs_of_what_is_selected(tmp_path):
    p, _ = nanogpt(tmp_path)
    everything = {(r.row, r.column, r.part): r for r in rows_of(p, 1)[0]}
    names = by_layer(select(p, "1", "attn.k,mlp.down"))[1]
    found = list(analyze(p.block(1), p.spec, 1, names))
    assert len(found) == count(names) == 3 * (10 + 1)
    for row in found:
        if row.row != "block":
            right = everything[row.row, row.column, row.part]
            assert row.frobenius == pytest.approx(right.frobenius, rel=1e-10, abs=1e-14)
    with pytest.raises(UsageError, match="what is selected lies in no block"):
        by_layer(select(p, None, "embed.*"))


@pytest.mark.parametrize(
    ("d_ff", "text", "small"),
    [(6, "", True), (6, "layers: 2\n", False), (6, "vocab: 9\n", False), (11_100, "", True), (11_101, "", False)],
    ids=["block", "stack", "model", "100,000 parameters", "100,009 parameters"],
)
def test_a_spec_is_reported_by_pairs_if_it_is_one_small_block(tmp_path, d_ff, text, small):
    path = tmp_path / "spec.yaml"
    path.write_text(f"d_model: 4\nd_ff: {d_ff}\n{text}")
    assert is_small_block(path) == small
    assert not is_small_block(CHECKPOINT)


def test_blocks_of_a_stack_without_vocabulary(tmp_path):
    p = opened(tmp_path, "layers: 2\n")
    first = p.block(0).points[0].leaves["input"]
    keep = torch.ones(first.shape[:2], dtype=torch.bool)
    after = reference.output(p.spec.alone, dict(p.parameters), first, keep)
    assert torch.allclose(p.block(1).points[0].leaves["input"], after, rtol=1e-13, atol=1e-13)


# --- memory ---


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
def test_the_size_is_not_foretold_too_low(tmp_path, text):
    p = opened(tmp_path, text)
    curvature = p.block(0)
    parts = {name.removeprefix("blocks.0.").rpartition(".")[0] for name in curvature.parameters}
    stored: dict[int, int] = {}
    for term in block_hessian(curvature, p.spec).terms:
        for tensor in (term.maps, term.phi, term.psi):
            assert isinstance(tensor, Tensor)
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(stored.values()) / 2 < 8 * kept(p.spec, parts, 6, 3) < 40 * sum(stored.values())


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are made and not yet let go."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage.data_ptr() not in self.alive:
                weakref.finalize(storage, self.let_go, storage.data_ptr(), storage.nbytes())
                self.alive.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return made

    def let_go(self, address, size):
        self.alive.discard(address)
        self.now -= size


@pytest.mark.parametrize("parts", ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "attn.q attn.k", "attn.v mlp.up"])
@pytest.mark.parametrize("text", ["seq_len: 32\n", "seq_len: 2\nd_ff: 64\ngated: true\nactivation: silu\n"])
def test_what_moves_is_foretold_within_a_factor_of_five(tmp_path, text, parts):
    """Where tokens are many, the tangents of scores are most of what is held; where d_ff is large, those behind it."""
    path = tmp_path / "spec.yaml"
    path.write_text(f"d_model: 8\nheads: 2\nbatch: 2\nplacement: post\n{text}" + "d_ff: 32\n" * ("d_ff" not in text))
    p = open_blocks(path)
    curvature, length, wanted = p.block(0), p.spec.seq_len, parts.split()
    with Held() as held:
        found = block_hessian(curvature, p.spec, parts=wanted)
    stored = sum(t.phi.nbytes + t.psi.nbytes + t.maps.nbytes for t in found.terms)
    assert held.most > 2 * stored
    assert held.most <= 8 * kept(p.spec, wanted, 2 * length, length) < 5 * held.most


def test_what_does_not_fit_is_refused_with_what_does(tmp_path, monkeypatch):
    p, _ = nanogpt(tmp_path, tokens=25)
    layers = by_layer(select(p))
    check(p, layers)
    sizes = [memory.free()]
    monkeypatch.setattr(memory, "free", lambda: sizes[0])
    fit = 0
    for megabytes in (1, 16, 24, 40):
        sizes[0] = megabytes * 2**20
        try:
            check(p, layers)
        except InputError as error:
            if found := re.search(r": a --max-tokens of (\d+) fits; ", str(error)):
                fit = max(fit, int(found[1]))
    assert fit > 0
    sizes[0] = 1000
    with pytest.raises(InputError, match="no token fits; select --components to take less, or --scope model"):
        check(p, layers)


# --- the report ---


def report_of(p, found, names):
    return BlockReport(p, {0: 0.5}, {"seed": 0, "scope": "block", "target": "input"}, names, found)


def test_csv_and_json_hold_the_same_columns_and_what_was_skipped(tmp_path):
    p = opened(tmp_path, "")
    found, names = rows_of(p)
    report = report_of(p, found, names)
    content = strict(report.to_json())
    assert tuple(content["rows"][0]) == tuple(report.frame.columns) == tuple(asdict(found[0])) == blocks.COLUMNS
    assert (content["loss"], content["scope"], content["target"], content["skipped"]) == (
        {"0": 0.5},
        "block",
        "input",
        {},
    )
    assert len(report.to_csv().splitlines()) == len(found) + 1
    cut = report_of(p, found[:-2], names)  # the last pair of the last part is missing
    assert cut.skipped == {names[-1]: "interrupted"}
    assert set(report_of(p, found, names[:2]).skipped.values()) <= {"not selected", "interrupted"}


def row(a, b, part, frobenius, note=""):
    return BlockRow(0, a, b, part, 2, 2, frobenius=frobenius, note=note)


def test_the_picture_has_a_panel_for_each_part_and_a_label_for_each_parameter():
    found = [row("w", "w", part, 1.0) for part in blocks.PARTS] + [row("v", "w", "full", 1e-30, blocks.FLAT)]
    svg = draw(found, "title", "x.svg").decode()
    for word in ("title", "block 0: full", "block 0: outer", "block 0: functional", "Frobenius norm", ">w<"):
        assert word in svg
    assert svg == draw(found, "title", "x.svg").decode()
    assert draw(found, "title", "x.PNG").startswith(b"\x89PNG")
    assert draw(found[-1:], "nothing but rounding", "x.svg")


def test_the_picture_shows_the_frobenius_norm_of_each_pair_on_both_sides_of_the_diagonal(monkeypatch):
    drawn: list[tuple[Axes, np.ndarray]] = []
    draw_image = Axes.imshow

    def watched(axes, data, **how):
        drawn.append((axes, data))
        return draw_image(axes, data, **how)

    monkeypatch.setattr(Axes, "imshow", watched)
    sizes = {("v", "v"): 1.0, ("v", "w"): 2.0, ("v", "u"): 3.0, ("w", "w"): 4.0, ("u", "u"): 6.0}
    flat = [row("u", "w", part, 1e-30, blocks.FLAT) for part in blocks.PARTS]  # a pair may come either way round
    found = [
        replace(row(*pair, part, shift + size), spectral_norm=0.1 * size)
        for shift, part in zip((0.0, 10.0, 20.0), blocks.PARTS, strict=True)
        for pair, size in sizes.items()
    ]
    draw([*found, *flat, row("block", "block", "full", 99.0)], "title", "x.svg")
    panels: dict[str, list[np.ndarray]] = {}
    for axes, data in drawn:
        panels.setdefault(axes.get_title(), []).append(data)
    assert list(panels) == [f"block 0: {part}" for part in blocks.PARTS]
    nan = np.nan
    for shift, (grey, coloured) in zip((0.0, 10.0, 20.0), panels.values(), strict=True):
        assert np.array_equal(grey, [[nan, nan, nan], [nan, nan, 1], [nan, 1, nan]], equal_nan=True)
        norms = np.array([[1, 2, 3], [2, 4, nan], [3, nan, 6]])
        assert np.array_equal(coloured, shift + norms, equal_nan=True)


@pytest.mark.parametrize(("least", "extend"), [(1e-5, "neither"), (1e-7, "min")])
def test_the_bar_points_below_only_where_something_lies(least, extend, monkeypatch):
    bars = []
    draw_bar = Figure.colorbar

    def watched(*arguments, **how):
        bars.append(draw_bar(*arguments, **how))
        return bars[-1]

    monkeypatch.setattr(Figure, "colorbar", watched)
    draw([row("w", "w", part, size) for part, size in zip(blocks.PARTS, (1.0, least, 0.5), strict=True)], "", "x.svg")
    assert [bar.extend for bar in bars] == [extend]


def test_the_sample_block_is_the_papers():
    assert is_small_block(ROOT / "configs/blocks/paper-block.yaml")
    assert open_blocks(CHECKPOINT, VAL).provenance["max_tokens"] == 256


FADING = {  # what a pair with a key bias is made of, rounding, may be all there is, or nothing at all
    "small weights": "d_model: 2\nd_ff: 4\nseq_len: 2\nplacement: post\ninit_std: 0.001\n",
    "gated": "d_model: 2\nd_ff: 2\nseq_len: 3\nplacement: post\ngated: true\nbias: false\nnorm_eps: 0\n",
    "saturated": "d_model: 4\nd_ff: 4\nheads: 2\nseq_len: 4\ninit_std: 10\n",
}


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("text", FADING.values(), ids=FADING)
def test_what_is_within_its_error_is_no_curvature(tmp_path, text, seed):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    found, names = rows_of(open_blocks(path, seed=seed))
    assert len(found) == count(names)
    for row in found:
        flat = row.note == "no curvature beyond rounding"
        assert flat == (row.condition is None)
        assert flat or row.spectral_norm > row.spectral_norm_error


def test_names_come_in_any_order_and_whole_components(tmp_path):
    p = opened(tmp_path, "heads: 2\n")
    names = ["blocks.0.attn.q.weight", "blocks.0.attn.q.bias"]
    forwards, backwards = (list(analyze(p.block(0), p.spec, 0, order)) for order in (names, names[::-1]))
    assert forwards == backwards
    bias = p.block(0).block(names[1]).dense()
    (row,) = (r for r in forwards if (r.row, r.column, r.part) == ("attn.q.bias", "attn.q.bias", "full"))
    assert row.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(bias)[-1]), rel=1e-12)
    for wrong in names[:1], [*names, names[0]], ["blocks.0.attn.x"]:
        with pytest.raises(UsageError, match="name every parameter of a component, and each once"):
            list(analyze(p.block(0), p.spec, 0, wrong))
