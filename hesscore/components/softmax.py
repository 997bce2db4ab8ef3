"""Softmax of the attention scores, by rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hesscore.component import Component, Cotangents, Example, Needs, Norms, Tangents, balance, dot, randn


@dataclass(frozen=True)
class Softmax(Component):
    """``a = softmax(s)`` over the last axis, on the entries that the boolean ``keep`` allows (causal, padded).

    ``J = diag(a) - a a^T``; with ``w = J delta`` the curvature is ``diag(w) - w a^T - a w^T``, applied as ``J`` is, to
    ``(delta - <a, delta>) * J ds`` in the place of ``a ds``.  Entries that are not kept, and rows with no kept entry,
    are exactly zero and stay so.
    """

    kind = "softmax"

    def value(self, scores: Tensor, keep: Tensor) -> tuple[Tensor, Any]:
        a = scores.masked_fill(~keep, -torch.inf).softmax(-1)
        a = torch.where(keep, a, 0.0)
        return a, (a, a.argmax(-1, keepdim=True))

    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        a, peak = kept
        return balance(self.apply_jacobian(a, a * tangents[0]), peak)

    @staticmethod
    def apply_jacobian(a: Tensor, weighted: Tensor) -> Tensor:
        """``J ds = a ds - a <a, ds>`` from ``a ds``, in place: attention spends its time in passes over this array."""
        return weighted.addcmul_(a, weighted.sum(-1, keepdim=True), value=-1)

    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        return (self.jvp(kept, (cotangent,)),)

    def bend(self, kept: Any, delta: Tensor) -> Tensor:
        return delta - dot(kept[0], delta)

    def curvature(self, kept: Any, centred: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        return (self.apply_jacobian(kept[0], self.jvp(kept, tangents).mul_(centred)),)

    def pull(self, kept: Any, cotangent: Tensor, centred: Tensor, tangents: Tangents, needs: Needs) -> Cotangents:
        """``J`` applied to both at once: it leaves the curvature alone, whose rows sum to zero."""
        (a, peak), (curved,) = kept, self.curvature(kept, centred, tangents, needs)
        assert curved is not None
        return (balance(self.apply_jacobian(a, curved.addcmul_(a, cotangent)), peak),)

    def norms(self, kept: Any) -> Norms:
        """``|J| <= max_i 2 a_i (1 - a_i)`` (Gershgorin) and ``<= max a``.

        The curvature is a third cumulant: ``|k3(delta, u, w)| <= max |delta - E delta| sd(u) sd(w)``, where the first
        factor is at most ``max_i |e_i - a|`` and the others together at most ``|J|``.
        """
        a = kept[0]
        jacobian = torch.minimum(2 * a * (1 - a), a.amax(-1, keepdim=True)).amax(-1)
        reach = (1 - 2 * torch.where(a > 0, a, 1.0).amin(-1) + a.square().sum(-1)).clamp(min=0).sqrt()
        return Norms((float(jacobian.max()),), {(0, 0): float((reach * jacobian).max())})

    @classmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        padded = torch.tensor([[True, True, True], [False, True, True]])[:, None, None, :]
        yield cls(), (randn(rng, 2, 3), torch.ones(1, 1, dtype=torch.bool))
        yield cls(), (3 * randn(rng, 2, 2, 4, 4), causal)
        yield cls(), (randn(rng, 2, 1, 3, 3), padded & causal[:3, :3])
