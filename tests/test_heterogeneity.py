"""Heterogeneity: every number against its definition, on blocks that are known."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from hesscore import heterogeneity as module
from hesscore.analysis import Finding, Row
from hesscore.heterogeneity import gini, histogram
from hesscore.spectrum.sampling import Density


def heterogeneity(*arguments: Any) -> Any:
    """Without its types: what is checked here is there."""
    return module.heterogeneity(*arguments)


def finding(name, size, slope, top, low=0.0, error=0.0, spectrum=None):
    known = {"layer": None, "component": name, "parameter": "weight", "tensor": "", "shape": (size,), "n_params": size}
    row = Row(
        **known,
        weight_norm=1.0,
        grad_norm=slope,
        lambda_max=top,
        lambda_max_error=error,
        lambda_min=low,
        lambda_min_error=error,
    )
    density = None
    if spectrum is not None:
        values = torch.tensor(sorted(spectrum), dtype=torch.float64)
        density = Density(values, torch.full_like(values, 1 / len(values)))
    return Finding(row, density)


def gradients(findings):
    """Of the norms that the rows say, with all entries alike."""
    return {
        f.row.name: torch.full((f.row.n_params,), f.row.grad_norm / f.row.n_params**0.5, dtype=torch.float64)
        for f in findings
    }


BLOCKS = [finding("a", 100, 3.0, 5.0, -1.0, 0.1), finding("b", 300, 4.0, 2.0, -8.0, 0.2), finding("c", 600, 0.5, 1.0)]


@pytest.fixture(scope="module")
def found():
    return heterogeneity(BLOCKS, gradients(BLOCKS))


def test_the_weighted_norms(found):
    square = 9 + 16 + 0.25
    assert found.blocks == 3
    assert found.lambda_g == pytest.approx((9 * 5 + 16 * 8 + 0.25 * 1) / square, rel=1e-12)
    assert found.lambda_g_error == pytest.approx((9 * 0.1 + 16 * 0.2) / square, rel=1e-12)
    assert found.lambda_p == pytest.approx((100 * 5 + 300 * 8 + 600 * 1) / 1000, rel=1e-12)
    assert found.lambda_p_error == pytest.approx((100 * 0.1 + 300 * 0.2) / 1000, rel=1e-12)


def test_the_best_steps_are_those_of_the_quadratic_model(found):
    """Found by trying step lengths, not by the formula."""
    g = gradients(BLOCKS)
    norms = {"a.weight": 5.0, "b.weight": 8.0, "c.weight": 1.0}

    def decrease(direction):
        lengths = torch.logspace(-6, 1, 20001, dtype=torch.float64)
        slope = sum(float((g[name] * direction[name]).sum()) for name in g)
        bend = sum(norms[name] * float(direction[name].square().sum()) for name in g)
        return float((lengths * slope - lengths.square() * bend / 2).max())

    assert found.gd_decrease == pytest.approx(decrease(g), rel=1e-6)
    assert found.sign_decrease == pytest.approx(decrease({name: part.sign() for name, part in g.items()}), rel=1e-6)
    assert found.sign_over_gd == pytest.approx(found.sign_decrease / found.gd_decrease, rel=1e-12)
    taxicab = 3 * 10 + 4 * 300**0.5 + 0.5 * 600**0.5
    assert found.gradient_density == pytest.approx(taxicab**2 / (1000 * 25.25), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "right"), [([1, 1, 1, 1], 0), ([0, 0, 0, 1], 0.75), ([1, 2, 3], 2 / 9), ([0, 0], 0)]
)
def test_gini(values, right):
    assert gini(np.array(values, dtype=float)) == pytest.approx(right, abs=1e-12)
    assert gini(np.array(values[::-1], dtype=float)) == pytest.approx(right, abs=1e-12)


def test_gini_is_the_mean_difference():
    values = np.random.default_rng(0).exponential(size=40)
    right = np.abs(values[:, None] - values).mean() / (2 * values.mean())
    assert gini(values) == pytest.approx(right, rel=1e-12)


def test_the_correlation_is_spearmans(found):
    right = spearmanr([3.0, 4.0, 0.5], [5.0, 8.0, 1.0])
    assert found.correlation == pytest.approx(right.statistic) == 1
    alike = [finding(name, 10, 1.0, float(i)) for i, name in enumerate("abc", 1)]
    assert heterogeneity(alike, gradients(alike)).correlation is None


def test_distances_of_spectra():
    """The same spectrum is at 0, one that has nothing in common at 1, half in common at ``sqrt`` of its divergence."""
    spectra = {"a": [1.0, 1.0, -1.0, -1.0], "b": [1.0, 1.0, -1.0, -1.0], "c": [1e-2] * 4, "d": [1.0, 1.0, 1e-2, 1e-2]}
    blocks = [finding(name, 4, 1.0, max(s), min(s), spectrum=s) for name, s in spectra.items()]
    found = heterogeneity(blocks, gradients(blocks))
    assert found.js_blocks == [f"{name}.weight" for name in "abcd"]
    matrix = np.array(found.js_distances)
    assert (matrix == matrix.T).all()
    assert matrix[0, 1] == pytest.approx(0, abs=1e-7)
    assert matrix[0, 2] == pytest.approx(1, abs=1e-12)
    p, q = np.array([0.5, 0.5, 0]), np.array([0.5, 0, 0.5])
    m = (p + q) / 2
    divergence = sum(0.5 * x * np.log2(x / y) for a in (p, q) for x, y in zip(a, m, strict=True) if x)
    assert matrix[0, 3] == pytest.approx(divergence**0.5, rel=1e-9)
    assert found.js_mean == pytest.approx(matrix[np.triu_indices(4, 1)].mean(), rel=1e-12)


def test_the_classes_of_eigenvalues():
    """By sign and half a decade, and one for what is nearly zero."""
    values = torch.tensor([-1.0, -0.2, -1e-9, 0.0, 1e-7, 2e-6, 0.5, 0.4, 1.0], dtype=torch.float64)
    counts = histogram(Density(values, torch.full_like(values, 1 / 9)), 1.0) * 9
    assert counts.sum() == pytest.approx(9)
    assert counts[0] == pytest.approx(1)  # -1
    assert counts[1] == pytest.approx(1)  # -0.2
    assert counts[12] == pytest.approx(3)  # nearly zero
    assert counts[24] == pytest.approx(3)  # 1, 0.5 and 0.4, down to 0.316
    assert counts[13] == pytest.approx(1)  # 2e-6


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([finding("a", 1000, 1.0, 1.0), finding("b", 10, 30.0, 1000.0)], "sign descent (the family of Adam) gains"),
        ([finding("a", 1000, 30.0, 1.0), finding("b", 1000, 0.1, 1000.0)], "A step of gradient descent gains"),
        ([finding("a", 100, 1.0, 1.0), finding("b", 100, 1.0, 1.0)], "Neither is clearly favoured"),
        ([finding("a", 1000, 1.0, 1.0), finding("b", 10, 30.0, 1000.0, error=999.0)], "Neither is clearly favoured"),
        ([finding("a", 10, 0.0, 1.0), finding("b", 10, 0.0, 1.0)], "There is no gradient"),
    ],
)
def test_the_verdict(blocks, said):
    assert said in heterogeneity(blocks, gradients(blocks)).verdict


def test_one_block_is_like_no_other():
    assert heterogeneity(BLOCKS[:1], gradients(BLOCKS[:1])) is None
