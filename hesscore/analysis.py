"""The main job: one row of curvature for every parameter block, each number with its error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from zlib import crc32

import torch
from torch import Tensor

from hesscore.component import KINDS
from hesscore.curvature import Curvature
from hesscore.errors import UsageError
from hesscore.files import short
from hesscore.problem import Problem
from hesscore.spectrum.ends import EXACT_UP_TO, NonFiniteError, ends
from hesscore.wiring.names import place


@dataclass(frozen=True)
class Row:
    """The curvature of one parameter block: the block of the Hessian by this parameter alone.

    ``lambda_max`` and ``lambda_min`` are its algebraically largest and smallest eigenvalues (Rayleigh quotients) with
    their errors (see ``Ends``); ``from_*`` splits ``lambda_max`` over the maps that cause it.
    ``None`` is a number that could not be had; ``note`` says why.
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
    from_loss: float | None = None
    from_softmax: float | None = None
    from_norm: float | None = None
    from_activation: float | None = None
    from_product: float | None = None
    converged: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        return f"{'' if self.layer is None else f'blocks.{self.layer}.'}{self.component}.{self.parameter}"


COLUMNS = tuple(field.name for field in fields(Row))


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
            raise UsageError(f"--components {short(glob) or repr(glob)} matches nothing among {', '.join(known)}")
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


def analyze(
    problem: Problem, curvature: Curvature, names: Sequence[str], seed: int = 0, tolerance: float = 1e-3
) -> Iterator[Row]:
    """One row for each parameter in ``names``, in turn.

    A row has converged when the errors of its eigenvalues are within ``tolerance`` times the block's spectral norm.
    What is drawn for a block depends on ``seed`` and its name alone: it is the same whatever else is selected.
    """
    for name in names:
        yield _row(problem, curvature, name, seed, tolerance)


def cost(problem: Problem, name: str) -> float:
    """About how long a row takes, in arbitrary units: products needed, times the layers that each passes."""
    layer = place(name)[0]
    passed = problem.spec.layers - (layer or 0) if name.startswith(("embed", "blocks")) else 1
    count = problem.parameters[name].numel()
    return passed * (count if count <= EXACT_UP_TO else EXACT_UP_TO)


def _row(problem: Problem, curvature: Curvature, name: str, seed: int, tolerance: float) -> Row:
    layer, component, parameter = place(name)
    weight = curvature.leaves[name]
    row = Row(
        layer=layer,
        component=component,
        parameter=parameter,
        tensor=problem.tensors.get(name, name),
        shape=tuple(weight.shape),
        n_params=weight.numel(),
        weight_norm=_norm(weight),
        grad_norm=_norm(curvature.gradient[name]),
        note="also the head (tied)" if name == "embed.token.weight" and problem.spec.tied else "",
    )
    block = curvature.block(name)
    rng = torch.Generator().manual_seed(seed ^ crc32(name.encode()))
    try:
        found = ends(block, tolerance, rng)
    except NonFiniteError:
        return _noted(row, "a product with the Hessian is not finite")
    causes = dict.fromkeys(KINDS, 0.0)
    kinds = {node.name: node.kind or "" for node in problem.graph.nodes}
    for node, part in curvature.attribution(block.unflatten(found.vectors[:, 1:])).items():
        causes[kinds[node]] += float(part)
    (lowest, highest), (lowest_error, highest_error) = found.values, found.errors
    row = replace(
        row,
        lambda_max=highest,
        lambda_max_error=highest_error,
        lambda_min=lowest,
        lambda_min_error=lowest_error,
        trace=found.trace.value,
        trace_stderr=found.trace.stderr,
        converged=found.converged,
        from_loss=causes["loss"],
        from_softmax=causes["softmax"],
        from_norm=causes["norm"],
        from_activation=causes["activation"],
        from_product=causes["product"],
    )
    if found.flat:
        return _noted(row, "no curvature beyond rounding")
    if highest > highest_error:
        row = replace(row, gauss_newton_share=causes["loss"] / highest)
    return row if found.converged else _noted(row, "not converged")


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))  # float32 sums of millions lose digits


def _noted(row: Row, note: str) -> Row:
    return replace(row, note=f"{row.note}; {note}" if row.note else note)
