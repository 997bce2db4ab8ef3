"""Traces, densities and what follows from them, of spectra that are known: unbiased, and as far off as they say."""

import math
from typing import Any

import pytest
import torch
from scipy.stats import t as student

from hesscore.budget import Stop
from hesscore.curvature import Curvature
from hesscore.spectrum import condition as condition_module
from hesscore.spectrum import sampling
from hesscore.spectrum.ends import ends
from hesscore.spectrum.lanczos import lanczos, lockstep, tridiagonal
from hesscore.spectrum.sampling import NORMAL, QUANTILE, sampled
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference
from tests.test_curvature import SPEC
from tests.test_spectrum import block_of, generator, line, matrix_of, randn

SPECTRA = {
    "5 and -4.9": [5.0, -4.9, *line(-1, 1, 118)],
    "4 and -5": [4.0, -5.0, *line(-1, 1, 118)],
    "one outlier": [100.0, *line(-1, 1, 119)],
    "positive": [50.0, *line(0, 1, 119)],
    "negative": [-50.0, 2.0, *line(-1, 0.2, 118)],
    "no trace": [*line(1, 2, 60), *line(-2, -1, 60)],
    "decaying": [(-0.9) ** i for i in range(120)],
    "mostly zero": [3.0, 2.0, -1.0, *[10.0 ** -(i / 8) for i in range(40)], *[0.0] * 77],
}


def condition(found) -> Any:
    return condition_module.condition(found)


def measured(values, seed=0, tolerance=1e-3, stop=None):
    """The ends and the rest of a diagonal matrix with these ``values``."""
    matrix = torch.as_tensor(values, dtype=torch.float64).diag()
    rng = generator(seed)
    block = block_of(matrix)
    found = ends(block, tolerance, rng)
    return found, sampled(block, found, rng, *([stop] if stop else []))


def entropy_of(values):
    size = torch.as_tensor(values, dtype=torch.float64).abs()
    return float(torch.special.entr(size / size.sum()).sum())


def negative_of(values):
    return sum(-x for x in values if x < 0) / sum(map(abs, values))


@pytest.fixture(scope="module", params=SPECTRA)
def runs(request):
    """A spectrum, and what 100 seeds make of a matrix with it."""
    values = SPECTRA[request.param]
    return values, [measured(values, seed) for seed in range(100)]


# --- the trace ---


def test_the_trace_is_unbiased(runs):
    values, found = runs
    traces = torch.tensor([rest.trace.value for _, rest in found], dtype=torch.float64)
    assert abs(traces.mean() - sum(values)) <= 4 * traces.std() / 10 + 1e-9


def test_95_percent_intervals_of_the_trace_hold(runs):
    values, found = runs
    inside = sum(abs(rest.trace.value - sum(values)) <= NORMAL * rest.trace.stderr + 1e-9 for _, rest in found)
    assert inside >= 93


def test_95_percent_intervals_of_both_ends_hold(runs):
    values, found = runs
    for end, right in enumerate((min(values), max(values))):
        assert sum(abs(both.values[end] - right) <= both.errors[end] for both, _ in found) >= 93


def test_the_standard_error_is_widened_as_students_is():
    """16 probes of an operator without outliers: the spread of ``z^T B z`` is ``sqrt(2 (|B|^2 - sum of B_ii^2))``."""
    matrix = matrix_of(line(-1, 1, 400))
    stderrs, steps = [], 0
    for seed in range(60):
        rng = generator(seed)
        found = ends(block_of(matrix), 0.5, rng)
        rest = sampled(block_of(matrix), found, rng)
        steps = len(found.krylov.basis)
        outside = torch.eye(400, dtype=torch.float64) - found.krylov.basis.T @ found.krylov.basis
        left = outside @ matrix @ outside
        spread = (2 * (left.square().sum() - left.diag().square().sum())) ** 0.5
        stderrs.append(rest.trace.stderr / float(spread / 16**0.5 * student.ppf(QUANTILE, 15) / NORMAL))
    assert steps < 100
    assert sum(ratio**2 for ratio in stderrs) / 60 == pytest.approx(1, rel=0.15)


def test_the_causes_add_up_to_the_trace(runs):
    _, found = runs
    for _, rest in found[:10]:
        assert [*rest.causes] == ["one", "other"]
        assert rest.causes["one"].value == pytest.approx(rest.trace.value / 3, rel=1e-9, abs=1e-9)
        assert rest.causes["one"].stderr == pytest.approx(rest.trace.stderr / 3, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def small():
    weights, data = reference.draw(SPEC, padding=1)
    return Curvature(model(SPEC), inputs(SPEC, **data) | weights)


def test_the_trace_of_a_block_is_split_over_the_nodes_exactly(small):
    """Against the dense matrix of each node alone."""
    for name in small.parameters:
        block, rng = small.block(name), generator()
        found = ends(block, 1e-3, rng)
        rest = sampled(block, found, rng)
        for node, part in rest.causes.items():
            right = float(small.dense([name], lambda n, node=node: n.name == node).trace())
            assert abs(part.value - right) <= part.stderr + 1e-12 * found.norm, (name, node)
        total = sum(part.value for part in rest.causes.values())
        assert abs(total - rest.trace.value) <= 1e-9 * abs(rest.trace.value) + rest.trace.stderr


def test_so_it_is_where_it_is_sampled(small):
    """All parameters together, which are too many to be formed whole; the split is unbiased."""
    block = small.block(small.parameters)
    nodes = ("loss", "blocks.0.attn.softmax", "blocks.0.mlp.activation", "blocks.0.norm1")
    right = {node: float(small.dense(terms=lambda n, node=node: n.name == node).trace()) for node in nodes}
    offs = []
    for seed in range(40):
        rng = generator(seed)
        found = ends(block, 0.1, rng)
        rest = sampled(block, found, rng)
        assert len(found.krylov.basis) < block.shape[0]
        assert sum(part.value for part in rest.causes.values()) == pytest.approx(rest.trace.value, rel=1e-9)
        offs.append([(rest.causes[node].value - right[node]) / rest.causes[node].stderr for node in nodes])
    found_offs = torch.tensor(offs)
    assert (found_offs.mean(0).abs() < 4 / 40**0.5).all()
    assert (found_offs.abs() < 5).all()


# --- the density, and functions of it ---


def test_the_density_has_the_right_moments():
    """Exactly where all is known; else within what four probes say: the second moment is that of ``|A z|^2/n``."""
    small = line(-1, 2, 50)
    _, rest = measured(small)
    for power in range(6):
        moment = float((rest.density.weights * rest.density.eigenvalues**power).sum())
        assert moment == pytest.approx(sum(x**power for x in small) / 50, rel=1e-12)
    large = torch.tensor(line(-1, 2, 900), dtype=torch.float64)
    errors = []
    for seed in range(20):
        _, rest = measured(large, seed, tolerance=0.1)
        moments = [float((rest.density.weights * rest.density.eigenvalues**k).sum()) for k in range(5)]
        assert moments[0] == pytest.approx(1, rel=1e-12)
        errors.append([moments[k] - float((large**k).mean()) for k in range(5)])
    assert (torch.tensor(errors).mean(0).abs() < 0.03).all()


def test_every_rule_is_exact_for_polynomials_of_its_degree():
    """``sum w x^k = z^T A^k z/|z|^2`` up to ``k = 2 s - 1``."""
    values = torch.tensor(line(-1, 1, 60), dtype=torch.float64)
    probes = randn(60, 3)
    for s, (alpha, beta) in enumerate(lockstep(lambda v: values[:, None] * v, probes, 5, 1e-14), start=1):
        nodes, vectors = torch.linalg.eigh(tridiagonal(alpha, beta[:, :-1]))
        weights = vectors[:, 0].square()
        for k in range(2 * s):
            right = (probes.square() * values[:, None] ** k).sum(0) / probes.square().sum(0)
            torch.testing.assert_close((weights * nodes**k).sum(1), right, rtol=1e-11, atol=1e-13)


def test_lockstep_is_lanczos_from_each_start():
    matrix, starts = matrix_of(line(-3, 1, 40)), randn(40, 4)
    *_, (alpha, beta) = lockstep(lambda v: matrix @ v, starts, 12, 1e-14)
    for j in range(4):
        alone = lanczos(lambda v: matrix @ v, starts[:, j], 0.0, 12)
        torch.testing.assert_close(alpha[j], alone.diagonal, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(beta[j, :-1], alone.off_diagonal, rtol=1e-9, atol=1e-11)


def test_a_space_that_is_exhausted_adds_nothing():
    values = torch.tensor([2.0, 2.0, 5.0, 5.0, 0.0, 0.0], dtype=torch.float64)
    *_, (alpha, beta) = lockstep(lambda v: values[:, None] * v, randn(6, 2), 6, 1e-12)
    assert (beta[:, 3:] == 0).all()
    assert (alpha[:, 3:] == 0).all()
    nodes, vectors = torch.linalg.eigh(tridiagonal(alpha, beta[:, :-1]))
    heavy = vectors[:, 0].square() > 1e-12
    for j in range(2):
        found = sorted({round(float(x), 9) + 0.0 for x in nodes[j][heavy[j]]})
        assert found == [0.0, 2.0, 5.0]


def test_entropy_and_negative_mass_are_within_their_errors(runs):
    values, found = runs
    entropy, negative = entropy_of(values), negative_of(values)
    assert sum(abs(rest.entropy.value - entropy) <= rest.entropy.error for _, rest in found) >= 93
    assert sum(abs(rest.negative_mass.value - negative) <= rest.negative_mass.error for _, rest in found) >= 93


def test_the_errors_are_no_larger_than_they_need_be():
    """Of a spectrum that is all outliers, and of one that is smooth."""
    _, rest = measured(SPECTRA["decaying"])
    assert rest.entropy.error < 0.25
    _, rest = measured(line(1, 2, 400))
    assert rest.entropy.error < 0.1
    assert rest.negative_mass == (0.0, pytest.approx(0, abs=0.02))


@pytest.mark.parametrize("values", [[2.0] * 40, [1.0, -1.0] * 20, [3.0, *[0.0] * 30], line(-1, 4, 64)])
def test_what_is_formed_whole_is_exact(values):
    _, rest = measured(values)
    assert rest.entropy.value == pytest.approx(entropy_of(values), abs=1e-7)
    assert rest.negative_mass.value == pytest.approx(negative_of(values), abs=1e-7)
    assert max(rest.entropy.error, rest.negative_mass.error) < 1e-5
    assert rest.trace.value == pytest.approx(sum(values), abs=1e-9)


def test_a_flat_block_has_no_density():
    zero = block_of(torch.zeros(300, 300, dtype=torch.float64))
    found = ends(zero, 1e-3, generator())
    rest = sampled(zero, found, generator())
    assert (rest.density, rest.entropy, rest.negative_mass, condition(found)) == (None, None, None, None)
    assert rest.trace.value == 0


# --- the condition ---


def test_the_condition_is_exact_where_the_block_is_whole():
    found, _ = measured([*[8.0] * 3, -4.0, 2.0, *[0.0] * 20])
    assert condition(found) == (pytest.approx(4, rel=1e-9), True)


def test_elsewhere_it_is_a_lower_bound(runs):
    values, found = runs
    right = max(map(abs, values)) / min(abs(x) for x in values if x)
    for both, _ in found[:20]:
        value, exact = condition(both)
        assert not exact
        assert 1 <= value <= right * (1 + 1e-9)


def test_the_bound_of_the_condition_is_not_empty():
    found, _ = measured([*line(1, 2, 100), 0.1, *[0.0] * 50], tolerance=1e-6)
    value, _ = condition(found)
    assert value > 10


# --- time ---


def test_when_the_time_is_up_there_is_a_trace_with_a_larger_error_and_no_density():
    values = SPECTRA["no trace"]
    _, whole = measured(values)
    _, short = measured(values, stop=Stop(0.0))
    assert (short.density, short.entropy, short.negative_mass) == (None, None, None)
    assert short.trace.stderr > whole.trace.stderr
    assert abs(short.trace.value - sum(values)) <= 4 * short.trace.stderr


def test_no_time_is_two_steps():
    matrix = matrix_of(line(-1, 1, 300))
    found = ends(block_of(matrix), 1e-6, generator(), Stop(0.0))
    assert (len(found.krylov.basis), found.converged) == (1, False)
    assert abs(found.values[1] - 1) <= found.errors[1]


def test_a_small_block_is_not_formed_whole_when_there_is_no_time_for_it():
    matrix = matrix_of(line(-1, 1, 40))
    assert len(ends(block_of(matrix), 1e-3, generator()).krylov.basis) == 40
    assert len(ends(block_of(matrix), 1e-3, generator(), Stop(0.0)).krylov.basis) == 1


def test_the_same_seed_gives_the_same_numbers():
    first, again, other = (measured(SPECTRA["no trace"], seed)[1] for seed in (5, 5, 6))
    assert (first.trace, first.entropy) == (again.trace, again.entropy)
    assert first.trace != other.trace
    assert math.isfinite(first.trace.stderr)
    assert torch.equal(first.density.eigenvalues, again.density.eigenvalues)


def test_more_probes_leave_a_smaller_error(monkeypatch):
    monkeypatch.setattr(sampling, "PROBES", 64)
    many = measured(SPECTRA["no trace"])[1]
    monkeypatch.setattr(sampling, "PROBES", 16)
    assert many.trace.stderr < measured(SPECTRA["no trace"])[1].trace.stderr


def test_the_probes_fit_the_free_memory(monkeypatch):
    """Three at once, and then no density."""
    values = torch.tensor(line(1, 2, 500), dtype=torch.float64)
    block = block_of(values.diag())
    found = ends(block, 0.5, generator())
    before = block.products
    monkeypatch.setattr(sampling.memory, "free", lambda: 3 * 4 * 500 * 8)
    rest = sampled(block, found, generator())
    assert rest.density is None
    assert block.products - before == 4  # the probes, twice what causes the trace, one step towards a density
    assert abs(rest.trace.value - float(values.sum())) <= 4 * rest.trace.stderr
    monkeypatch.setattr(sampling.memory, "free", lambda: 0)
    assert math.isfinite(sampled(block, found, generator()).trace.stderr)
