"""Traces and spectral densities: exact on the Krylov space that the ends came from, sampled outside it.

Let the rows of ``Q`` be the basis of that space, ``P = I - Q^T Q`` and ``T = Q A Q^T``.  Then

    tr A = tr T + E[z^T P A P z]                        for random signs z;

and the eigenvalues of ``A`` are those of ``T`` and of ``P A P``, but for the one entry that couples the two: it changes
the sum of absolute eigenvalues by ``2 coupling`` at most.  Those of ``P A P`` are sampled by Lanczos from a few ``P z``
(stochastic Lanczos quadrature): a rule of ``s`` nodes is exact for polynomials of degree ``2 s - 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot, log
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from scipy.special import stdtrit
from torch import Generator, Tensor

from hesscore import memory
from hesscore.budget import NEVER, Stop
from hesscore.spectrum.ends import UNSEEN, Ends, Symmetric, finite
from hesscore.spectrum.lanczos import Product, lockstep, orthogonal, tridiagonal

PROBES = 16
"""Random sign vectors for the trace."""

DENSITY_PROBES = 4
"""Those of them that Lanczos goes on from."""

DENSITY_STEPS = 12

WINDOW = 4
"""Rules, of the last so many steps, over which a function of the spectrum is averaged.

Absolute values have a kink at zero, where most eigenvalues lie: rules with a node there say less, those without more.
"""

QUANTILE = 0.985
"""Of Student's distribution: beyond 0.975, because ``z^T A z`` has a longer tail than a normal number.

So 1.96 standard errors to either side held the trace in 96 to 97 of 100 cases, on spectra of many kinds.
"""

NORMAL = 1.96
"""Standard errors to either side that hold the true value in 95 of 100 cases."""


class Explained(Symmetric, Protocol):
    """A symmetric operator that knows what causes ``v^T A v``, by name, for each column of ``(n, k)``."""

    def attribution(self, vectors: Tensor) -> dict[str, Tensor]: ...


class Estimate(NamedTuple):
    """A number and its standard error, 0 where it is exact; 1.96 of these to either side are a 95 % interval.

    Where there are few samples, the standard error is made larger by as much as Student's distribution is wider.
    """

    value: float
    stderr: float


class Bounded(NamedTuple):
    """A number, and how far off it may be: in 95 of 100 cases where it is sampled."""

    value: float
    error: float


@dataclass(frozen=True)
class Density:
    """The spectrum as ``weights``, which sum to 1, at ``eigenvalues``, in ascending order."""

    eigenvalues: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Sampled:
    """What is known of a whole spectrum.

    ``entropy`` is ``-sum p log p`` of ``p = |lambda|/sum |lambda|``; ``negative_mass`` the share of ``sum |lambda|`` on
    negative eigenvalues.  Both are ``None`` where there is no curvature beyond rounding, or no time was left for them.
    """

    trace: Estimate
    causes: dict[str, Estimate]
    """The trace by node: they add up to it."""
    density: Density | None = None
    entropy: Bounded | None = None
    negative_mass: Bounded | None = None


def sampled(block: Explained, found: Ends, rng: Generator, stop: Stop = NEVER) -> Sampled:
    """Trace and density of a block whose ends were ``found``; ``stop`` cuts the samples short, to two at least."""
    krylov, n = found.krylov, block.shape[0]
    # The rounding of n diagonal entries, each with a sign of its own, or of z^T H z for |z|^2 = n.
    rounding = found.rounding * n**0.5
    inside = float(krylov.diagonal.sum())
    causes = {node: float(parts.sum(dtype=torch.float64)) for node, parts in block.attribution(krylov.basis.T).items()}
    if len(krylov.basis) == n:
        exact = {node: Estimate(part, rounding) for node, part in causes.items()}
        known = Sampled(Estimate(inside, rounding), exact)
        return known if found.flat else _with_density(known, found, n, [])
    fits = memory.free() // (4 * n * krylov.basis.element_size())  # with what is made of them
    signs = torch.randint(2, (n, max(2, min(PROBES, fits))), generator=rng).to(krylov.basis) * 2 - 1
    outside = orthogonal(signs, krylov.basis)
    samples: list[Tensor] = []
    for part in outside.split(min(block.at_once, DENSITY_PROBES), 1):
        samples.extend((part * finite(block @ part)).sum(0, dtype=torch.float64))
        if stop() and len(samples) > 1:
            break
    outside = outside[:, : len(samples)]
    caused = {node: parts.double() for node, parts in block.attribution(outside).items()}
    known = Sampled(
        _mean(inside, torch.stack(samples), rounding),
        {node: _mean(part, caused[node], rounding) for node, part in causes.items()},
    )
    if found.flat:
        return known
    least = UNSEEN[outside.dtype] * found.norm
    rules = _rules(lambda v: finite(block @ v), outside[:, :DENSITY_PROBES], krylov.basis, least, stop)
    return _with_density(known, found, n, rules) if rules else known


def _mean(exact: float, samples: Tensor, rounding: float) -> Estimate:
    count = len(samples)
    stderr = float(samples.std() / count**0.5) * float(stdtrit(count - 1, QUANTILE)) / NORMAL
    return Estimate(exact + float(samples.mean()), hypot(stderr, rounding))


class Rule(NamedTuple):
    """The nodes and weights ``(p, s)`` of ``s`` steps from each of ``p`` probes; weights sum to 1 in each row."""

    nodes: Tensor
    weights: Tensor


def _rules(product: Product, probes: Tensor, basis: Tensor, least: float, stop: Stop) -> list[Rule]:
    """The rules of the last ``WINDOW`` steps of Lanczos in lockstep from the columns of ``probes``, outside ``basis``.

    None if there was no time for as many.  What is no longer than ``least`` is rounding.
    """
    n, p = probes.shape
    fits = memory.free() // (4 * n * p * probes.element_size())
    steps = min(DENSITY_STEPS, n - len(basis), fits)
    rules: list[Rule] = []
    for alpha, beta in lockstep(product, probes, steps, least, basis):
        nodes, vectors = torch.linalg.eigh(tridiagonal(alpha, beta[:, :-1]))
        rules.append(Rule(nodes, vectors[:, 0].square()))
        if stop():
            break
    return rules[-WINDOW:] if len(rules) >= min(WINDOW, n - len(basis)) else []


def _with_density(known: Sampled, found: Ends, n: int, rules: list[Rule]) -> Sampled:
    """With functions of the spectrum, from the Krylov space and, by ``rules``, of the rest."""
    ritz = torch.linalg.eigvalsh(found.krylov.matrix)
    rest = n - len(ritz)
    rules = rules or [Rule(ritz.new_zeros(1, 1), ritz.new_zeros(1, 1))]
    sums = torch.stack([_sums(ritz, rest, rule, found.norm) for rule in rules])
    # The most that two sets of |lambda|, each over its sum, may differ by.
    apart = (2 * found.krylov.coupling + n**0.5 * found.rounding) / (found.norm * float(sums[:, 0].mean()))
    return replace(
        known,
        density=_density(ritz, rest, rules),
        entropy=_bounded(sums, _entropy, _fannes(min(apart, 1.0), n)),
        negative_mass=_bounded(sums, _negative_mass, 2 * apart),
    )


def _density(ritz: Tensor, rest: int, rules: list[Rule]) -> Density:
    n, share = len(ritz) + rest, 1 / (len(rules) * len(rules[0].nodes))
    values = torch.cat([ritz, *(rule.nodes.flatten() for rule in rules)])
    outside = [rest / n * share * rule.weights.flatten() for rule in rules]
    weights = torch.cat([torch.full_like(ritz, 1 / n), *outside])
    order = values.argsort()
    order = order[weights[order] > 0]
    return Density(values[order], weights[order])


def _sums(ritz: Tensor, rest: int, rule: Rule, unit: float) -> Tensor:
    """Of ``x = lambda/unit``: ``sum |x|``, ``sum |x| log |x|``, and ``sum |x|`` of negative ones: ``(3, probes)``."""

    def total(f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(ritz / unit).sum() + rest * (rule.weights * f(rule.nodes / unit)).sum(1)

    return torch.stack([total(f) for f in (Tensor.abs, lambda x: torch.xlogy(x.abs(), x.abs()), lambda x: F.relu(-x))])


def _entropy(sums: Tensor) -> Tensor:
    """``log S - B/S`` of ``S = sum |x|`` and ``B = sum |x| log |x|``."""
    return sums[0].log() - sums[1] / sums[0]


def _negative_mass(sums: Tensor) -> Tensor:
    return sums[2] / sums[0]


def _bounded(sums: Tensor, function: Callable[[Tensor], Tensor], apart: float) -> Bounded:
    """A ``function`` of mean sums, and how far off it is: by sampling, by the rule, by what is ``apart``.

    ``sums`` are ``(rules, 3, probes)``.  How it varies with the probes is seen when each is left out in turn.
    """
    mean = sums.mean(0)
    count = mean.shape[1]
    spread = function(sums.mean(2).T)
    error = apart + float(spread.max() - spread.min()) / 2
    if count > 1:
        without = function((mean.sum(1, keepdim=True) - mean) / (count - 1))
        stderr = float((without - without.mean()).square().sum() * (count - 1) / count) ** 0.5
        error += stderr * float(stdtrit(count - 1, QUANTILE))
    return Bounded(float(function(mean.mean(1))), error)


def _fannes(apart: float, n: int) -> float:
    """How far the entropies of two distributions over ``n`` may differ (Audenaert, J. Phys. A 40, 2007)."""
    return apart * log(max(n - 1, 1)) + sum(-x * log(x) for x in (apart, 1 - apart) if x > 0)
