"""The matrix expressions of published theorems, as they are written, against ours.

One head without biases under the mean squared error, ``F = A X W_V`` with ``A = softmax(X W_Q W_K^T X^T / sqrt(d_K))``:
Ormaniec, Dangel, Singh (arXiv 2410.10986).  LayerNorm ``P(X) M(X)``: Petrov, Kiselev, Meshkov, Grabovoy
(arXiv 2510.16927).  Everything is vectorised row by row.  Where a theorem needs a correction, both are evaluated beside
double backward: docs/corrections.md has the numbers.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from hesscore.components.layernorm import LayerNorm
from hesscore.components.squared_error import SquaredError
from hesscore.curvature import Curvature, inner, outer
from hesscore.explicit.block import block_hessian
from hesscore.explicit.norm import norm_hessian, norm_jacobian
from hesscore.explicit.tokens import block_diagonal
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.attention import attention
from tests.test_channels import METHODS, by_hand, layer_norm, loss, twice

L, D, FF = 3, 4, 5
CORRECTIONS = Path(__file__).parent.parent / "docs" / "corrections.md"


def kron(a: Tensor, b: Tensor) -> Tensor:
    return torch.kron(a.contiguous(), b.contiguous())


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def commutation(rows: int, columns: int) -> Tensor:
    """``K vec_r(X) = vec_r(X^T)`` for ``X (rows, columns)``."""
    order = torch.arange(rows * columns).view(rows, columns).T.flatten()
    return eye(rows * columns)[order]


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


class Head:
    """The theorems' matrices at random weights and data, and our curvature of the same head."""

    def __init__(self, causal: bool) -> None:
        rng = torch.Generator().manual_seed(0)
        x, target, w_q, w_k, w_v = torch.randn(5, max(L, D), D, generator=rng, dtype=torch.float64)
        self.x, target = x[:L], target[:L]
        self.w_q, self.w_k, self.w_v = w_q, w_k, w_v
        x = self.x
        keep = torch.ones(L, L, dtype=torch.bool).tril() if causal else torch.ones(L, L, dtype=torch.bool)
        scores = (x @ w_q @ w_k.T @ x.T / D**0.5).masked_fill(~keep, -torch.inf)
        self.a = a = scores.softmax(-1)
        self.first = torch.block_diag(*(row.diag() - torch.outer(row, row) for row in a))
        """``dA/dT``, ``(L^2, L^2)``."""
        one = eye(L)
        second = torch.zeros(L, L, L, L, L, L, dtype=torch.float64)  # d^2 A_ij / dT_ik dT_il at [i, j, i, k, i, l]
        for i, row in enumerate(a):
            spread = one - row
            second[i, :, i, :, i] = row[:, None, None] * (
                spread[:, :, None] * spread[:, None, :] - (row[:, None] * spread)[None]
            )
        self.second = second.reshape(L**4, L**2)
        self.delta = 2 / (L * D) * (a @ x @ w_v - target).flatten()

        g = Graph()
        y = attention(g, "blocks.0.attn", g.constant("input"), Spec(d_model=D, d_ff=1, bias=False))
        g.apply("loss", SquaredError(), y, g.constant("target"), g.constant("weights"))
        weights = {"q": w_q, "k": w_k, "v": w_v, "o": eye(D)}
        leaves = {f"blocks.0.attn.{part}.weight": weight for part, weight in weights.items()}
        leaves |= {"input": x[None], "target": target[None], "weights": torch.ones(1, L), "mask": keep}
        self.curvature = Curvature(g, leaves)

    def ours(self, terms: object, a: str, b: str) -> Tensor:
        found = block_hessian(self.curvature, Spec(d_model=D, d_ff=1, bias=False), terms)  # type: ignore[arg-type]
        place = {part: range(i * D * D, (i + 1) * D * D) for i, part in enumerate("qkvo")}
        return found.block(place[a], place[b]).dense()

    @property
    def by_scores(self) -> Tensor:
        """``dF/dT = (I_L (x) W_V^T X^T) dA/dT``."""
        return kron(eye(L), self.w_v.T @ self.x.T) @ self.first

    @property
    def scores(self) -> dict[str, Tensor]:
        """``dT/dW_Q = X (x) X W_K`` and ``dT/dW_K = (X W_Q (x) X) K``, over ``sqrt(d_K)``."""
        by_k = kron(self.x @ self.w_q, self.x) @ commutation(D, D)
        return {"q": kron(self.x, self.x @ self.w_k) / D**0.5, "k": by_k / D**0.5}

    @property
    def jacobian(self) -> dict[str, Tensor]:
        """Of ``F``; by W_V it is ``A X (x) I``."""
        return {part: self.by_scores @ turn for part, turn in self.scores.items()} | {
            "v": kron(self.a @ self.x, eye(D))
        }


@pytest.fixture(scope="module", params=[False, True], ids=["bidirectional", "causal"])
def head(request):
    return Head(request.param)


@pytest.mark.parametrize(("a", "b"), list(product("qkv", repeat=2)))
def test_the_outer_hessian_of_attention(head, a, b):
    """``2/(L d_V) J_a^T J_b``."""
    assert far(2 / (L * D) * head.jacobian[a].T @ head.jacobian[b], head.ours(outer, a, b)) < 1e-12


@pytest.mark.parametrize(("a", "b"), list(product("qk", repeat=2)))
def test_the_functional_hessian_of_queries_and_keys(head, a, b):
    """``(delta^T (x) I)(S (x) R_a^T) d^2A/dT^2 R_b``; between Q and K ``X^T G X (x) I`` too, with ``G = dloss/dT``."""
    s = kron(eye(L), head.w_v.T @ head.x.T)
    left = kron(head.delta[None], eye(D * D)) @ kron(s, head.scores[a].T)
    found = left @ head.second @ head.scores[b]
    if a != b:
        g = (head.delta @ head.by_scores).view(L, L)
        bilinear = kron(head.x.T @ (g if a == "q" else g.T) @ head.x, eye(D)) / D**0.5
        found = found + bilinear
    assert far(found, head.ours(inner, a, b)) < 1e-12


@pytest.mark.parametrize("b", "qk")
def test_the_functional_hessian_of_values(head, b):
    """``(delta^T (x) I) d(A X (x) I)/dW_b``; ``d(M (x) I) = (I (x) K (x) I)(I (x) vec_r I) dM``. By W_V twice: 0."""
    moved = kron(eye(L), head.x.T) @ head.first @ head.scores[b]
    spread = kron(kron(eye(L), commutation(D, D)), eye(D)) @ kron(eye(L * D), eye(D).reshape(-1, 1))
    found = kron(head.delta[None], eye(D * D)) @ spread @ moved
    assert far(found, head.ours(inner, "v", b)) < 1e-12
    assert not head.ours(inner, "v", "v").any()


class Norm:
    """``LN(X) = P M`` without eps: ``M = X (I - 11^T/d)``, ``P = diag(sigma)^-1``, ``sigma = sqrt(M^2 1 / d)``.

    Each flag is a correction: the root of the width in ``d sigma/dX``, in both terms of ``d^2 P``, and the reordering
    in ``d(P (x) I)``.
    """

    def __init__(self, first: bool = True, second: bool = True, reordered: bool = True) -> None:
        by_first, by_second = (D**0.5 if corrected else 1.0 for corrected in (first, second))
        self.x = x = torch.randn(L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        centre = eye(D) - 1 / D
        self.m = m = x @ centre
        squares = m.square().sum(1)
        sigma = (squares / D).sqrt()
        self.p, self.dm, self.reordered = (1 / sigma).diag(), kron(eye(L), centre), reordered
        place = torch.zeros(L * L, L, dtype=torch.float64)  # vec_r diag(v) = place v
        place[:: L + 1] = eye(L)
        rows = torch.block_diag(*(row[None] for row in m)) @ self.dm  # half of d(M^2 1)/dX
        roots = squares.rsqrt().diag() @ rows  # d sigma/dX, but for the root of the width
        self.dp = -kron(self.p, self.p) @ place @ roots / by_first
        # d roots/dX: of rsqrt(squares), and of rows, which are linear in X.
        turned = -(squares**-1.5).diag() @ rows
        bent = [torch.outer(turned[i], rows[i]) + squares[i].rsqrt() * self.dm.T @ _at(i) @ self.dm for i in range(L)]
        self.d2p = torch.stack(
            [
                (2 * sigma[i] ** -3 * torch.outer(roots[i], roots[i]) / by_first - sigma[i] ** -2 * bent[i]) / by_second
                for i in range(L)
            ]
        )

    @property
    def jacobian(self) -> Tensor:
        """``(P (x) I) dM/dX + (I (x) M^T) dP/dX``."""
        return kron(self.p, eye(D)) @ self.dm + kron(eye(L), self.m.T) @ self.dp

    @property
    def hessian(self) -> Tensor:
        """``d vec_r(jacobian)/dX``, with ``d(P (x) I) = (I (x) K (x) I)(I (x) vec_r I) dP`` for the first term."""
        spread = kron(eye(L * L), eye(D).reshape(-1, 1))
        if self.reordered:
            spread = kron(kron(eye(L), commutation(L, D)), eye(D)) @ spread
        first = kron(eye(L * D), self.dm.T) @ spread @ self.dp
        second = torch.zeros(L, D, L * D, L * D, dtype=torch.float64)
        dp = self.dp.view(L, L, L * D)
        dm = self.dm.view(L, D, L * D)
        for i in range(L):
            second[i] = torch.einsum("c,uw->cuw", self.m[i], self.d2p[i]) + torch.einsum("u,cw->cuw", dp[i, i], dm[i])
        return first.view(L * D, L * D, L * D) + second.view(L * D, L * D, L * D)


def _at(i: int) -> Tensor:
    """The projection on token ``i``."""
    one = torch.zeros(L, L, dtype=torch.float64)
    one[i, i] = 1
    return kron(one, eye(D))


def test_the_jacobian_of_layernorm():
    norm = Norm()
    assert far(norm.jacobian, block_diagonal(norm_jacobian(LayerNorm(0.0), norm.x))) < 1e-12


def test_the_hessian_of_layernorm():
    norm = Norm()
    ours = torch.zeros(L, D, L, D, L, D, dtype=torch.float64)
    for i, block in enumerate(norm_hessian(LayerNorm(0.0), norm.x)):
        ours[i, :, i, :, i] = block
    assert far(norm.hessian, ours.view(L * D, L * D, L * D)) < 1e-12


class FeedForward:
    """``S = f(Y W_1) W_2`` with ``f = tanh``: ``Y (L, d_V)``, ``W_1 (d_V, d_ff)``, ``W_2 (d_ff, d_V)``."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(2)
        self.y = torch.randn(L, D, generator=rng, dtype=torch.float64)
        self.w_1 = torch.randn(D, FF, generator=rng, dtype=torch.float64)
        self.w_2 = torch.randn(FF, D, generator=rng, dtype=torch.float64)
        self.slopes = (1 - (self.y @ self.w_1).tanh().square()).flatten().diag()
        """``D_s``, ``(L d_ff, L d_ff)``."""

    def value(self, w_1: Tensor, w_2: Tensor) -> Tensor:
        return (self.y @ w_1).tanh() @ w_2

    @property
    def xi_12(self) -> Tensor:
        """``(I (x) (Y^T (x) I_ff) D_s)(I_L (x) K_{L,dV} (x) I_ff)(vec_r I_L (x) I) K_{ff,dV}``."""
        slopes = kron(eye(L * D), kron(self.y.T, eye(FF)) @ self.slopes)
        spread = kron(kron(eye(L), commutation(L, D)), eye(FF)) @ kron(eye(L).reshape(-1, 1), eye(D * FF))
        return slopes @ spread @ commutation(FF, D)

    @property
    def xi_21(self) -> Tensor:
        """``(I_L (x) K_{ff,dV} (x) I_dV)(I (x) vec_r I_dV) D_s (Y (x) I_ff)``."""
        spread = kron(kron(eye(L), commutation(FF, D)), eye(D)) @ kron(eye(L * FF), eye(D).reshape(-1, 1))
        return spread @ self.slopes @ kron(self.y, eye(FF))

    def twice(self, a: int, b: int) -> Tensor:
        """``d vec_r(dS/dW_a) / dW_b`` by double backward."""
        weights = [self.w_1, self.w_2]

        def first(moved: Tensor) -> Tensor:
            point = [*weights]
            point[b] = moved
            return jacobian(lambda w: self.value(*(w if i == a else v for i, v in enumerate(point))), point[a], True)

        return jacobian(first, weights[b]).reshape(-1, D * FF)


def second_derivative_of_attention(head: Head) -> tuple[Tensor, Tensor]:
    """``d vec_r(dF/dW_Q)/dW_Q``: by the theorem without the factor 2/(L d_V), and by double backward."""
    turn = head.scores["q"]
    theorem = kron(kron(eye(L), head.w_v.T @ head.x.T), turn.T) @ head.second @ turn

    def value(w: Tensor) -> Tensor:
        return (head.x @ w @ head.w_k.T @ head.x.T / D**0.5).softmax(-1) @ head.x @ head.w_v

    right = jacobian(lambda w: jacobian(value, w, create_graph=True), head.w_q)
    return theorem, right.reshape(-1, D * D)


def norm_by_autograd() -> tuple[Tensor, Tensor]:
    """Jacobian and Hessian of LayerNorm by double backward of its definition."""

    def value(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / centred.square().mean(-1, keepdim=True).sqrt()

    x, n = Norm().x, L * D
    second = jacobian(lambda x: jacobian(value, x, create_graph=True), x)
    return jacobian(value, x).reshape(n, n), second.reshape(n, n, n)


def corrections() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]]:
    """By number: without the correction, with it, and by double backward."""
    jacobian_of_norm, hessian_of_norm = norm_by_autograd()
    ffn = FeedForward()
    attention, attention_right = second_derivative_of_attention(Head(causal=False))
    f, v = loss(layer_norm, ["x", "gain", "shift"])
    exact = twice(loss(by_hand, ["x", "gain", "shift"])[0])
    return {
        "1": (lambda: Norm(first=False).jacobian, lambda: Norm().jacobian, lambda: jacobian_of_norm),
        "2": (lambda: Norm(second=False).hessian, lambda: Norm().hessian, lambda: hessian_of_norm),
        "3": (lambda: Norm(reordered=False).hessian, lambda: Norm().hessian, lambda: hessian_of_norm),
        "1-3": (lambda: Norm(False, False, False).hessian, lambda: Norm().hessian, lambda: hessian_of_norm),
        "4": (lambda: ffn.xi_21, lambda: ffn.xi_12, lambda: ffn.twice(0, 1)),
        "6": (lambda: 2 / (L * D) * attention, lambda: attention, lambda: attention_right),
        "7": (lambda: METHODS["hessian"](f)(v), lambda: METHODS["jacfwd(grad)"](f)(v), lambda: exact(v)),
    }


def test_every_correction_is_needed_and_enough():
    """The numbers of the page, each cell of it."""
    lines = [line.strip("|").split("|") for line in CORRECTIONS.read_text().splitlines() if line.startswith("| ")]
    cells = {line[0].strip(): [cell.strip() for cell in line[-2:]] for line in lines[1:]}
    found = corrections()
    assert set(cells) == {*found, "5"}
    for number, (without, right, expected) in found.items():
        wrong, rest = far(without(), expected()), far(right(), expected())
        assert [f"{wrong:.2f}", "rounding"] == cells[number], (number, wrong)
        assert wrong > 0.1
        assert rest < 1e-14
    ffn = FeedForward()
    assert cells["5"] == ["does not fit", "rounding"]
    assert far(ffn.xi_21, ffn.twice(1, 0)) < 1e-14
