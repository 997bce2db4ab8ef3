"""What ``hess verify`` compares with: each channel knows a known Hessian, and its own error."""

from math import nan
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hesscore.spec import Spec
from hesscore.verify import verify_model
from hesscore.verify.channels import CHANNELS, autograd, differences, jacfwd
from hesscore.wiring.inputs import inputs
from hesscore.wiring.model import model
from tests import reference


def quartic(x):
    return (x**4).sum() + (x[0] * x[1] * x[2]) ** 2


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_channel_knows_a_known_hessian(channel):
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    a, b, c = x.tolist()
    hessian = torch.diag(12 * x**2) + 2 * torch.tensor(
        [
            [b * b * c * c, 2 * a * b * c * c, 2 * a * b * b * c],
            [2 * a * b * c * c, a * a * c * c, 2 * a * a * b * c],
            [2 * a * b * b * c, 2 * a * a * b * c, a * a * b * b],
        ],
        dtype=torch.float64,
    )
    directions = torch.tensor([[1.0, 0, 0], [1, 2, 3]], dtype=torch.float64)
    halves = [lambda x: 0.25 * quartic(x), lambda x: 0.75 * quartic(x)]
    found, rounding, doubt = channel(halves, x, directions)
    assert (found - directions @ hessian).norm() <= 1e-11 * (directions @ hessian).norm()
    assert (rounding + doubt).norm() <= 1e-11 * found.norm()


def test_differences_find_a_step_beside_a_kink():
    x = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    found, _, doubt = differences([lambda x: (x[0] ** 2 * torch.relu(x[1])).sum()], x, torch.ones(1, 2).double())
    expected = torch.tensor([[2 * 1e-4 + 2, 2.0]], dtype=torch.float64)
    assert (found - expected).norm() < 1e-10
    assert doubt.norm() < 1e-10


def test_differences_say_what_they_cannot_tell():
    """A slope so steep that its rounding drowns the curvature."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def f(x):
        return 1e8 * x.sum() + torch.cos(x).sum()

    direction = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    exact, rounding, none = autograd([f], x, direction)
    found, _, doubt = differences([f], x, direction)
    assert rounding.norm() <= 1e-14 * exact.norm()
    assert not none.any()
    error = (found - exact).norm() / exact.norm()
    assert 1e-10 < error <= doubt.norm() / found.norm() < 1e-3
    assert (jacfwd([f], x, direction)[0] - exact).norm() <= 1e-15 * exact.norm()


def test_differences_find_a_step_between_many_kinks():
    """Where thousands of activations change sign along the way, the limit is a step that none of them sees."""
    spec = Spec(d_model=8, d_ff=64, vocab=11, activation="relu", seq_len=32)
    weights, data = reference.draw(spec, batch=16)
    checks = [check for check in verify_model(model(spec), inputs(spec, **data) | weights) if check.object == "model"]
    assert [check.passed for check in checks] == [True] * 3
    assert checks[-1].error < 1e-6
    assert 1e-10 < checks[-1].tolerance < 1e-6


def test_differences_of_what_is_not_a_number_are_not_a_number():
    found, *_ = differences([lambda x: (x * nan).sum()], torch.ones(2).double(), torch.ones(1, 2).double())
    assert found.isnan().all()


def test_rounding_is_what_is_seen_of_it():
    """``1e10 (x - y)^2 + x^3`` along the diagonal, where the two large terms cancel."""
    x = torch.tensor([1.0, 1.0 + 1e-3], dtype=torch.float64)

    def f(x):
        return 1e10 * (x[0] - x[1]) ** 2 + x[0] ** 3

    direction = torch.tensor([[1 / 3, 1 / 3]], dtype=torch.float64)
    for channel in autograd, jacfwd:
        found, rounding, doubt = channel([f], x, direction * 1.1)
        expected = torch.tensor([[6 * 1.1 / 3, 0.0]], dtype=torch.float64)
        assert (found - expected).norm() <= rounding.norm() < 1e-3
        assert not doubt.any()


def test_differences_find_a_step_at_zero():
    zero = torch.zeros(2).double()
    found, _, doubt = differences([lambda x: torch.sin(x[0]) * torch.exp(x[1])], zero, torch.ones(1, 2).double())
    assert (found - 1).norm() <= doubt.norm() < 1e-10


# --- what is no channel, and why ---

CALCULUS = Path(__file__).parent.parent / "docs" / "calculus.md"

RNG = torch.Generator().manual_seed(0)
X, TARGET = torch.randn(2, 3, 4, generator=RNG, dtype=torch.float64)
GAIN, SHIFT = torch.randn(2, 4, generator=RNG, dtype=torch.float64)
POINT = {"x": X, "gain": GAIN, "shift": SHIFT}


def by_hand(x, shape, gain=None, shift=None):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return y if gain is None else y * gain + shift


def loss(norm, names):
    """As a function of the arguments that are named, in one vector; the norm has no gain if it says so."""
    affine = "no gain" not in names
    known = POINT if affine else {"x": X}
    free = [name for name in names if name in POINT]

    def of(v):
        parts = v.split([POINT[name].numel() for name in free])
        moved = {name: part.view_as(POINT[name]) for name, part in zip(free, parts, strict=True)}
        return (norm(shape=(4,), **(known | moved)) - TARGET).square().mean()

    return of, torch.cat([POINT[name].flatten() for name in free])


def twice(f):
    def hessian(v):
        v = v.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(v), v, create_graph=True)
        return torch.stack([torch.autograd.grad(entry, v, retain_graph=True)[0] for entry in gradient])

    return hessian


METHODS = {
    "hessian": torch.func.hessian,
    "jacrev(jacrev)": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "jacfwd(jacfwd)": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "jacfwd(grad)": lambda f: torch.func.jacfwd(torch.func.grad(f)),
    "autograd.grad twice": twice,
}


def layer_norm(x, shape, gain=None, shift=None):
    return F.layer_norm(x, shape, gain, shift)


def test_what_torch_says_of_layer_norm_is_what_the_docs_say():
    """``right`` is right to rounding; a number is the relative error.

    Where this fails, torch has been mended or broken: say so there, and from which version on.
    """
    lines = [line.strip("|").split("|") for line in CALCULUS.read_text().splitlines() if line.startswith("|")]
    (first,) = [i for i, line in enumerate(lines) if "`hessian`" in line[0]]
    header = [cell.strip() for cell in lines[first - 2]]
    methods = {}
    for name, *cells in lines[first : first + len(METHODS)]:
        methods[name.strip().strip("`")] = [cell.strip() for cell in cells]
    assert list(methods) == list(METHODS)
    for name, cells in methods.items():
        for arguments, cell in zip(header[1:], cells, strict=True):
            f, v = loss(layer_norm, arguments.split(", "))
            g, _ = loss(by_hand, arguments.split(", "))
            found, expected = METHODS[name](f)(v), twice(g)(v)
            error = float((found - expected).norm() / expected.norm())
            assert ("right" if error < 1e-14 else f"{error:.2f}") == cell, (name, arguments)
