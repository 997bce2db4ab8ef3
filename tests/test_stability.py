"""How near the edge: on the sample run the sharpness is double backward's; verdicts say what is known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

from hesscore.analysis import WHOLE, Analyst, Row
from hesscore.checkpoints.optimizer import Adam, Settings
from hesscore.inputs.reading import read_data
from hesscore.problem import open_problem
from hesscore.spec import Spec
from hesscore.stability import stability as judge
from tests import reference_nanogpt

FOLDER = Path(__file__).parent.parent / "sample_runs" / "pydoc"
CHECKPOINT, VAL, TOKENS = FOLDER / "ckpt-end.pt", FOLDER / "val.bin", 64


def stability(*arguments: Any) -> Any:
    """Without its types: what is checked here is there."""
    return judge(*arguments)


@pytest.fixture(scope="module")
def analyst():
    problem = open_problem(CHECKPOINT, VAL, max_tokens=TOKENS)
    return Analyst(problem, problem.curvature())


def reference():
    """The top eigenvalue of ``D^-1/2 H D^-1/2`` by autograd and ARPACK, with torch's own moments."""
    content = torch.load(CHECKPOINT, weights_only=True)
    names = [name for name in content["model"] if name != "lm_head.weight"]
    leaves = [content["model"][name].double().requires_grad_() for name in names]
    state = dict(zip(names, leaves, strict=True))
    data = read_data(VAL, Spec(d_model=1, d_ff=0, vocab=96, seq_len=128), TOKENS)
    tied = state | {"lm_head.weight": state["transformer.wte.weight"]}
    loss = reference_nanogpt.loss(tied, content["model_args"], data.data, data.target)
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    order = [*(n for n in names if state[n].ndim > 1), *(n for n in names if state[n].ndim == 1)]
    scale = []
    for name in names:
        entry = content["optimizer"]["state"][order.index(name)]
        t = float(entry["step"])
        root = (entry["exp_avg_sq"].double() / (1 - 0.99**t)).sqrt() + 1e-8
        scale.append(((1 - 0.9**t) * root).rsqrt().flatten())
    scales = torch.cat(scale).numpy()

    def product(v):
        parts = torch.from_numpy(scales * v.ravel()).split([leaf.numel() for leaf in leaves])
        seeds = [part.view_as(leaf) for part, leaf in zip(parts, leaves, strict=True)]
        found = torch.autograd.grad(gradients, leaves, seeds, retain_graph=True, materialize_grads=True)
        return scales * torch.cat([g.flatten() for g in found]).numpy()

    n = len(scales)
    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    return float(eigsh(operator, 1, which="LA", tol=1e-7, return_eigenvectors=False)[0])


def test_the_preconditioned_sharpness_is_double_backwards(analyst):
    row = analyst.whole().row
    assert row.preconditioned_sharpness_error < 0.02 * row.preconditioned_sharpness
    assert abs(row.preconditioned_sharpness - reference()) <= row.preconditioned_sharpness_error


@pytest.mark.parametrize("name", ["blocks.3.norm2.weight", "blocks.3.mlp.up.bias"])
def test_that_of_a_block_is_that_of_its_matrix(analyst, name):
    """One that is formed whole, and one that is not."""
    row = analyst.block(name).row
    matrix = analyst.curvature.dense([name])
    scale = analyst.problem.optimizer.preconditioner(name).flatten().rsqrt()
    right = float(torch.linalg.eigvalsh(scale[:, None] * (matrix + matrix.T) / 2 * scale)[-1])
    assert abs(row.preconditioned_sharpness - right) <= row.preconditioned_sharpness_error
    assert row.preconditioned_sharpness_error < 0.02 * right


def row(component, top, error=0.0, sharpness=None, doubt=None):
    known = {"layer": None, "component": component, "parameter": "weight", "tensor": "", "shape": (1,), "n_params": 1}
    found = Row(**known, weight_norm=1.0, grad_norm=1.0, lambda_max=top, lambda_max_error=error, lambda_min=0.0)
    return replace(
        found, lambda_min_error=0.0, preconditioned_sharpness=sharpness, preconditioned_sharpness_error=doubt
    )


ADAM = Adam({}, {"a": Settings(1e-2, 0.9, 0.999, 1e-8, 10)})


def test_the_limit_of_gradient_descent_is_two_over_lambda_max():
    found = stability([row("a", 4.0), row("b", 8.0)], row(WHOLE, 10.0, 2.0), None)
    assert (found.gradient_descent.lr_limit, found.gradient_descent.first) == (0.2, "b.weight")
    assert (found.gradient_descent.lr_limit_low, found.gradient_descent.lr_limit_high) == (2 / 12, 2 / 8)
    assert found.adam is None
    assert found.verdict == [
        "Gradient descent is stable up to a learning rate of 0.20(5); b.weight would be the first to cross."
    ]


@pytest.mark.parametrize(
    ("sharpness", "doubt", "said"),
    [
        (1900.0, 1.0, "is at 0.500"),
        (3990.0, 1.0, "is at 1.050"),
        (3800.0, 38.0, "is at 1.00(1) of the edge of stability, at it"),
        (100.0, 200.0, "has not been found to within its error"),
    ],
)
def test_adams_share_of_its_limit(sharpness, doubt, said):
    """``(2 + 2 0.9)/((1 - 0.9) 0.01) = 3800``."""
    rows = [row("a", 1.0, sharpness=3.0, doubt=0.1), row("b", 2.0, sharpness=2.0, doubt=0.1)]
    found = stability(rows, row(WHOLE, 3.0, sharpness=sharpness, doubt=doubt), ADAM)
    assert found.adam.limit == pytest.approx(3800, rel=1e-12)
    assert found.adam.share == pytest.approx(sharpness / 3800, rel=1e-12)
    assert found.adam.share_error == pytest.approx(doubt / 3800, rel=1e-12)
    assert found.adam.first == "a.weight"
    assert said in found.verdict[1]
    assert ("stability, within it" in found.verdict[1]) == (sharpness == 1900)
    assert ("stability, beyond it" in found.verdict[1]) == (sharpness == 3990)


def test_what_is_not_known_is_said():
    assert stability([row("a", 1.0)], row(WHOLE, 1.0, 2.0), None).verdict == [
        "How steep the loss is has not been found to within its error: it takes more time."
    ]
    found = stability([row("a", -1.0)], row(WHOLE, -1.0), None)
    assert found.gradient_descent is None
    assert "curves upwards in no direction" in found.verdict[0]
