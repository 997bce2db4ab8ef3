"""How unlike the blocks of a model are, and which optimizer that favours.

For a step ``u`` with parts ``u_b``, a quadratic model of the loss without the curvature between blocks is

    L(theta + u)  <=  L + g^T u + 1/2 sum_b |H_b| |u_b|^2 .

Along ``-g`` its best step lowers the loss by ``|g|^2/(2 Lambda_G)``, with ``Lambda_G = sum_b (|g_b|^2/|g|^2) |H_b|``;
along ``-sign(g)`` by ``|g|_1^2/(2 P Lambda_P)``, with ``Lambda_P = sum_b (P_b/P) |H_b|``.  So many steps take either
method through the loss, as long as nothing changes; their ratio says which one the geometry favours.  (The two sums are
those of Tomihari and Sato, arXiv 2502.00213.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hesscore.analysis import Finding
from hesscore.spectrum.sampling import Density

CLEAR = 1.5
"""How many times as fast a method must be, within the errors, to be favoured."""

DECADES = 6
"""Of absolute eigenvalues that are told apart, from the largest one of all blocks down."""

BINS_PER_DECADE = 2


@dataclass(frozen=True)
class Heterogeneity:
    """Of all blocks that have been measured; ``docs/report.md`` defines each number."""

    blocks: int
    gini_grad_norm: float
    gini_curvature: float
    lambda_g: float | None
    lambda_g_error: float | None
    lambda_p: float
    lambda_p_error: float
    correlation: float | None
    correlation_p_value: float | None
    gradient_density: float | None
    gd_decrease: float | None
    sign_decrease: float | None
    sign_over_gd: float | None
    js_mean: float | None
    js_blocks: list[str]
    js_distances: list[list[float]]
    verdict: str


def heterogeneity(findings: Sequence[Finding], gradient: Mapping[str, Tensor]) -> Heterogeneity | None:
    """Of the blocks in ``findings``, where there are at least two; ``gradient`` is that of the loss."""
    known = [finding for finding in findings if finding.row.norm is not None]
    if len(known) < 2:
        return None
    rows = [finding.row for finding in known]
    norms = np.array([row.norm for row in rows])
    errors = np.array([row.norm_error for row in rows])
    sizes = np.array([float(row.n_params) for row in rows])
    slopes = np.array([row.grad_norm for row in rows])
    taxicab = sum(float(gradient[row.name].double().abs().sum()) for row in rows)
    square, total = float((slopes**2).sum()), float(sizes.sum())
    by_size, by_slope = sizes / total, slopes**2 / square if square else None
    lambda_p, lambda_p_error = float(by_size @ norms), float(by_size @ errors)
    lambda_g = lambda_g_error = density = gd = sign = ratio = None
    if by_slope is not None:
        lambda_g, lambda_g_error = float(by_slope @ norms), float(by_slope @ errors)
        density = taxicab**2 / (total * square)
        if lambda_g > lambda_g_error and lambda_p > lambda_p_error:
            gd, sign = square / (2 * lambda_g), taxicab**2 / (2 * total * lambda_p)
            ratio = sign / gd
    correlation, p_value = _correlation(slopes, norms)
    names, distances = _distances(known)
    pairs = distances[np.triu_indices(len(names), 1)]
    return Heterogeneity(
        blocks=len(known),
        gini_grad_norm=gini(slopes),
        gini_curvature=gini(norms),
        lambda_g=lambda_g,
        lambda_g_error=lambda_g_error,
        lambda_p=lambda_p,
        lambda_p_error=lambda_p_error,
        correlation=correlation,
        correlation_p_value=p_value,
        gradient_density=density,
        gd_decrease=gd,
        sign_decrease=sign,
        sign_over_gd=ratio,
        js_mean=float(pairs.mean()) if len(pairs) else None,
        js_blocks=names,
        js_distances=distances.tolist(),
        verdict=_verdict(ratio, lambda_g, lambda_g_error, lambda_p, lambda_p_error),
    )


def gini(values: NDArray[np.float64]) -> float:
    """``2 sum_i i x_i/(n sum x) - (n + 1)/n`` of ascending ``x``: 0 if all are equal, ``1 - 1/n`` if one has all."""
    x, n = np.sort(values), len(values)
    return float(2 * (np.arange(1, n + 1) @ x) / (n * x.sum()) - (n + 1) / n) if x.sum() else 0.0


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Spearman's, and the chance of as much without any; none for fewer than three blocks, or if all are equal."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None, None
    from scipy.stats import spearmanr  # which takes a second to load

    found = spearmanr(a, b)
    return float(found.statistic), float(found.pvalue)


def _distances(findings: Sequence[Finding]) -> tuple[list[str], NDArray[np.float64]]:
    """Jensen-Shannon distances (the root of the divergence in bits, 0 to 1) between the blocks' spectra.

    Of eigenvalues by sign and half a decade, from the largest ``|lambda|`` of all blocks down to a millionth of it;
    what is smaller is one class.
    """
    from scipy.spatial.distance import jensenshannon

    spectra = {finding.row.name: finding.density for finding in findings if finding.density is not None}
    largest = max((float(found.eigenvalues.abs().max()) for found in spectra.values()), default=1.0)
    classes = {name: histogram(found, largest) for name, found in spectra.items()}
    distances = [[float(jensenshannon(a, b, base=2)) for b in classes.values()] for a in classes.values()]
    return list(classes), np.nan_to_num(np.array(distances).reshape(len(classes), len(classes)))  # rounding below zero


def histogram(density: Density, largest: float) -> NDArray[np.float64]:
    """The weights of eigenvalues by sign and size: negative ones, from large to small, nearly zero, positive ones."""
    size = density.eigenvalues.abs() / largest
    depth = (-BINS_PER_DECADE * torch.log10(size.clamp(min=10.0 ** -(DECADES + 1)))).floor()
    count = BINS_PER_DECADE * DECADES
    place = (count - depth).clamp(min=0, max=count) * density.eigenvalues.sign() + count
    return torch.bincount(place.long(), density.weights, minlength=2 * count + 1).double().numpy()


def _verdict(ratio: float | None, g: float | None, g_error: float | None, p: float, p_error: float) -> str:
    if ratio is None or g is None or g_error is None:
        return "There is no gradient, or no curvature beyond its error, to compare optimizers by."
    low = ratio * (g - g_error) / g * p / (p + p_error)
    high = ratio * (g + g_error) / g * p / (p - p_error)
    if low > CLEAR:
        return (
            f"A step of sign descent (the family of Adam) gains {ratio:.3g} times as much as one of gradient descent."
        )
    if high < 1 / CLEAR:
        return f"A step of gradient descent gains {1 / ratio:.3g} times as much as one of sign descent (Adam's family)."
    return f"Neither is clearly favoured: a step of sign descent gains {ratio:.3g} times that of gradient descent."
