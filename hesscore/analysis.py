"""The main job: the curvature of every parameter block and of the whole model, each number with its error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import hypot
from zlib import crc32

import torch
from torch import Generator, Tensor

from hesscore.budget import Budget, Stop
from hesscore.checkpoints.optimizer import Adam
from hesscore.component import KINDS
from hesscore.curvature import Block, Curvature
from hesscore.errors import UsageError
from hesscore.files import short
from hesscore.norms import norm_bounds
from hesscore.problem import Problem
from hesscore.spectrum.condition import condition
from hesscore.spectrum.ends import EXACT_UP_TO, Ends, NonFiniteError, ends
from hesscore.spectrum.sampling import DENSITY_PROBES, DENSITY_STEPS, PROBES, Density, Estimate, Sampled, sampled
from hesscore.spectrum.scaled import Scaled
from hesscore.wiring.names import place

LANCZOS = 45
"""Products for the ends of a spectrum: 24 to 57 on trained models."""

PHASES = (0.7, 0.2, 0.1)
"""Shares of a row's time for the ends of its spectrum, for samples of the rest, and for the preconditioned one."""

COARSE = 1e-2
"""Error of the preconditioned sharpness, over its block's spectral norm, to reach."""

WHOLES = 3.0
"""Work for the whole model, over that for a block of its first layer: 1.5, and twice that as it says most."""

WHOLE = "model"
"""Stands for all parameters together."""


@dataclass(frozen=True)
class Row:
    """The curvature of one parameter block: the block of the Hessian by this parameter alone, or the whole Hessian.

    ``docs/report.md`` defines every column.  ``None`` is a number that could not be had; ``note`` says why.
    """

    layer: int | None
    component: str
    parameter: str
    tensor: str
    shape: tuple[int, ...]
    n_params: int
    weight_norm: float
    grad_norm: float
    lambda_max: float | None = None
    lambda_max_error: float | None = None
    lambda_min: float | None = None
    lambda_min_error: float | None = None
    trace: float | None = None
    trace_stderr: float | None = None
    gauss_newton_share: float | None = None
    condition: float | None = None
    condition_is_exact: bool = False
    spectral_entropy: float | None = None
    spectral_entropy_error: float | None = None
    negative_mass: float | None = None
    negative_mass_error: float | None = None
    bound_upper: float | None = None
    bound_lower: float | None = None
    from_loss: float | None = None
    from_softmax: float | None = None
    from_norm: float | None = None
    from_activation: float | None = None
    from_product: float | None = None
    preconditioned_sharpness: float | None = None
    preconditioned_sharpness_error: float | None = None
    lr_scale: float | None = None
    converged: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        if self.component == WHOLE:
            return WHOLE
        return f"{'' if self.layer is None else f'blocks.{self.layer}.'}{self.component}.{self.parameter}"

    @property
    def norm(self) -> float | None:
        """The spectral norm: the larger absolute eigenvalue."""
        if self.lambda_max is None or self.lambda_min is None:
            return None
        return max(abs(self.lambda_max), abs(self.lambda_min))

    @property
    def norm_error(self) -> float:
        return max(self.lambda_max_error or 0.0, self.lambda_min_error or 0.0)


COLUMNS = tuple(column.name for column in fields(Row))


@dataclass(frozen=True)
class Finding:
    """A row, and what does not fit into one."""

    row: Row
    density: Density | None = None
    """The whole spectrum."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """``lambda_max`` by the node of the model that causes it: they add up to it."""
    trace_causes: Mapping[str, Estimate] = field(default_factory=dict)
    """The trace, likewise."""


def select(problem: Problem, layers: str | None = None, components: str | None = None) -> list[str]:
    """The parameters whose layer is in ``layers`` (``0,3-5``) and whose component matches one of ``components``.

    ``components`` are globs on the component (``attn.*,mlp.up``).  One that matches nothing is an error.
    """
    wanted = None if layers is None else _layers(layers, problem.spec.layers)
    for layer in sorted(wanted or ()):
        if (owner := problem.spec.owner(layer)) not in (wanted or ()):
            raise UsageError(f"--layers {short(layers)}: layer {layer} has the weights of layer {owner}: give that")
    within = {name: place(name) for name in problem.graph.parameters}
    within = {name: at for name, at in within.items() if wanted is None or at[0] in wanted}
    globs = ["*"] if components is None else [glob.strip() for glob in components.split(",")]
    known = sorted({component for _, component, _ in within.values()})
    for glob in globs:
        if not any(fnmatchcase(component, glob) for component in known):
            missed = f"--components {short(glob) or repr(glob)} matches nothing among {', '.join(known)}"
            around = any(fnmatchcase(place(name)[1], glob) for name in problem.graph.parameters if name not in within)
            raise UsageError(missed + f"; it is in no layer of --layers {layers}: leave that out" * around)
    return [name for name, (_, component, _) in within.items() if any(fnmatchcase(component, glob) for glob in globs)]


def _layers(text: str, count: int) -> set[int]:
    given = f"--layers {short(text)}"
    known = {str(layer): layer for layer in range(count)}  # not int(), which refuses to read thousands of digits
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{given}: layers are given as 0,3-5")
        if first not in known or (dash and last not in known):
            raise UsageError(f"{given}: the model has layers 0 to {count - 1}")
        start, end = known[first], known[last or first]
        if start > end:
            raise UsageError(f"{given}: {part.strip()} runs backwards, write {end}-{start}")
        chosen |= set(range(start, end + 1))
    return chosen


@dataclass(frozen=True)
class Analyst:
    """Measures the blocks of one problem.

    A row has converged when the errors of its eigenvalues are within ``tolerance`` times the block's spectral norm.
    What is drawn for a block depends on ``seed`` and its name alone: it is the same whatever else is selected.
    """

    problem: Problem
    curvature: Curvature
    seed: int = 0
    tolerance: float = 1e-3

    @cached_property
    def bounds(self) -> dict[str, float]:
        names = self.curvature.parameters
        return norm_bounds(self.curvature, {**{name: [name] for name in names}, WHOLE: names})

    def block(self, name: str, budget: Budget | None = None) -> Finding:
        """The block of one parameter; ``budget`` cuts it short, with errors as large as they then are."""
        layer, component, parameter = place(name)
        weight, tied = self.curvature.leaves[name], name == "embed.token.weight" and self.problem.spec.tied
        row = Row(
            layer=layer,
            component=component,
            parameter=parameter,
            tensor=self.problem.tensors.get(name, name),
            shape=tuple(weight.shape),
            n_params=weight.numel(),
            weight_norm=_norm([weight]),
            grad_norm=_norm([self.curvature.gradient[name]]),
            bound_upper=self.bounds[name],
            note="also the head (tied)" if tied else "",
        )
        return self._measured(row, self.curvature.block(name), cost(self.problem, name), budget)

    def whole(self, budget: Budget | None = None) -> Finding:
        """All parameters together."""
        curvature = self.curvature
        count = sum(weight.numel() for weight in self.problem.parameters.values())
        row = Row(
            layer=None,
            component=WHOLE,
            parameter="all",
            tensor="",
            shape=(count,),
            n_params=count,
            weight_norm=_norm(self.problem.parameters.values()),
            grad_norm=_norm(curvature.gradient.values()),
            bound_upper=self.bounds[WHOLE],
        )
        return self._measured(row, curvature.block(curvature.parameters), cost(self.problem), budget)

    def _measured(self, row: Row, block: Block, work: float, budget: Budget | None) -> Finding:
        rng = torch.Generator().manual_seed(self.seed ^ crc32(row.name.encode()))
        adam = self.problem.optimizer
        steps = (budget or Budget(None, work)).step(work, PHASES)
        try:
            found = ends(block, self.tolerance, rng, steps[0])
            rest = sampled(block, found, rng, steps[1])
            if adam and not found.flat and not steps[2]():
                row = _preconditioned(row, block, found, adam, rng, steps[2])
        except NonFiniteError:
            return Finding(_noted(row, "a product with the Hessian is not finite"))
        causes = {
            node: float(part)
            for node, part in self.curvature.attribution(block.unflatten(found.vectors[:, 1:])).items()
        }
        row = self._explained(_with_spectrum(row, found, rest), found, causes)
        return Finding(row, rest.density, causes, rest.causes)

    def _explained(self, row: Row, found: Ends, causes: Mapping[str, float]) -> Row:
        """With what causes ``lambda_max``, and notes of what is missing."""
        nodes, graph = self.problem.graph.nodes, self.problem.graph
        by_kind = dict.fromkeys(KINDS, 0.0)
        for node, part in causes.items():
            by_kind[nodes[graph.index[node]].kind or ""] += part
        row = replace(
            row,
            from_loss=by_kind["loss"],
            from_softmax=by_kind["softmax"],
            from_norm=by_kind["norm"],
            from_activation=by_kind["activation"],
            from_product=by_kind["product"],
        )
        if found.flat:
            return _noted(row, "no curvature beyond rounding")
        (_, highest), (_, error) = found.values, found.errors
        if highest > error:
            row = replace(row, gauss_newton_share=by_kind["loss"] / highest)
        if row.spectral_entropy is None:
            row = _noted(row, "no time, or no memory, for its whole spectrum")
        if self.problem.optimizer and row.preconditioned_sharpness is None:
            row = _noted(row, "no time for its preconditioned sharpness")
        return row if found.converged else _noted(row, "not converged")


def _preconditioned(row: Row, block: Block, found: Ends, adam: Adam, rng: Generator, stop: Stop) -> Row:
    """With the top eigenvalue in Adam's coordinates; of a block that is known whole, without another product."""
    scale = torch.cat([adam.preconditioner(name).flatten().rsqrt() for name in block.rows])
    basis = found.krylov.basis.double()
    if len(basis) == len(scale):
        matrix = scale[:, None] * (basis.T @ (found.krylov.diagonal[:, None] * basis)) * scale
        sharpness, error = float(torch.linalg.eigvalsh(matrix)[-1]), found.rounding * float(scale.square().max())
    else:
        scaled = ends(Scaled(block, scale.to(block.owner.loss)), COARSE, rng, stop)
        (_, sharpness), (_, error) = scaled.values, scaled.errors
    return replace(row, preconditioned_sharpness=sharpness, preconditioned_sharpness_error=error)


def _with_spectrum(row: Row, found: Ends, rest: Sampled) -> Row:
    (lowest, highest), (lowest_error, highest_error) = found.values, found.errors
    row = replace(
        row,
        lambda_max=highest,
        lambda_max_error=highest_error,
        lambda_min=lowest,
        lambda_min_error=lowest_error,
        trace=rest.trace.value,
        trace_stderr=rest.trace.stderr,
        bound_lower=max(0.0, found.norm - found.rounding),
        converged=found.converged,
    )
    if not found.flat:
        row = replace(row, lr_scale=(max(highest, 0.0) + highest_error) ** -0.5)
    if ratio := condition(found):
        row = replace(row, condition=ratio.value, condition_is_exact=ratio.exact)
    if rest.entropy and rest.negative_mass:
        (entropy, entropy_error), (negative, negative_error) = rest.entropy, rest.negative_mass
        row = replace(row, spectral_entropy=entropy, spectral_entropy_error=entropy_error)
        row = replace(row, negative_mass=negative, negative_mass_error=negative_error)
    return row


def cost(problem: Problem, name: str | None = None) -> float:
    """About how long a row takes, or the whole, in arbitrary units: products needed, times the layers each passes."""
    sampling = (2 if problem.optimizer else 1) * LANCZOS + PROBES + DENSITY_PROBES * DENSITY_STEPS
    if name is None:
        return WHOLES * problem.spec.layers * sampling
    layer = place(name)[0]
    passed = problem.spec.layers - (layer or 0) if name.startswith(("embed", "blocks")) else 1
    count = problem.parameters[name].numel()
    return passed * (count if count <= EXACT_UP_TO else sampling)


def _norm(tensors: Iterable[Tensor]) -> float:
    # In float64, because float32 sums of millions lose digits.
    return hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


def _noted(row: Row, note: str) -> Row:
    return replace(row, note=f"{row.note}; {note}" if row.note else note)
