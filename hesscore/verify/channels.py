"""Three ways to ``H v`` that know nothing of the closed forms: they differentiate plain values, in float64.

- ``autograd``: reverse over reverse, ``torch.autograd.grad`` of ``torch.autograd.grad``;
- ``jacfwd``: forward over reverse, those columns of ``jacfwd(grad(f))`` that are asked for;
- ``differences``: 5-point central differences of autograd's gradient.

``torch.func.hessian`` is not among them: it is silently wrong on ``F.layer_norm`` (docs/calculus.md says when).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from hesscore.spectrum.ends import ROUNDING

Function = Callable[[Tensor], Tensor]
"""A scalar function of one flat vector."""


class Products(NamedTuple):
    """``H v`` for directions ``(k, n)``, and what is known of its errors, entry by entry; each is ``(k, n)``."""

    values: Tensor
    rounding: Tensor
    doubt: Tensor
    """The error of the method itself."""


def exact(product: Callable[[Tensor], Tensor], directions: Tensor) -> Products:
    """Products that are exact but for rounding: ``ROUNDING`` times what is seen of it, ``3 H (v/3) - H v``."""
    values, thirds = product(torch.cat([directions, directions / 3])).chunk(2)
    return Products(values, ROUNDING * (3 * thirds - values).abs(), torch.zeros_like(values))


def autograd(terms: Sequence[Function], x: Tensor, directions: Tensor) -> Products:
    """``H v`` at ``x (n,)`` of the sum of ``terms``, for ``directions (k, n)``."""
    x = x.clone().requires_grad_()

    def product(directions: Tensor) -> Tensor:
        products = torch.zeros_like(directions)
        for f in terms:
            (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
            products += torch.stack([torch.autograd.grad(gradient, x, v, retain_graph=True)[0] for v in directions])
        return products

    return exact(product, directions)


def jacfwd(terms: Sequence[Function], x: Tensor, directions: Tensor) -> Products:
    """As ``autograd``, forward over reverse."""

    def product(directions: Tensor) -> Tensor:
        products = torch.zeros_like(directions)
        for f in terms:
            products += torch.stack([torch.func.jvp(torch.func.grad(f), (x,), (v,))[1] for v in directions])
        return products

    return exact(product, directions)


def differences(terms: Sequence[Function], x: Tensor, directions: Tensor) -> Products:
    """As ``autograd``, by ``(8 (g(h) - g(-h)) - (g(2h) - g(-2h))) / 12h`` of the gradient ``g``.

    Large steps truncate (or cross kinks) and small ones round.  So the step, at first ``max(|x|, 1) / 64``, is halved,
    at most 28 times, until results that agreed to 1e-8 agree no better.  The two that agreed best give the result and,
    by their difference and the rounding of ``g``, its doubt.
    """
    size = directions.norm(dim=1, keepdim=True)

    def gradient(at: Tensor, share: float = 1.0) -> Tensor:
        at.requires_grad_()
        return torch.stack([torch.autograd.grad(share * f(at), at)[0] for f in terms]).sum(0)

    def slope(h: float) -> Tensor:
        steps = h * directions / size
        return torch.stack([(gradient(x + s) - gradient(x - s)) / (2 * h) for s in steps]) * size

    g, third = gradient(x.clone()), gradient(x.clone(), 1 / 3)
    rounding = (3 * third - g).abs().maximum(torch.finfo(x.dtype).eps * g.abs()) * size

    def stencils(h: float) -> Iterator[tuple[Tensor, Tensor]]:
        wide = slope(2 * h)
        while True:
            narrow = slope(h)
            yield (4 * narrow - wide) / 3, rounding / h
            wide, h = narrow, h / 2

    best = doubt = torch.full_like(directions, nan)
    closest = inf
    first = max(float(x.norm()), 1.0) / 64
    for (coarse, _), (fine, rounded) in pairwise(islice(stencils(first), 28)):
        unsure = (fine - coarse).abs() + rounded
        gap = float(unsure.norm())
        if gap < closest:
            best, doubt, closest = fine, unsure, gap
        elif closest <= 1e-8 * float(fine.norm()):
            break
    return Products(best, torch.zeros_like(best), 2 * doubt)


CHANNELS = (autograd, jacfwd, differences)
