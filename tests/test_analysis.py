"""The rows of the sample run against double backward of a plain PyTorch nanoGPT: every number within its own error."""

import re
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

from hesscore.analysis import COLUMNS, Analyst, Finding, cost, select
from hesscore.curvature import Curvature
from hesscore.errors import InputError, UsageError
from hesscore.inputs.reading import read_data
from hesscore.problem import Problem, open_problem
from hesscore.report import Report
from hesscore.spec import Spec
from hesscore.spectrum import ends as module
from hesscore.wiring.names import place
from tests import reference_nanogpt

FOLDER = Path(__file__).parent.parent / "sample_runs" / "pydoc"
VAL = FOLDER / "val.bin"
TOKENS = 200  # a whole window of 128 and one that is padded

SOME = (
    "embed.token.weight",
    "embed.position.weight",
    "blocks.0.norm1.weight",
    "blocks.1.attn.q.weight",
    "blocks.2.attn.k.weight",
    "blocks.3.attn.v.weight",
    "blocks.3.attn.o.bias",
    "blocks.3.mlp.up.weight",
    "blocks.3.mlp.up.bias",
    "blocks.3.mlp.down.weight",
    "final_norm.weight",
)
"""Of every kind, large and small, early and late; ``mlp.up.bias`` is the smallest that is not formed whole."""

KEY_BIASES = tuple(f"blocks.{layer}.attn.k.bias" for layer in range(4))


def analysed(*arguments: Any, **settings: Any) -> Any:
    """The rows of some parameters, without their types: the numbers that are checked here are all there."""
    return [finding.row for finding in findings(*arguments, **settings)]


def findings(problem: Problem, curvature: Curvature, names: Any, *seed: int, **settings: Any) -> list[Finding]:
    analyst = Analyst(problem, curvature, *seed, **settings)
    return [analyst.block(name) for name in names]


def rows_of(problem, names):
    return {row.name: row for row in analysed(problem, problem.curvature(), names)}


def open_sample(moment="end", dtype=None, max_tokens=TOKENS):
    return open_problem(FOLDER / f"ckpt-{moment}.pt", VAL, dtype, max_tokens=max_tokens)


class Reference:
    """The loss by one tensor, or the part of it that a row's ``tensor`` names, under autograd in float64."""

    def __init__(self, tensor, max_tokens, moment="end"):
        content = torch.load(FOLDER / f"ckpt-{moment}.pt", weights_only=True)
        state = {name: weight.double() for name, weight in content["model"].items()}
        found = re.fullmatch(r"(.+?)(?:\[(\d+):(\d+)\])?", tensor)
        assert found
        name, first, last = found.groups()
        whole = state[name]
        start, stop = (0, len(whole)) if first is None else (int(first), int(last))
        self.leaf = whole[start:stop].clone().requires_grad_()
        state[name] = torch.cat([whole[:start], self.leaf, whole[stop:]])
        state["lm_head.weight"] = state["transformer.wte.weight"]
        data = read_data(VAL, Spec(d_model=1, d_ff=0, vocab=96, seq_len=128), max_tokens)
        self.loss = reference_nanogpt.loss(state, content["model_args"], data.data, data.target)
        (self.gradient,) = torch.autograd.grad(self.loss, self.leaf, create_graph=True)

    def product(self, v):
        seed = torch.from_numpy(np.ascontiguousarray(v)).view_as(self.leaf)
        (product,) = torch.autograd.grad(self.gradient, self.leaf, seed, retain_graph=True)
        return product.flatten().numpy()

    @cached_property
    def dense(self):
        matrix = np.stack([self.product(row) for row in np.eye(self.leaf.numel())])
        return (matrix + matrix.T) / 2

    def ends(self):
        """Smallest and largest eigenvalue."""
        n = self.leaf.numel()
        if n <= 64:
            return tuple(np.linalg.eigvalsh(self.dense)[[0, -1]])
        operator = LinearOperator((n, n), matvec=self.product, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(n)
        return tuple(
            eigsh(operator, 1, which=end, v0=start, ncv=30, tol=1e-10, return_eigenvectors=False)[0]
            for end in ("SA", "LA")
        )


@pytest.fixture(scope="module")
def sample() -> Problem:
    return open_sample()


@pytest.fixture(scope="module")
def curvature(sample) -> Curvature:
    return sample.curvature()


@pytest.fixture(scope="module")
def rows(sample, curvature):
    return {row.name: row for row in analysed(sample, curvature, SOME + KEY_BIASES[1::2])}


@pytest.fixture(scope="module")
def references(rows):
    return {name: Reference(rows[name].tensor, TOKENS) for name in SOME}


@pytest.fixture(scope="module")
def reference_ends(references):
    return {name: reference.ends() for name, reference in references.items()}


def check_ends(row, right):
    lowest, highest = right
    assert row.converged
    assert abs(row.lambda_max - highest) <= row.lambda_max_error, row.name
    assert abs(row.lambda_min - lowest) <= row.lambda_min_error, row.name
    assert max(row.lambda_max_error, row.lambda_min_error) <= 1e-3 * max(map(abs, right)), row.name


def check_split(row):
    parts = row.from_loss + row.from_softmax + row.from_norm + row.from_activation + row.from_product
    assert parts == pytest.approx(row.lambda_max, rel=1e-9), row.name
    assert row.gauss_newton_share == pytest.approx(row.from_loss / row.lambda_max, rel=1e-12), row.name


# --- against double backward ---


@pytest.mark.parametrize("name", SOME)
def test_both_ends_agree_within_their_errors(rows, reference_ends, name):
    check_ends(rows[name], reference_ends[name])


@pytest.mark.parametrize("name", SOME)
def test_the_sources_add_up_to_lambda_max(rows, name):
    check_split(rows[name])


@pytest.mark.parametrize("name", SOME)
def test_the_norms_are_autograds(rows, references, name):
    leaf, gradient = references[name].leaf, references[name].gradient
    assert rows[name].weight_norm == pytest.approx(leaf.detach().norm().item(), rel=1e-14)
    assert rows[name].grad_norm == pytest.approx(gradient.detach().norm().item(), rel=1e-11)
    assert rows[name].n_params == leaf.numel()


def test_what_an_exact_block_adds_up_to(rows, references):
    for name in ("blocks.0.norm1.weight", "blocks.3.attn.o.bias", "final_norm.weight"):
        assert rows[name].trace == pytest.approx(np.trace(references[name].dense), rel=1e-10)
        assert 0 < rows[name].trace_stderr < 1e-10 * rows[name].trace  # rounding alone


def test_a_sampled_trace_is_within_four_standard_errors(sample, curvature, references):
    name = "blocks.3.mlp.up.bias"
    right = np.trace(references[name].dense)
    for seed in range(5):
        (row,) = analysed(sample, curvature, [name], seed)
        assert 0 < row.trace_stderr < 0.1 * right
        assert abs(row.trace - right) <= 4 * row.trace_stderr


def test_gauss_newton_is_all_there_is_after_the_last_norm(rows):
    assert rows["final_norm.weight"].gauss_newton_share == pytest.approx(1, rel=1e-12)
    assert rows["final_norm.weight"].from_softmax == rows["final_norm.weight"].from_activation == 0
    assert rows["blocks.3.mlp.down.weight"].from_softmax == 0
    assert rows["blocks.3.attn.v.weight"].from_softmax == 0  # linear in the values, and no attention comes after
    assert rows["blocks.2.attn.k.weight"].from_softmax != 0


@pytest.mark.parametrize("name", KEY_BIASES[1::2])
def test_the_key_bias_has_no_curvature_and_says_so(rows, name):
    """It shifts all scores of a row alike, which softmax does not see."""
    row = rows[name]
    assert (row.note, row.converged, row.gauss_newton_share) == ("no curvature beyond rounding", True, None)
    assert max(abs(row.lambda_max), abs(row.lambda_min), row.grad_norm) < 1e-13
    assert abs(row.lambda_max) <= row.lambda_max_error < 1e-20
    assert abs(row.lambda_min) <= row.lambda_min_error < 1e-20


def test_a_key_bias_too_wide_to_be_formed_says_so_at_once(tmp_path):
    path = tmp_path / "wide.yaml"
    path.write_text("d_model: 72\nd_ff: 8\nseq_len: 6\n")
    problem = open_problem(path)
    curvature = problem.curvature()
    calls: list[int] = []
    curvature_hvp = curvature.hvp
    curvature.hvp = lambda *args, **kwargs: calls.append(1) or curvature_hvp(*args, **kwargs)  # type: ignore
    (row,) = analysed(problem, curvature, ["blocks.0.attn.k.bias"])
    assert (row.note, row.converged) == ("no curvature beyond rounding", True)
    assert len(calls) < 10


def test_a_small_negative_end_is_not_missed():
    """Early in training the least eigenvalue is -1 percent of the largest, and the residual near zero is small."""
    problem = open_sample("early")
    name = "blocks.1.attn.v.weight"
    row = rows_of(problem, [name])[name]
    assert row.lambda_min < -0.01 * row.lambda_max
    check_ends(row, Reference(row.tensor, TOKENS, "early").ends())


def test_float32_is_within_its_own_errors(reference_ends):
    problem = open_sample(dtype="float32")
    assert problem.dtype == torch.float32
    for name, row in rows_of(problem, SOME).items():
        check_ends(row, reference_ends[name])
        parts = row.from_loss + row.from_softmax + row.from_norm + row.from_activation + row.from_product
        assert abs(parts - row.lambda_max) <= row.lambda_max_error
    (row,) = analysed(problem, problem.curvature(), KEY_BIASES[-1:])
    assert row.note == "no curvature beyond rounding"


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "dtype"), [("end", "float64"), ("early", "float32")])
def test_every_row_agrees_within_its_errors(moment, dtype):
    problem = open_sample(moment, dtype, 256)
    rows = rows_of(problem, select(problem))
    assert len(rows) == 68
    for name, row in rows.items():
        if name in KEY_BIASES:
            assert row.note == "no curvature beyond rounding"
            continue
        reference = Reference(row.tensor, 256, moment)
        check_ends(row, reference.ends())
        if dtype == "float64":
            check_split(row)
            assert row.grad_norm == pytest.approx(reference.gradient.detach().norm().item(), rel=1e-11)
        assert row.weight_norm == pytest.approx(reference.leaf.detach().norm().item(), rel=1e-14)


# --- what a row depends on ---


def test_a_row_does_not_depend_on_what_else_is_selected(sample, curvature, rows):
    names = ["blocks.3.mlp.up.bias", "final_norm.weight", "blocks.1.attn.q.weight"]
    for name in names:
        assert analysed(sample, curvature, [name]) == [rows[name]]
    assert analysed(sample, curvature, names) == [rows[name] for name in names]


def csv_of(problem, names, seed):
    curvature = problem.curvature()
    return Report(problem, float(curvature.loss), {}, [], findings(problem, curvature, names, seed)).to_csv()


def test_the_same_seed_gives_the_same_bytes(sample):
    names = ["blocks.3.mlp.up.bias", "blocks.3.norm1.bias", "blocks.3.attn.q.weight"]
    assert csv_of(sample, names, 7) == csv_of(open_sample(), names, 7) != csv_of(sample, names, 8)


def test_another_seed_gives_the_same_eigenvalues_within_the_errors(sample, curvature):
    names = ["blocks.3.mlp.up.weight", "blocks.3.attn.k.weight"]
    for one, other in zip(analysed(sample, curvature, names, 1), analysed(sample, curvature, names, 2), strict=True):
        for end in ("lambda_max", "lambda_min"):
            errors = getattr(one, f"{end}_error") + getattr(other, f"{end}_error")
            assert abs(getattr(one, end) - getattr(other, end)) <= errors
        assert one.lambda_min != other.lambda_min
        assert abs(one.trace - other.trace) <= 4 * (one.trace_stderr**2 + other.trace_stderr**2) ** 0.5


def test_the_tolerance_bounds_the_errors(sample, curvature):
    for tolerance in (1e-1, 1e-6):
        (row,) = analysed(sample, curvature, ["blocks.3.attn.o.weight"], tolerance=tolerance)
        assert row.converged
        assert row.lambda_min_error <= tolerance * row.lambda_max
    assert row.lambda_min_error > 1e-9


def test_running_out_of_steps_is_noted(sample, curvature, rows, monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS", 4)
    (row,) = analysed(sample, curvature, ["blocks.3.attn.v.weight"])
    assert (row.converged, row.note) == (False, "not converged")
    right = rows["blocks.3.attn.v.weight"]
    assert abs(row.lambda_max - right.lambda_max) <= row.lambda_max_error
    assert abs(row.lambda_min - right.lambda_min) <= row.lambda_min_error


def test_products_that_overflow_are_noted_and_the_rest_goes_on(sample, curvature, rows, monkeypatch):
    original = Curvature.hvp

    def overflowing(self, tangent, *args, **kwargs):
        products = original(self, tangent, *args, **kwargs)
        return {name: p * torch.inf for name, p in products.items()} if "final_norm.bias" in tangent else products

    monkeypatch.setattr(Curvature, "hvp", overflowing)
    broken, sound = analysed(sample, curvature, ["final_norm.bias", "final_norm.weight"])
    assert (broken.note, broken.converged) == ("a product with the Hessian is not finite", False)
    assert [broken.lambda_max, broken.lambda_min, broken.trace, broken.from_loss] == [None] * 4
    assert broken.grad_norm > 0
    assert sound == rows["final_norm.weight"]


# --- what is opened and selected ---


@pytest.mark.parametrize("moment", ["early", "middle", "end"])
def test_every_checkpoint_of_the_run_opens(moment):
    problem = open_sample(moment, max_tokens=64)
    curvature = problem.curvature()
    right = Reference("transformer.ln_f.bias", 64, moment)
    assert float(curvature.loss) == pytest.approx(right.loss.item(), rel=1e-13)
    (row,) = analysed(problem, curvature, ["final_norm.bias"])
    check_ends(row, right.ends())
    assert row.lambda_min > 0  # nothing but Gauss-Newton


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 4096, 9999])
def test_max_tokens(tokens):
    problem = open_sample(max_tokens=tokens)
    data = read_data(VAL, problem.spec, tokens)
    assert problem.scored == min(tokens, 4096) == int((data.target != -100).sum())
    said = [f"only the first {tokens} of 4096 tokens are scored"] if tokens < 4096 else []
    assert list(problem.notes) == said
    assert sum(batch.share for batch in problem.batches) == pytest.approx(1, abs=1e-12)


def test_the_default_precision_is_float64_for_a_small_model(sample):
    assert sample.dtype == torch.float64


def test_without_tokens_the_data_are_random_and_that_is_noted():
    one, again, other = (open_problem(FOLDER / "ckpt-end.pt", seed=seed) for seed in (0, 0, 1))
    assert "not its real curvature" in one.notes[-1]
    assert one.provenance["data"] == "drawn from seed 0"
    assert float(one.curvature().loss) == float(again.curvature().loss) != float(other.curvature().loss)


def test_the_tied_head_is_noted_and_any_note_follows_it(sample, curvature, rows, monkeypatch):
    assert [row.name for row in rows.values() if "tied" in row.note] == ["embed.token.weight"]
    assert rows["embed.token.weight"].note == "also the head (tied)"
    assert rows["embed.token.weight"].tensor == "transformer.wte.weight"
    monkeypatch.setattr(module, "MAX_STEPS", 2)
    (row,) = analysed(sample, curvature, ["embed.token.weight"])
    assert row.note == "also the head (tied); not converged"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("blocks.3.attn.q.weight", (3, "attn.q", "weight")),
        ("blocks.12.norm1.bias", (12, "norm1", "bias")),
        ("embed.token.weight", (None, "embed.token", "weight")),
        ("final_norm.bias", (None, "final_norm", "bias")),
    ],
)
def test_a_name_has_a_layer_a_component_and_a_parameter(rows, name, parts):
    assert place(name) == parts
    if name in rows:
        assert (rows[name].layer, rows[name].component, rows[name].parameter) == parts


def test_the_columns_are_those_of_a_row(rows):
    assert tuple(asdict(rows["final_norm.weight"])) == COLUMNS


@pytest.mark.parametrize(
    ("layers", "components", "count"),
    [
        (None, None, 68),
        ("0", None, 16),
        ("0,3", None, 32),
        ("1-3", None, 48),
        (" 1 , 2-3,2", None, 48),
        (None, "attn.*", 32),
        (None, "attn.q", 8),
        (None, "attn.q,mlp.*", 24),
        (None, " attn.q , norm?", 24),
        (None, "embed.*,final_norm", 4),
        ("2", "*.down", 2),
        ("2", "norm[12]", 4),
    ],
)
def test_selection(sample, layers, components, count):
    names = select(sample, layers, components)
    assert len(names) == len(set(names)) == count
    order = list(sample.graph.parameters)
    assert names == sorted(names, key=order.index)


OF_A_LAYER = "attn.k, attn.o, attn.q, attn.v, mlp.down, mlp.up, norm1, norm2"
ELSEWHERE = "; it is in no layer of --layers 0: leave that out"
OF_A_MODEL = OF_A_LAYER.replace("mlp", "embed.position, embed.token, final_norm, mlp", 1)


@pytest.mark.parametrize(
    ("layers", "components", "message"),
    [
        ("4", None, "--layers 4: the model has layers 0 to 3"),
        ("0-4", None, "--layers 0-4: the model has layers 0 to 3"),
        ("3-1", None, "--layers 3-1: 3-1 runs backwards, write 1-3"),
        ("0,3-1", None, "--layers 0,3-1: 3-1 runs backwards, write 1-3"),
        ("9" * 5000, None, f"--layers {'9' * 80}...: the model has layers 0 to 3"),
        ("0-99999999999", None, "--layers 0-99999999999: the model has layers 0 to 3"),
        ("", None, "--layers : layers are given as 0,3-5"),
        ("-1", None, "--layers -1: layers are given as 0,3-5"),
        ("0-", None, "--layers 0-: layers are given as 0,3-5"),
        ("1.5", None, "--layers 1.5: layers are given as 0,3-5"),
        ("two", None, "--layers two: layers are given as 0,3-5"),
        (None, "attention", f"--components attention matches nothing among {OF_A_MODEL}"),
        ("0", "final_norm", f"--components final_norm matches nothing among {OF_A_LAYER}{ELSEWHERE}"),
        ("0", "", f"--components '' matches nothing among {OF_A_LAYER}"),
        (None, "attn.*,foo", f"--components foo matches nothing among {OF_A_MODEL}"),
        ("0", "attn.*,final_norm", f"--components final_norm matches nothing among {OF_A_LAYER}{ELSEWHERE}"),
    ],
)
def test_a_selection_of_nothing_is_refused(sample, layers, components, message):
    with pytest.raises(UsageError) as caught:
        select(sample, layers, components)
    assert str(caught.value) == message


def test_the_cost_is_products_times_layers(sample):
    """Early blocks pass more layers, wide ones take more products up to those of the estimates."""
    costs = {name: cost(sample, name) for name in sample.graph.parameters}
    assert all(value > 0 for value in costs.values())
    assert costs["blocks.0.mlp.up.weight"] == 4 * costs["blocks.3.mlp.up.weight"]
    assert costs["embed.token.weight"] == costs["blocks.0.attn.q.weight"]
    assert costs["final_norm.bias"] == min(costs.values())


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "--dtype float16: give one of float64, float32"),
        ({"seed": -1}, "--seed -1: give a number from 0 to 2^64 - 1"),
        ({"seed": 2**64}, f"--seed {2**64}: give a number from 0 to 2^64 - 1"),
        ({"max_tokens": 5}, "--max-tokens needs --data: drawn data are scored whole"),
        ({"max_tokens": 0, "data": VAL}, f"{VAL}: max_tokens is 0: at least one token must be scored"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, message):
    with pytest.raises(UsageError) as caught:
        open_problem(FOLDER / "ckpt-end.pt", **arguments)
    assert str(caught.value).endswith(message.removeprefix(f"{VAL}: "))


def test_a_spec_has_no_tokens():
    with pytest.raises(UsageError, match="--data has no meaning"):
        open_problem(Path(__file__).parent.parent / "configs/blocks/paper-block.yaml", VAL)


def test_a_loss_that_is_not_finite_is_refused(sample):
    weights = dict(sample.parameters) | {"final_norm.bias": torch.full((64,), 1e308, dtype=torch.float64)}
    problem = Problem("big.pt", sample.spec, weights, sample.batches, sample.scored)
    with pytest.raises(InputError, match=r"big\.pt: the loss is (nan|inf), so there is nothing to analyse"):
        problem.curvature()
