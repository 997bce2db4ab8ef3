"""The contract of a map: everything the chain rule needs to know about one function, and nothing else.

A Transformer is a wiring of about a dozen maps ``y = f(x_1, ..., x_m)``.  Each states its value, its first derivative
and its curvature in closed form, in a file of its own under ``hesscore/components``.  No other module of the project
knows a derivative.

Conventions shared by every map:

- Tensors keep their natural shapes.  Tangents and cotangents carry one leading axis ``k``: several at once.
- A tangent of ``None`` is zero, so a part of the graph that does not move costs nothing.
- Constants (token ids, masks, targets) are the *last* arguments; derivatives are stated for the leading ones only.
- ``value`` returns, beside ``y``, what the derivatives need of the point (``kept``); ``bend`` does the same for the
  gradient at the output (``bent``).  Both are computed once and serve any number of products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

Tangents = Sequence[Any]
"""One tensor for each argument, ``(k, *its shape)``, or ``None`` for zero."""
Cotangents = tuple["Tensor | None", ...]
"""One for each leading argument, ``None`` where it is not needed."""
Needs = Sequence[bool]
Example = tuple["Component", tuple[Tensor, ...]]

KINDS = ("loss", "softmax", "norm", "activation", "product")


@dataclass(frozen=True)
class Norms:
    """Upper bounds at one point, in the Frobenius norm of each whole tensor.

    ``jacobian[i]`` bounds the spectral norm of ``dy/dx_i``; ``curvature[i, j]`` bounds ``|<delta, D^2 f[u_i, w_j]>|``
    over unit ``delta, u_i, w_j`` (absent pairs are zero).
    """

    jacobian: tuple[float, ...]
    curvature: Mapping[tuple[int, int], float] = field(default_factory=dict)


class Component(ABC):
    """A map ``y = f(x_1, ..., x_m)`` with its first derivative and its curvature in closed form."""

    kind: ClassVar[str | None] = None
    """Which of ``KINDS`` the map's curvature is booked under; ``None`` for a linear map, which has none."""

    registry: ClassVar[dict[str, type[Component]]] = {}
    """Every concrete map by class name: defining a subclass is all the registration there is."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            Component.registry[cls.__name__] = cls

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def value(self, *args: Tensor) -> tuple[Tensor, Any]:
        """Return ``(y, kept)``: the value, and what of the point the derivatives use."""

    @abstractmethod
    def jvp(self, kept: Any, tangents: Tangents) -> Tensor:
        """Return ``dy = sum_i (dy/dx_i) dx_i``; at least one tangent is given."""

    @abstractmethod
    def vjp(self, kept: Any, cotangent: Tensor, needs: Needs) -> Cotangents:
        """Return ``(dy/dx_i)^T cotangent`` for each leading argument (``None`` where it is not needed)."""

    def bend(self, kept: Any, delta: Tensor) -> Any:
        """Return what ``<delta, D^2 f>`` uses of the point, given the gradient ``delta`` at the output (no axis k)."""
        return delta

    def curvature(self, kept: Any, bent: Any, tangents: Tangents, needs: Needs) -> Cotangents:
        """Return ``<delta, D^2 f>`` applied to the tangents, one new tensor for each leading argument."""
        raise TypeError(f"{type(self).__name__} is linear: it has no curvature")

    def pull(self, kept: Any, cotangent: Tensor, bent: Any, tangents: Tangents, needs: Needs) -> Cotangents:
        """Return ``vjp`` plus ``curvature``: what a node hands down in the backward sweep of a product."""
        passed = self.vjp(kept, cotangent, needs)
        own = self.curvature(kept, bent, tangents, needs)
        return tuple(p if o is None or p is None else o.add_(p) for o, p in zip_longest(own, passed))

    @abstractmethod
    def norms(self, kept: Any) -> Norms:
        """Return bounds on the derivatives at this point."""

    @classmethod
    @abstractmethod
    def examples(cls, rng: Generator) -> Iterator[Example]:
        """Yield ``(map, arguments)`` in float64, on more than one shape, for the checks that every map must pass."""


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last axis, which is kept."""
    return (a * b).sum(-1, keepdim=True)


def balance(moved: Tensor, peak: Tensor) -> Tensor:
    """Make ``moved`` sum to zero over the last axis, in place, by its entry at ``peak``, the largest probability.

    Derivatives of probabilities sum to zero.  Where one is nearly 1, rounding hides how its entry balances the others.
    """
    return moved.scatter_add_(-1, peak.expand(*moved.shape[:-1], 1), -moved.sum(-1, keepdim=True))


def align(tangent: Tensor, ndim: int) -> Tensor:
    """View a tangent ``(k, *shape)`` so that it broadcasts against tangents of tensors with ``ndim`` axes."""
    return tangent.reshape(tangent.shape[0], *(1,) * (ndim - tangent.ndim + 1), *tangent.shape[1:])


def unbroadcast(cotangent: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum ``(k, *broadcast)`` over the axes along which ``shape`` was broadcast: the transpose of ``align``."""
    lead = cotangent.ndim - 1 - len(shape)
    if lead:
        cotangent = cotangent.flatten(1, lead).sum(1) if lead > 1 else cotangent.sum(1)
    stretched = [1 + i for i, n in enumerate(shape) if n == 1 and cotangent.shape[1 + i] != 1]
    return cotangent.sum(stretched, keepdim=True) if stretched else cotangent


def randn(rng: Generator, *shape: int) -> Tensor:
    """Standard normal float64 values for examples.

    >>> randn(Generator()).shape, randn(Generator(), 2, 3).shape
    (torch.Size([]), torch.Size([2, 3]))
    """
    return torch.randn(shape, generator=rng, dtype=torch.float64)
