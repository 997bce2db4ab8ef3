"""How far the tokens of a block reach, and how fast they move: second-order jets of sizes, without a tensor.

A jet bounds, over all tokens ``i``, the vectors ``y_i``, their derivatives by a unit tangent of one parameter, and
their second derivatives by unit tangents of two.  Every map of a block takes jets to jets by the chain rule

    d y = f' dx,        d^2 y [u, w] = f' d^2 x [u, w] + f'' [dx[u], dx[w]]

with a bound of ``f'`` and of ``f''`` in the place of each.  No average over tokens makes the largest of them larger, so
no power of the sequence length comes in.  ``docs/bounds.md`` proves each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from math import inf, sqrt

Pair = tuple[str, str]

SOFTMAX_THIRD = 2.0
"""``|k3(a, b, c)| <= 2 r sd(b) sd(c)`` where ``|a| <= r``: so far is it from its mean at most."""

NORM_SECOND = 2 / sqrt(3)
"""``|D^2 y [u, w]| <= (2/sqrt 3) |u| |w| / (s^2 sqrt d)`` for a norm of row scale ``s``."""


@dataclass(frozen=True)
class Size:
    """Bounds on vectors, one for each token: on the largest, and on a mean over the tokens that never exceeds it.

    Of values, the mean is the root mean square along any one direction, ``|Y|_2 / sqrt(N)``; of first derivatives, the
    root mean square of the vectors' norms; of second ones, the plain mean of these.  It holds for the tokens in the
    loss, by their weights, and for those of each sequence.
    """

    peak: float
    mean: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", min(self.mean, self.peak))

    def __add__(self, other: Size) -> Size:
        return Size(self.peak + other.peak, self.mean + other.mean)

    def __mul__(self, other: Size) -> Size:
        """Of products of vectors that both move: the plain mean, by Cauchy and Schwarz."""
        return Size(times(self.peak, other.peak), times(self.mean, other.mean))

    def __rmul__(self, factor: float) -> Size:
        return Size(times(factor, self.peak), times(factor, self.mean))


def times(a: float, b: float) -> float:
    """``a b``: what does not move stays put, however steep a map may be."""
    return a * b if a and b else 0.0


ZERO, ONE = Size(0.0, 0.0), Size(1.0, 1.0)


@dataclass(frozen=True)
class Jet:
    """``value``, first derivatives by parameter, and second ones by pairs of parameters in alphabetical order."""

    value: Size
    first: dict[str, Size] = field(default_factory=dict)
    second: dict[Pair, Size] = field(default_factory=dict)

    def along(self, name: str) -> Size:
        return self.first.get(name, ZERO)

    def across(self, a: str, b: str) -> Size:
        return self.second.get((a, b) if a <= b else (b, a), ZERO)

    def __rmul__(self, factor: float) -> Jet:
        """Behind a linear map of norm ``factor``."""
        return Jet(
            factor * self.value,
            {name: factor * size for name, size in self.first.items()},
            {names: factor * size for names, size in self.second.items()},
        )

    def __add__(self, other: Jet) -> Jet:
        return Jet(
            self.value + other.value,
            {name: self.along(name) + other.along(name) for name in self.first | other.first},
            {names: self.across(*names) + other.across(*names) for names in self.second | other.second},
        )

    def behind(self, slope: float, bend: float, value: Size, steep: float = 1.0) -> Jet:
        """Behind a map of each token with ``|f'| <= slope`` and ``|f''| <= bend steep^2``, which may be no float."""
        return Jet(
            value,
            {name: slope * size for name, size in self.first.items()},
            {
                (a, b): slope * self.across(a, b) + bend * ((steep * self.along(a)) * (steep * self.along(b)))
                for a, b in pairs(self.first)
            },
        )

    def without(self, name: str) -> Jet:
        """As if it did not depend on a parameter."""
        return Jet(
            self.value,
            {a: size for a, size in self.first.items() if a != name},
            {names: size for names, size in self.second.items() if name not in names},
        )


def pairs(names: Iterable[str]) -> list[Pair]:
    return list(combinations_with_replacement(sorted(names), 2))


def weigh(x: Jet, name: str, size: float, reach: Size | None = None) -> Jet:
    """``x W`` by the spectral norm of a matrix, or ``x * g`` by the largest entry of a gain.

    A unit tangent of the parameter moves a token by ``reach`` at most, which is its own size unless given: and so, in
    the second derivative, it moves a token's tangent.
    """
    y = size * x
    return Jet(
        y.value,
        y.first | {name: reach or x.value},
        y.second | {(min(a, name), max(a, name)): moved for a, moved in x.first.items()},
    )


def shift(x: Jet, name: str, size: float | None) -> Jet:
    """``x + b`` by the norm of ``b``; ``None`` is no shift."""
    return x if size is None else x + Jet(Size(size, size), {name: ONE})


def linear(x: Jet, name: str, weight: float, bias: float | None) -> Jet:
    """``x W + b``."""
    return shift(weigh(x, f"{name}.weight", weight), f"{name}.bias", bias)


def multiply(x: Jet, y: Jet) -> Jet:
    """By elements: ``|x * y| <= |x| |y|``; ``|X * Y|_2`` is at most the longest row of one times the other's column."""
    a, b = x.value, y.value
    mean = min(times(a.peak, b.mean), times(a.mean, b.peak))
    return Jet(
        Size(times(a.peak, b.peak), mean),
        {name: a.peak * y.along(name) + b.peak * x.along(name) for name in x.first | y.first},
        {
            (u, w): a.peak * y.across(u, w)
            + b.peak * x.across(u, w)
            + x.along(u) * y.along(w)
            + x.along(w) * y.along(u)
            for u, w in pairs(x.first | y.first)
        },
    )


def normalise(x: Jet, scale: float, width: int, entry: float, name: str, gain: float, bias: float | None) -> Jet:
    """LayerNorm or RMSNorm by its smallest row scale ``s``: ``|f'| <= 1/s``, ``|f''| <= (2/sqrt 3)/(s^2 sqrt d)``.

    A normalised token is no longer than ``sqrt(d)``; none of its entries is larger than ``entry``.
    """
    slope = 1 / scale if scale else inf
    long = sqrt(width)
    value = Size(long, times(slope, x.value.mean))
    y = x.behind(slope, NORM_SECOND / long, value, steep=slope)
    return shift(weigh(y, f"{name}.weight", gain, Size(entry, value.mean)), f"{name}.bias", bias)


def activate(x: Jet, slope: float, bend: float) -> Jet:
    """An activation with ``|f(x)| <= slope |x|``; the mean of a value along one direction does not survive it."""
    peak = times(slope, x.value.peak)
    return x.behind(slope, bend, Size(peak, peak))


@dataclass(frozen=True)
class Head:
    """Bounds that hold in each head of ``width``: the longest query, and the sizes of keys and values."""

    width: int
    query: float
    key: Size
    value: Size
    key_deviation: float = inf
    """Their largest standard deviation under an attention row, along any direction, if it is known."""
    value_deviation: float = inf


def attend(q: Jet, k: Jet, v: Jet, head: Head, peak: float, length: int) -> Jet:
    """Attention as an expectation: the mixed values ``o_i = E_i[v]`` of all heads side by side.

    The peaks of ``k`` and ``v`` are roots of the sum of squares, over the query heads, of the peak in each.  With
    moments under the attention row of token ``i``, and Cauchy and Schwarz,

        d o      = E[dv] + Cov(v, ds),                                    |Cov(v, ds)| <= sd(v) sd(ds)
        d^2 o    = E[d^2 v] + Cov(dv, ds') + Cov(dv', ds) + k3(v, ds, ds') + Cov(v, d^2 s)
        d s_ij   = (dq_i . k_j + q_i . dk_j) / sqrt(d_k)

    ``sd(y)^2 <= E[y^2]`` is at most the largest square, and at most ``peak`` times the sum of squares over the tokens,
    where no attention weight exceeds ``peak``.
    """
    share = sqrt(peak * length)

    def moment(size: Size) -> float:
        return min(size.peak, share * size.mean)

    def scores(name: str) -> Size:
        moved = root * head.query * moment(k.along(name))
        return root * sd_key * q.along(name) + Size(moved, moved)

    root = 1 / sqrt(head.width)
    sd_key = min(moment(head.key), head.key_deviation)
    sd_value = min(moment(head.value), head.value_deviation)
    names = q.first | k.first | v.first
    ds = {name: scores(name) for name in names}
    dv = {name: moment(v.along(name)) for name in names}
    first = {name: Size(dv[name], dv[name]) + sd_value * ds[name] for name in names}
    second = {}
    for a, b in pairs(names):
        of_keys = root * head.query * k.across(a, b).peak
        dds = root * (
            sd_key * q.across(a, b) + moment(k.along(b)) * q.along(a) + moment(k.along(a)) * q.along(b)
        ) + Size(of_keys, of_keys)
        mixed = v.across(a, b).peak
        second[a, b] = (
            Size(mixed, mixed)
            + dv[a] * ds[b]
            + dv[b] * ds[a]
            + SOFTMAX_THIRD * head.value.peak * (ds[a] * ds[b])
            + sd_value * dds
        )
    mixed = moment(v.value)
    return Jet(Size(mixed, mixed), first, second)
