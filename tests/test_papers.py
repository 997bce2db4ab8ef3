"""The matrix expressions of published theorems, as they are written, against ours.

One head without biases under the mean squared error, ``F = A X W_V`` with ``A = softmax(X W_Q W_K^T X^T / sqrt(d_K))``:
Ormaniec, Dangel, Singh (arXiv 2410.10986).  LayerNorm ``P(X) M(X)``: Petrov, Kiselev, Meshkov, Grabovoy
(arXiv 2510.16927).  Everything is vectorised row by row.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from hesscore.components.layernorm import LayerNorm
from hesscore.components.squared_error import SquaredError
from hesscore.curvature import Curvature, inner, outer
from hesscore.explicit.block import block_hessian
from hesscore.explicit.norm import norm_hessian, norm_jacobian
from hesscore.explicit.tokens import block_diagonal
from hesscore.graph import Graph
from hesscore.spec import Spec
from hesscore.wiring.attention import attention

L, D = 3, 4


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
    """``LN(X) = P M`` without eps: ``M = X (I - 11^T/d)``, ``P = diag(sigma)^-1``, ``sigma = sqrt(M^2 1 / d)``."""

    def __init__(self, corrected: bool = True) -> None:
        root = D**0.5 if corrected else 1.0
        self.x = x = torch.randn(L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        centre = eye(D) - 1 / D
        self.m = m = x @ centre
        squares = m.square().sum(1)
        sigma = (squares / D).sqrt()
        self.p, self.dm = (1 / sigma).diag(), kron(eye(L), centre)
        place = torch.zeros(L * L, L, dtype=torch.float64)  # vec_r diag(v) = place v
        place[:: L + 1] = eye(L)
        rows = torch.block_diag(*(row[None] for row in m)) @ self.dm  # half of d(M^2 1)/dX
        self.d_sigma = squares.rsqrt().diag() @ rows / root
        self.dp = -kron(self.p, self.p) @ place @ self.d_sigma
        # d^2 sigma: of rsqrt(squares), and of rows, which are linear in X.
        turned = -(squares**-1.5).diag() @ rows
        self.d2_sigma = (
            torch.stack(
                [torch.outer(turned[i], rows[i]) + squares[i].rsqrt() * self.dm.T @ _at(i) @ self.dm for i in range(L)]
            )
            / root
        )
        cubed = 2 * sigma**-3
        self.d2p = torch.stack(
            [
                cubed[i] * torch.outer(self.d_sigma[i], self.d_sigma[i]) - sigma[i] ** -2 * self.d2_sigma[i]
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
        spread = kron(kron(eye(L), commutation(L, D)), eye(D)) @ kron(eye(L * L), eye(D).reshape(-1, 1))
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


def test_the_root_of_the_width_is_needed():
    """As printed, ``dD/dX`` lacks ``1/sqrt(d)``."""
    wrong, right = Norm(corrected=False).jacobian, Norm().jacobian
    assert 0.5 < far(wrong, right) < 1
