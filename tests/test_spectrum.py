"""Ends and traces of spectra that are known: each within its own error, and each error no larger than it must be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hesscore import memory
from hesscore.curvature import Curvature
from hesscore.spectrum import ends as module
from hesscore.spectrum import lanczos as krylov_module
from hesscore.spectrum.ends import NonFiniteError, ends
from hesscore.spectrum.lanczos import lanczos, unit
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference
from tests.test_curvature import SPEC


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def matrix_of(eigenvalues, seed=0):
    """A matrix with these eigenvalues and random eigenvectors."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    vectors = torch.linalg.qr(randn(len(values), len(values), seed=seed)).Q
    matrix = (vectors * values) @ vectors.T
    return (matrix + matrix.T) / 2


def run(matrix, tolerance=1e-10, steps=1000, seed=1):
    return lanczos(lambda v: matrix @ v, randn(len(matrix), seed=seed).to(matrix), tolerance, steps)


def residuals(matrix, krylov):
    return (matrix @ krylov.vectors - krylov.vectors * krylov.values).norm(dim=0)


def line(low, high, n):
    return torch.linspace(low, high, n, dtype=torch.float64).tolist()


SPECTRA = {
    "one": [-3.0],
    "two": [-1.0, 2.0],
    "positive end largest": [5.0, -4.9, *line(-1, 1, 78)],
    "negative end largest": [4.0, -5.0, *line(-1, 1, 78)],
    "one outlier": [100.0, *line(-1, 1, 99)],
    "multiple": [5.0] * 3 + [1.0] * 30 + [-2.0] * 7,
    "all equal": [0.7] * 50,
    "zero": [0.0] * 40,
    "rank one": [3.0] + [0.0] * 59,
    "negative rank one": [-3.0] + [0.0] * 59,
    "clustered ends": [1.0, 1 - 1e-6, 1 - 2e-6, *line(-0.5, 0.5, 60), -1.0, -1 + 1e-6],
    "no trace": [*line(1, 2, 30), *line(-2, -1, 30)],
    "small negative tail": [1.0, *line(0, 0.1, 90), *line(-0.01, 0, 10)],
    "sixteen decades": [10.0**-i for i in range(17)] + [0.0] * 30,
}


# --- lanczos ---


@pytest.mark.parametrize("name", SPECTRA)
def test_both_ends_are_right(name):
    values, matrix = sorted(SPECTRA[name]), matrix_of(SPECTRA[name])
    krylov = run(matrix)
    size = max(map(abs, values))
    assert abs(krylov.values[0] - values[0]) <= 1e-13 * size
    assert abs(krylov.values[1] - values[-1]) <= 1e-13 * size
    assert (residuals(matrix, krylov) <= 1e-10 * size + 1e-14).all()
    assert (krylov.beyond <= 1e-10 * size).all()
    torch.testing.assert_close(krylov.vectors.norm(dim=0), torch.ones(2).double(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", SPECTRA)
def test_the_basis_is_orthonormal_and_has_the_diagonal(name):
    matrix = matrix_of(SPECTRA[name])
    krylov = run(matrix, tolerance=1e-14)
    basis = krylov.basis
    assert (basis @ basis.T - torch.eye(len(basis))).abs().max() < 1e-13
    size = max(map(abs, SPECTRA[name]))
    assert (krylov.diagonal - (basis @ matrix @ basis.T).diag()).abs().max() <= 1e-13 * size


@pytest.mark.parametrize(
    ("name", "steps"), [("zero", 1), ("all equal", 1), ("rank one", 2), ("multiple", 3), ("two", 2)]
)
def test_it_ends_when_every_distinct_eigenvalue_is_found(name, steps):
    krylov = run(matrix_of(SPECTRA[name]), tolerance=1e-9)
    assert len(krylov.basis) == steps


def test_converged_eigenvalues_leave_no_ghosts():
    """Without re-orthogonalisation the largest appear several times, long before the end."""
    values = [2.0**-i for i in range(60)]
    matrix = matrix_of(values)
    basis = run(matrix, tolerance=1e-16, steps=40).basis
    found = torch.linalg.eigvalsh(basis @ matrix @ basis.T).flip(0)
    torch.testing.assert_close(found[:8], torch.tensor(values[:8]).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13])
def test_an_eigenvalue_lies_within_the_residual(steps):
    for seed in range(20):
        values = randn(60, seed=seed) ** 3
        krylov = run(matrix_of(values, seed), tolerance=1e-12, steps=steps, seed=seed + 100)
        assert len(krylov.basis) == steps
        distance = (values[:, None] - krylov.values).abs().min(0).values
        assert (distance <= residuals(matrix_of(values, seed), krylov) + 1e-13).all()


HIDDEN = {
    "a tail": [1.0, *[10 ** -(3 * i / 50) for i in range(1, 50)], *[-(10 ** -(2 + 2 * i / 9)) for i in range(10)]],
    "behind a multiple": [1.0] * 200 + [1.05, -0.02],
    "among zeros": [1.0, -0.02],
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_small_end_is_not_missed(name):
    """The residuals alone are small from the first steps on, at eigenvalues that are not the last."""
    values = torch.zeros(2000, dtype=torch.float64)
    values[: len(HIDDEN[name])] = torch.tensor(HIDDEN[name], dtype=torch.float64)
    for seed in range(50):
        krylov = lanczos(lambda v: values[:, None] * v, randn(2000, seed=seed), 1e-3, 200)
        assert abs(krylov.values[0] - values.min()) <= 1e-3
        assert abs(krylov.values[1] - values.max()) <= 1e-3


@pytest.mark.parametrize("name", ["small negative tail", "one outlier", "clustered ends", "multiple", "rank one"])
def test_the_spectrum_ends_within_beyond_after_any_number_of_steps(name):
    values = torch.tensor(SPECTRA[name], dtype=torch.float64)
    for steps in range(1, 20):
        for seed in range(5):
            krylov = lanczos(lambda v: values[:, None] * v, randn(len(values), seed=seed), 1e-12, steps)
            assert krylov.values[0] - krylov.beyond[0] <= values.min() + 1e-12
            assert krylov.values[1] + krylov.beyond[1] >= values.max() - 1e-12


def test_the_chance_of_a_miss_is_as_stated(monkeypatch):
    """And not far below it, so that no steps are wasted: an eigenvalue beyond a thousand others, after few steps."""
    monkeypatch.setattr(krylov_module, "MISSED", 0.2)
    values = torch.linspace(0, 1, 1000, dtype=torch.float64)
    values[0] = -0.05
    missed = 0
    for seed in range(300):
        krylov = lanczos(lambda v: values[:, None] * v, randn(1000, seed=seed), 1e-9, 12)
        missed += int(krylov.values[0] - krylov.beyond[0] > -0.05)
    assert 10 <= missed <= 60 + 3 * 7  # the standard deviation of 300 draws at 0.2 is 7


def test_a_start_in_an_invariant_subspace_sees_that_subspace():
    values = torch.tensor([5.0, 3.0, 1.0, -2.0, -7.0], dtype=torch.float64)
    product, start = (lambda v: values[:, None] * v), torch.tensor([0.0, 1, 1, 1, 0], dtype=torch.float64)
    krylov = lanczos(product, start, 1e-12, 100)
    assert len(krylov.basis) == 3
    torch.testing.assert_close(krylov.values, torch.tensor([-2.0, 3.0]).double(), rtol=1e-14, atol=0)
    alone = lanczos(product, torch.tensor([0.0, 0, 4, 0, 0], dtype=torch.float64), 1e-12, 100)
    assert (len(alone.basis), alone.values.tolist()) == (1, [1.0, 1.0])


def test_no_more_products_than_steps():
    calls = []
    matrix = matrix_of(randn(50))

    def product(v):
        calls.append(v.shape)
        return matrix @ v

    krylov = lanczos(product, randn(50), 1e-15, 7)
    assert calls == [(50, 1)] * 7
    assert krylov.basis.shape == (7, 50)


@pytest.mark.parametrize("name", SPECTRA)
def test_float32_is_as_good_as_float32_can_be(name):
    values, matrix = sorted(SPECTRA[name]), matrix_of(SPECTRA[name]).float()
    krylov = run(matrix, tolerance=1e-5)
    size = max(map(abs, values))
    assert krylov.basis.dtype == krylov.vectors.dtype == torch.float32
    assert abs(krylov.values[0] - values[0]) <= 1e-5 * size
    assert abs(krylov.values[1] - values[-1]) <= 1e-5 * size
    assert (krylov.basis @ krylov.basis.T - torch.eye(len(krylov.basis))).abs().max() < 1e-5


def test_sums_over_millions_of_float32_keep_their_digits():
    n = 3_000_000
    start = torch.randn(n, generator=generator())
    assert float((unit(start).double() ** 2).sum()) == pytest.approx(1, abs=1e-7)
    values = torch.linspace(1, 2, n)
    values[0], values[1] = -5, 7
    krylov = lanczos(lambda v: values[:, None] * v, start, 1e-4, 20)
    assert krylov.values.tolist() == pytest.approx([-5, 7], rel=1e-6)
    assert (krylov.basis.double() @ krylov.basis.double().T - torch.eye(len(krylov.basis))).abs().max() < 1e-6


# --- ends ---


def block_of(matrix, product=None) -> Any:
    """What ``ends`` uses of a block."""

    class Block:
        shape = tuple(matrix.shape)
        owner = SimpleNamespace(loss=matrix.new_zeros(()))
        at_once = 16
        products = 0

        def __matmul__(self, vectors):
            Block.products += 1
            return product(vectors) if product else matrix @ vectors

        def attribution(self, vectors):
            """A third and two thirds."""
            whole = (vectors * (self @ vectors)).sum(0)
            return {"one": whole / 3, "other": 2 * whole / 3}

    return Block()


@pytest.fixture(scope="module")
def small():
    weights, data = reference.draw(SPEC, padding=1)
    return Curvature(model(SPEC), inputs(SPEC, **data) | weights)


@pytest.mark.parametrize("iterate", [False, True])
def test_every_block_of_a_model(small, iterate, monkeypatch):
    """Formed whole or by Lanczos: within the errors of the eigenvalues of the dense matrix."""
    if iterate:
        monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    for name in small.parameters:
        matrix = small.dense([name])
        found = ends(small.block(name), 1e-3, generator())
        assert found.converged
        exact = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        if name.endswith("attn.k.bias"):
            assert found.flat
            assert exact.abs().max() < 1e-15
            continue
        assert not found.flat
        for value, error, right in zip(found.values, found.errors, exact[[0, -1]].tolist(), strict=True):
            assert abs(value - right) <= error <= 1e-3 * exact.abs().max()
        quotients = (found.vectors * (matrix @ found.vectors)).sum(0)
        assert quotients.tolist() == pytest.approx(found.values, abs=1e-13)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in SPECTRA if name != "zero"])
def test_the_error_covers_the_rounding_too(name, kind):
    values = torch.tensor(SPECTRA[name] * 3).double().sort().values  # more than are formed whole
    for n in (len(SPECTRA[name]), len(values)):
        some = values[:: len(values) // n]
        found = ends(block_of(matrix_of(some).to(kind)), 1e-4, generator())
        assert found.converged
        assert abs(found.values[0] - some[0]) <= found.errors[0]
        assert abs(found.values[1] - some[-1]) <= found.errors[1]
        assert found.values[0] <= found.values[1]


@pytest.mark.parametrize("n", [30, 300])
def test_a_block_of_rounding_is_flat_and_costs_little(n):
    a, b = matrix_of(randn(n)), matrix_of(randn(n, seed=1), seed=2)
    block = block_of(a, lambda v: a @ v + b @ v - (a + b) @ v)
    found = ends(block, 1e-3, generator())
    assert (found.flat, found.converged) == (True, True)
    assert max(map(abs, found.values)) < 1e-13
    assert block.products <= 6


@pytest.mark.parametrize("n", [1, 30, 300])
def test_a_block_of_zeros_is_flat(n):
    found = ends(block_of(torch.zeros(n, n, dtype=torch.float64)), 1e-3, generator())
    assert (found.flat, found.converged, found.values) == (True, True, (0.0, 0.0))
    assert found.errors == (0.0, 0.0)


def test_equal_ends_come_in_order():
    for seed in range(20):
        found = ends(block_of(matrix_of([0.7] * 100).float()), 1e-3, generator(seed))
        assert found.values[0] <= found.values[1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("n", [5, 100])
def test_a_product_that_is_not_finite_is_said(n, bad):
    matrix = torch.eye(n, dtype=torch.float64)
    matrix[n // 2, n // 2] = bad
    with pytest.raises(NonFiniteError):
        ends(block_of(matrix), 1e-3, generator())


@pytest.mark.parametrize("n", [3, 100])
def test_an_error_that_overflows_is_not_finite(n):
    """The products are finite, but not their norms: nothing can be said of such a block."""
    with pytest.raises(NonFiniteError):
        ends(block_of(matrix_of(line(-1e200, 1e200, n))), 1e-3, generator())


def test_running_out_of_steps_is_said(monkeypatch):
    values = line(-1, 1, 200)
    assert ends(block_of(matrix_of(values)), 1e-3, generator()).converged
    monkeypatch.setattr(module, "MAX_STEPS", 5)
    found = ends(block_of(matrix_of(values)), 1e-3, generator())
    assert (found.converged, found.flat) == (False, False)
    assert abs(found.values[0] + 1) <= found.errors[0]
    assert abs(found.values[1] - 1) <= found.errors[1]


@pytest.mark.parametrize("seed", range(5))
def test_a_small_residual_alone_is_no_small_error(seed, monkeypatch):
    """After eleven steps the residuals of both ends are small; the lower one is at another eigenvalue."""
    monkeypatch.setattr(module, "MAX_STEPS", 11)
    values = torch.zeros(2000, dtype=torch.float64)
    values[: len(HIDDEN["a tail"])] = torch.tensor(HIDDEN["a tail"], dtype=torch.float64)
    block = block_of(torch.empty(2000, 2000, dtype=torch.float64), lambda v: values[:, None] * v)
    found = ends(block, 1e-3, generator(seed))
    assert not found.converged
    assert found.values[0] + 0.01 <= found.errors[0]
    assert 1 - found.values[1] <= found.errors[1]


def test_the_steps_fit_the_free_memory(monkeypatch):
    n = 1000
    values = torch.tensor(line(-1, 1, n), dtype=torch.float64)
    block = block_of(torch.empty(n, n, dtype=torch.float64), lambda v: values[:, None] * v)
    monkeypatch.setattr(memory, "free", lambda: 2 * 8 * n * 10)
    assert not ends(block, 1e-3, generator()).converged
    assert block.products == 1 + 10 + 1  # rounding, ten steps, the ends


def test_the_same_seed_gives_the_same_numbers(small, monkeypatch):
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    block = small.block("blocks.0.mlp.up.weight")
    first, again, other = (ends(block, 1e-3, generator(seed)) for seed in (5, 5, 6))
    assert (first.values, first.errors) == (again.values, again.errors)
    assert first.values != other.values
    assert torch.equal(first.vectors, again.vectors)


def test_float32_is_within_its_errors_where_attention_saturates():
    """Scores in the hundreds have few digits left in float32, and a product does not show it."""
    weights, data = reference.draw(SPEC, padding=1)
    for name in weights:
        if name.endswith(("attn.q.weight", "attn.k.weight")):
            weights[name] *= 30
    rounded = {name: weight.float() for name, weight in weights.items()}
    graph, constants = model(SPEC), inputs(SPEC, **data)
    exact = Curvature(graph, constants | {name: weight.double() for name, weight in rounded.items()})
    ours = Curvature(graph, constants | rounded)
    for name in exact.parameters:
        right, found = (ends(c.block(name), 1e-3, generator()) for c in (exact, ours))
        for value, error, truth, doubt in zip(found.values, found.errors, right.values, right.errors, strict=True):
            assert abs(value - truth) <= error + doubt
