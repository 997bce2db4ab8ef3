"""How curvature grows: the fit, the norms against autograd, the laws of attention, and ``hess scaling``."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
import torch
from hesscore_cli.render import Measured

from hesscore import scaling
from hesscore.blocks import FLAT
from hesscore.bounds.growth import exponent
from hesscore.errors import InputError, UsageError
from hesscore.scaling import COLUMNS, PARTS, Measurement, Norm, Setting, Sweep, measure, pairs, plan, problem, rows
from hesscore.spec import Spec, read_spec
from tests.command import CHECKPOINT, HESS, ROOT, read_terminal, rows_of, run, strict
from tests.reference import output
from tests.test_analyze_terminal import plain

ATTENTION = ROOT / "configs/blocks/attention.yaml"
SPEC = read_spec(ATTENTION)
SMALL = (0.05, 0.1, 0.2, 0.4)
TWO = ["--input-scale", "0.1", "--input-scale", "0.2", "--seeds", "2"]
"""A quick run: four measurements."""

# --- the fit ---


def fit(x, y, draws=None):
    found = exponent(list(x), list(y), draws)
    assert found is not None
    return found


def test_a_fit_is_that_of_numpy():
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 100, 9)
    y = 3 * x**1.7 * np.exp(0.1 * rng.standard_normal(9))
    (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    value, stderr = fit(x, y)
    assert value == pytest.approx(slope, rel=1e-10)
    assert stderr == pytest.approx(covariance[0, 0] ** 0.5, rel=1e-10)


def test_draws_have_heights_of_their_own_as_columns_of_a_design():
    rng = np.random.default_rng(1)
    draws = np.array([0, 0, 0, 7, 7, 7, 7, 2, 2, 5])  # of which the last one says nothing
    x, y = rng.uniform(1, 100, 10), rng.uniform(1, 100, 10)
    design = np.stack([np.log(x), *(draws == draw for draw in (0, 7, 2, 5))], 1)
    solution, (square,), *_ = np.linalg.lstsq(design, np.log(y))
    covariance = square / (10 - 5) * np.linalg.inv(design.T @ design)
    value, stderr = fit(x, y, list(draws))
    assert value == pytest.approx(solution[0], rel=1e-9)
    assert stderr == pytest.approx(covariance[0, 0] ** 0.5, rel=1e-9)


def test_the_standard_error_is_how_far_slopes_scatter():
    rng = np.random.default_rng(2)
    x, draws = np.tile([1.0, 2.0, 4.0, 8.0], 3), np.repeat([0, 1, 2], 4)
    fits = []
    for _ in range(2000):
        heights = np.repeat(2 * rng.standard_normal(3), 4)  # which tell nothing of the slope
        fits.append(fit(x, x**2 * np.exp(heights + 0.1 * rng.standard_normal(12)), list(draws)))
    values, stderrs = np.array(fits).T
    assert values.mean() == pytest.approx(2, abs=4 * values.std() / 2000**0.5)
    assert (stderrs**2).mean() ** 0.5 == pytest.approx(values.std(), rel=0.06)


@pytest.mark.parametrize(
    ("x", "y", "draws"),
    [
        ([], [], None),
        ([2], [3], None),
        ([2, 2], [3, 4], None),
        ([1, 2], [3, 4], [0, 1]),
        ([1, 2], [3, 0], None),
        ([1, 2], [3, -1], None),
        ([0, 2], [3, 1], None),
        ([1, 2], [3, nan], None),
        ([1, float("inf")], [3, 1], None),
    ],
)
def test_no_line_goes_through(x, y, draws):
    assert exponent(x, y, draws) is None


def test_two_points_leave_nothing_for_an_error():
    value, stderr = fit([1, 10], [5, 500])
    assert (value, isnan(stderr)) == (2, True)


# --- the norms ---


@pytest.mark.parametrize(
    "spec",
    [
        Spec(d_model=4, d_ff=0, norm="none", causal=False, bias=False, seq_len=3),
        Spec(d_model=4, d_ff=5, heads=2, batch=2, seq_len=3, layers=2, activation="tanh", init_std=0.7),
    ],
)
def test_norms_are_those_of_autograd(spec):
    setting, seed = Setting(spec, 0.8), 3
    (one,) = measure(Sweep("input_scale", (0.8,), (setting,)), 1, seed)
    assert list(one.norms) == [(row, column, part) for row, column in pairs(spec) for part in PARTS]
    curvature = problem(setting, scaling.draw_seed(seed, 0))
    (point,) = curvature.points
    x, target = point.leaves["input"], point.leaves["target"]
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    weights = {name: curvature.leaves[name].clone().requires_grad_() for name in curvature.graph.parameters}
    y = output(spec, weights, x, keep)
    residual = (y - target).detach()
    assert 0.5 < float(residual.std()) < 1.5
    scale = 2 / y.numel()

    def gradient(scalar, name, **options):
        (found,) = torch.autograd.grad(scalar, weights[name], materialize_grads=True, retain_graph=True, **options)
        return found.flatten()

    for (row, column, part), norm in one.norms.items():
        a, b = f"blocks.0.{row}", f"blocks.0.{column}"
        if part == "outer":
            by_a, by_b = (torch.stack([gradient(entry, name) for entry in y.flatten()]) for name in (a, b))
            matrix = scale * by_a.T @ by_b
        else:
            first = gradient((scale * residual * y).sum(), a, create_graph=True)
            matrix = torch.stack([gradient(entry, b) for entry in first])
        expected = float(torch.linalg.svdvals(matrix).max())
        assert norm.value == pytest.approx(expected, abs=1e-12, rel=1e-10), (row, column, part)
        assert (norm.fault == FLAT) == (expected < 1e-12), (row, column, part)


def test_norms_by_lanczos_are_exact_within_their_errors(monkeypatch):
    sweep = Sweep("width", (16,), (Setting(SPEC.model_copy(update={"d_model": 16}), 0.5),))
    (exact,) = measure(sweep, 1)
    monkeypatch.setattr(scaling, "EXACT_UP_TO", 255)
    (found,) = measure(sweep, 1)
    assert any(norm.error > 1e-6 * norm.value for norm in found.norms.values() if not norm.fault)
    for key, norm in found.norms.items():
        assert norm.fault == exact.norms[key].fault
        if not norm.fault:
            assert abs(norm.value - exact.norms[key].value) <= norm.error <= 1e-3 * norm.value


def test_the_residual_is_the_same_for_every_value():
    losses = {float(problem(Setting(SPEC, size), 1).loss) for size in (0.05, 1.0, 20.0)}
    assert max(losses) == pytest.approx(min(losses), rel=1e-12)


def test_a_residual_that_is_lost_is_refused():
    for size in 1e12, 1e200:
        with pytest.raises(InputError, match="the residual is lost"):
            problem(Setting(SPEC, size), 0)


def test_draws_do_not_depend_on_what_else_is_measured():
    def norms(values, draws, seed=0):
        sweep = Sweep("input_scale", values, tuple(Setting(SPEC, value) for value in values))
        return {(one.value, one.draw): one.norms for one in measure(sweep, draws, seed)}

    few, more = norms((0.2,), 1), norms((0.1, 0.2), 2)
    assert len(more) == 4
    assert few[0.2, 0] == more[0.2, 0] != more[0.2, 1]
    assert norms((0.2,), 1, seed=1)[0.2, 0] != few[0.2, 0]


# --- what is left out ---


def found_from(*norms):
    key = "attn.q.weight", "attn.q.weight", "outer"
    values = tuple(range(1, len(norms) + 1))
    sweep = Sweep("seq_len", values, tuple(Setting(SPEC, 1.0) for _ in values))
    (row,) = rows(sweep, [Measurement(x, 0, {key: norm}) for x, norm in zip(values, norms, strict=True)])
    return row


def test_what_is_no_norm_is_not_in_a_fit_and_said():
    good = [Norm(float(x**2), 0.0) for x in (1, 2, 3)]
    assert (found_from(*good).exponent, found_from(*good).note) == (2, "")
    bad = found_from(*good, Norm(1e9, 1e8, "not converged"), Norm(nan, nan, "not finite"))
    assert bad.exponent == 2
    assert [point.x for point in bad.points] == [1, 2, 3]
    assert bad.note == "not converged in 1 of 5 norms; not finite in 1 of 5 norms"
    none = found_from(Norm(1e-20, 1e-18, FLAT), Norm(1e-20, 1e-18, FLAT))
    assert (none.exponent, none.stderr, none.points, none.note) == (None, None, (), FLAT)


def test_an_unconverged_norm_is_at_fault(monkeypatch):
    estimated = scaling.estimated
    monkeypatch.setattr(scaling, "EXACT_UP_TO", 63)
    monkeypatch.setattr(scaling, "estimated", lambda *arguments: replace(estimated(*arguments), converged=False))
    (one,) = measure(Sweep("seq_len", (8,), (Setting(SPEC, 1.0),)), 1)
    assert {norm.fault for norm in one.norms.values()} == {FLAT, "not converged"}


def test_an_overflow_is_not_finite(monkeypatch):
    monkeypatch.setattr(scaling.Block, "dense", lambda self: torch.full(self.shape, torch.inf))
    (one,) = measure(Sweep("seq_len", (8,), (Setting(SPEC, 1.0),)), 1)
    assert {norm.fault for norm in one.norms.values()} == {"not finite"}


# --- the laws ---


def growth(quantity, values, settings, draws=3):
    sweep = Sweep(quantity, tuple(values), tuple(settings))
    return {(row.row, row.column, row.part): row for row in rows(sweep, list(measure(sweep, draws)))}


OUTER = {"qq": 6, "kk": 6, "vv": 2, "oo": 2, "kq": 6, "kv": 4, "qv": 4}
FUNCTIONAL = {"qq": 5, "kk": 5, "kq": 3, "kv": 3, "qv": 3}


def test_attention_alone_grows_as_theory_says():
    sweep, _ = plan(ATTENTION, {})
    assert (sweep.quantity, sweep.values) == ("input_scale", SMALL)
    found = rows(sweep, list(measure(sweep, 3)))
    named = {(row.part, row.row[5] + row.column[5]): row for row in found}
    assert len(found) == len(named) == 2 * len(OUTER)
    for part, powers in {"outer": OUTER, "functional": FUNCTIONAL}.items():
        for pair, power in powers.items():
            row = named.pop((part, pair))
            assert row.exponent is not None
            assert row.stderr is not None
            assert row.theory == power
            assert abs(row.exponent - power) < 3 * row.stderr + 0.1
            assert row.stderr < 0.1
            assert [(point.x, point.draws) for point in row.points] == [(x, 3) for x in SMALL]
    assert named.keys() == {("functional", "vv"), ("functional", "oo")}
    assert {(row.exponent, row.theory, row.note) for row in named.values()} == {(None, None, FLAT)}


@pytest.mark.parametrize("placement", ["pre", "parallel"])
def test_behind_a_norm_the_size_of_tokens_does_not_matter(placement):
    spec = SPEC.model_copy(update={"norm": "layernorm", "placement": placement})
    for row in growth("input_scale", SMALL, (Setting(spec, x) for x in SMALL)).values():
        known = "norm" not in row.row and row.exponent is not None
        assert row.theory == (0 if known else None)
        assert row.exponent is None or abs(row.exponent) < 0.05


def test_before_a_norm_each_derivative_loses_the_size_of_the_sum():
    """Of which theory is not asked here: two powers in the outer part, one in the functional."""
    spec = SPEC.model_copy(update={"norm": "layernorm", "placement": "post"})
    found = growth("input_scale", SMALL, (Setting(spec, x) for x in SMALL))
    for (a, b, part), power in {("q", "q", "outer"): 4, ("v", "v", "outer"): 0, ("k", "q", "functional"): 2}.items():
        row = found[f"attn.{a}.weight", f"attn.{b}.weight", part]
        assert row.theory is None
        assert abs(row.exponent - power) < 3 * row.stderr + 0.1


def test_the_cube_of_the_length_is_that_of_a_norm_held_fixed():
    """``|X|_2 ~ sqrt(L)`` for tokens of one size, so six powers of it are three of the length."""
    lengths = (16, 64, 256)
    spec = SPEC.model_copy(update={"d_model": 4})
    at = [spec.model_copy(update={"seq_len": length}) for length in lengths]
    key = "attn.k.weight", "attn.k.weight", "outer"
    one_size = growth("seq_len", lengths, (Setting(each, 0.05) for each in at), 5)[key]
    one_norm = growth("seq_len", lengths, (Setting(each, 0.4 / each.seq_len**0.5) for each in at), 5)[key]
    assert abs(one_size.exponent) < 3 * one_size.stderr + 0.1
    assert abs(one_norm.exponent + 3) < 3 * one_norm.stderr + 0.1
    assert one_size.theory is one_norm.theory is None


def test_theory_is_silent_where_it_does_not_hold():
    for change in {"layers": 2}, {"d_ff": 4}, {"norm": "rmsnorm", "placement": "post"}:
        (sweep,) = [Sweep("input_scale", (1.0,), (Setting(SPEC.model_copy(update=change), 1.0),))]
        assert {row.theory for row in rows(sweep, list(measure(sweep, 1)))} == {None}


def test_the_page_shows_what_is_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/scaling.md").read_text()
    lines = [line.replace(" x ", "x").split() for line in page.splitlines()]
    by_range = {}
    for low, high, values in ("0.05", "0.4", SMALL), ("1", "8", (1, 2, 4, 8)), ("8", "32", (8, 16, 32)):
        found = growth("input_scale", values, (Setting(SPEC, x) for x in values), 5)
        by_range[low, high] = {
            (row.row[5] + row.column[5], row.part): "-" if row.exponent is None else Measured(row.exponent, row.stderr)
            for row in found.values()
        }
        columns = ("qq", "outer"), ("vv", "outer"), ("qv", "outer"), ("qq", "functional"), ("qv", "functional")
        cells = [str(by_range[low, high][column]) for column in columns]
        assert f"| {low} to {high} | {' | '.join(cells)} |" in page
        if values == SMALL:
            for a, b, _ in found:
                outer, functional = (str(by_range[low, high][a[5] + b[5], part]) for part in PARTS)
                theory = [OUTER[a[5] + b[5]], FUNCTIONAL.get(a[5] + b[5], "-")]
                name = a if a == b else f"{a}x{b}"
                assert [name, outer, str(theory[0]), functional, str(theory[1])] in lines
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})


# --- what is asked for ---


def test_sweeps_set_the_fields_of_the_spec(tmp_path):
    path = tmp_path / "block.yaml"
    path.write_text("d_model: 8\nd_ff: 20\nheads: 2\n")
    (sweep,) = plan(path, {"width": [4, 12], "layers": [3], "input_scale": [0.5]})
    assert (sweep.quantity, sweep.values) == ("width", (4, 12))
    assert [(spec.d_model, spec.d_ff, spec.layers, size) for spec, size in sweep.settings] == [
        (4, 10, 3, 0.5),
        (12, 30, 3, 0.5),
    ]
    assert [(s.quantity, [(at.spec.seq_len, at.input_scale) for at in s.settings]) for s in plan(path, {})] == [
        ("input_scale", [(64, x) for x in SMALL]),
        ("seq_len", [(length, 1.0) for length in (8, 16, 32, 64)]),
    ]


def test_depth_is_of_the_first_block_in_the_loss_of_the_stack():
    (sweep,) = plan(ATTENTION, {"layers": [1, 2]})
    one, two = measure(sweep, 1)
    assert one.norms.keys() == two.norms.keys()
    curvature = problem(sweep.settings[1], scaling.draw_seed(0, 0))
    name = "blocks.0.attn.v.weight"
    assert len(curvature.graph.parameters) == 8
    expected = torch.linalg.matrix_norm(curvature.block(name, terms=PARTS["functional"]).dense(), 2)
    assert two.norms["attn.v.weight", "attn.v.weight", "functional"].value == pytest.approx(float(expected), rel=1e-12)
    assert float(expected) > 1e-3  # of one layer it is zero


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"width": [8]}, "--width: one value is no sweep: give one of --input-scale, --seq-len, --width, --layers"),
        ({"width": [8, 8]}, "--width: a value is given twice"),
        ({"width": [8, 4], "seq_len": [2, 4]}, "--width, --seq-len: one quantity is swept at a time"),
        ({"width": [4, 0]}, "d_model: input should be greater than 0"),
        ({"width": [4, 6, 7]}, "d_model: 7 is not divisible by heads: 2"),
        ({"seq_len": [4, -1]}, "seq_len: input should be greater than 0"),
        ({"seq_len": [4, 10**9]}, "seq_len: 1000000000 is too large: "),
        ({"layers": [4, 10**5]}, "layers: 100000 are more than 10000"),
        *(({"input_scale": [1.0, x]}, f"--input-scale {x}: give a finite number above 0") for x in (0.0, -1.0)),
        *(({"input_scale": [1.0, float(x)]}, f"--input-scale {x}: give a finite") for x in ("nan", "inf")),
    ],
)
def test_nonsense_is_refused_with_its_name(tmp_path, given, said):
    path = tmp_path / "block.yaml"
    path.write_text("d_model: 8\nd_ff: 0\nheads: 2\n")
    with pytest.raises(UsageError) as caught:
        plan(path, given)
    assert said in str(caught.value)


def test_what_is_no_spec_of_blocks_is_refused(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("d_model: 8\nd_ff: 8\nvocab: 5\n")
    refused = {
        path: "vocab: 5: leave it out: a block or a stack is swept on its own",
        "": "SPEC is empty",
        CHECKPOINT: "no spec",
    }
    for source, said in refused.items():
        with pytest.raises(UsageError, match=said):
            plan(source, {})


# --- the command ---


def test_rows_in_csv_json_and_a_pipe(tmp_path):
    csv, json = tmp_path / "rows.csv", tmp_path / "rows.json"
    result = run(HESS, "scaling", ATTENTION, *TWO, "--csv", csv, "--json", json)
    assert result.returncode == 0
    assert result.stderr == (
        "note: seeded weights and inputs: these numbers describe the architecture, not a trained model\n"
        "4 measurements: input_scale, 2 draws of weights and data\n"
    )
    content, found = strict(json.read_text()), rows_of(csv.read_text())
    assert tuple(found[0]) == COLUMNS
    assert len(found) == len(content["rows"]) == 14
    sweep = Sweep("input_scale", (0.1, 0.2), (Setting(SPEC, 0.1), Setting(SPEC, 0.2)))
    for line, row, expected in zip(found, content["rows"], rows(sweep, list(measure(sweep, 2))), strict=True):
        assert (row["row"], row["column"], row["part"]) == (expected.row, expected.column, expected.part)
        for name in ("exponent", "stderr", "theory"):
            assert (float(line[name]) if line[name] else None) == row[name] == getattr(expected, name)
        assert row["points"] == [point._asdict() for point in expected.points]
        assert line["note"] == row["note"] == expected.note
    (swept,) = content["sweeps"]
    assert (swept["quantity"], swept["values"], swept["input_scale"]) == ("input_scale", [0.1, 0.2], None)
    assert swept["spec"] == SPEC.model_dump()
    assert content["measurements"] == {"finished": 4, "asked_for": 4}
    assert (content["schema_version"], content["seeds"], content["seed"]) == (1, 2, 0)
    assert result.stdout.startswith(f"{ATTENTION}: 2 draws of weights and data\n")
    header, *lines = result.stdout.split("\n\n")[1].splitlines()
    assert tuple(header.split()) == COLUMNS
    for line, row in zip(lines, content["rows"], strict=True):
        shown = line.split(maxsplit=7)
        assert shown[:4] == [row[name] for name in COLUMNS[:4]]
        assert shown[4] == ("-" if row["exponent"] is None else str(row["exponent"]))


def test_a_dash_is_stdout_and_quiet_is_quiet():
    result = run(HESS, "scaling", ATTENTION, *TWO, "--json", "-", "--quiet", "--seed", "5")
    assert (result.returncode, result.stderr) == (0, "")
    assert strict(result.stdout)["seed"] == 5


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([ATTENTION, "--width", "8"], 2),
        ([ATTENTION, "--width", "0", "--width", "4"], 2),
        ([ATTENTION, *TWO, "--csv", ATTENTION], 2),
        (["none.yaml"], 3),
        ([ATTENTION, "--input-scale", "1e200", "--input-scale", "1"], 3),
    ],
)
def test_what_is_refused_leaves_stdout_alone(arguments, code):
    result = run(HESS, "scaling", *arguments, "--quiet")
    assert (result.returncode, result.stdout) == (code, "")
    assert "Traceback" not in result.stderr
    assert ATTENTION.read_text().startswith("#")


INTERRUPTED = """
import os, signal
from hesscore import scaling
from hesscore_cli.app import main

everything = scaling.measure

def struck(*arguments):
    for count, one in enumerate(everything(*arguments), 1):
        if count == 4:
            os.kill(os.getpid(), signal.SIGINT)
        yield one

scaling.measure = struck
main()
"""


def test_an_interruption_keeps_what_is_measured(tmp_path):
    json = tmp_path / "rows.json"
    result = run(sys.executable, "-c", INTERRUPTED, "scaling", ATTENTION, *TWO, "--json", json, "--quiet")
    assert result.returncode == 130
    assert result.stderr == "interrupted: 3 of 4 measurements are finished; what is shown is of these\n"
    content = strict(json.read_text())
    assert content["measurements"] == {"finished": 3, "asked_for": 4}
    assert [point["draws"] for point in content["rows"][0]["points"]] == [2, 1]
    assert content["rows"][0]["exponent"] == pytest.approx(6, abs=0.1)
    assert len(result.stdout.split("\n\n")[1].splitlines()) == 1 + 14


def test_a_terminal_gets_a_table_that_fits():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [HESS, "scaling", ATTENTION.relative_to(ROOT), *TWO],
        env={**environment, "TERM": "xterm-256color"},
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    lines = plain(read_terminal(ours)).replace("\r\n", "\n").splitlines()
    assert process.wait(timeout=60) == 0
    assert max(map(len, lines)) <= 80
    assert "as a power of input_scale = 0.1, 0.2; seq_len 8, width 8, layers 1" in lines
    cells = [line.split() for line in lines]
    assert ["row", "x", "column", "outer", "theory", "functional", "theory"] in cells
    (keys_queries,) = [cell for cell in cells if cell[:3] == ["attn.k.weight", "x", "attn.q.weight"]]
    assert (keys_queries[4], keys_queries[6]) == ("6", "3")
    assert "no curvature beyond rounding (functional): attn.v.weight, attn.o.weight" in lines
