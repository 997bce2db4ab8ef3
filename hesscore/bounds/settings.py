"""What bounds are asked of: blocks, each at a length, with its scalars and where these come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain, product
from math import inf, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from hesscore.bounds import scalars as known
from hesscore.bounds.apriori import output_norm
from hesscore.errors import UsageError
from hesscore.spec import SPEC_SUFFIXES, Spec, make_spec, read_spec

if TYPE_CHECKING:
    from torch import Tensor

    from hesscore.curvature import Curvature
    from hesscore.problem import Problem

DEFAULT = Spec(d_model=768, d_ff=3072, heads=12, activation="gelu_tanh", init_std=0.02)
"""The block that is meant where none is named: one of GPT-2 small, as it is initialised."""


ROUNDING = 1e-9
"""Of a scalar that is given as it was printed, over it."""


@dataclass(frozen=True)
class Sweep:
    """Values of the quantities that a spec's block can be varied in; one of them may have several."""

    seq_len: Sequence[int] = ()
    input_norm: Sequence[float | None] = ()
    heads: Sequence[int] = ()
    width: Sequence[int] = ()

    @property
    def swept(self) -> str | None:
        """The quantity with several values; ``UsageError`` if there are two."""
        several = [name for name, values in vars(self).items() if len(values) > 1]
        if len(several) > 1:
            raise UsageError(f"{option(several[0])} and {option(several[1])}: give several values of one of them")
        return several[0] if several else None


def option(name: str) -> str:
    """That of the command line."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Setting:
    """One block at one length; ``origin`` tells for each scalar whether it is given, measured, expected or certain."""

    layer: int
    spec: Spec
    length: int
    scalars: Mapping[str, float]
    origin: Mapping[str, str]
    curvature: Curvature | None = field(default=None, repr=False)


class Asked(NamedTuple):
    """Blocks, how many there are, and what is to be said of where they come from."""

    blocks: Iterator[Setting]
    total: int
    provenance: Mapping[str, Any]
    notes: Sequence[str] = ()


def ask(
    source: str | None,
    sweep: Sweep,
    given: Mapping[str, float],
    target: str,
    measured: bool,
    layers: str | None = None,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> Asked:
    """The blocks of a spec or a checkpoint; ``measured`` asks for their weights and data too.

    ``data`` are ``data, max_tokens, loss, seed`` as ``hesscore.blocks.open_blocks`` takes them.
    """
    seed = data.get("seed", 0)
    if sweep.input_norm and "input.norm" in given:
        raise UsageError("--input-norm and --given input.norm: give one of them")
    if source is None or Path(source).suffix.lower() in SPEC_SUFFIXES:
        named = {option(name): value for name, value in data.items() if name != "seed"} | {"--layers": layers}
        for name, value in named.items():
            if value is not None:
                raise UsageError(f"{name} has no meaning for a spec, whose one block sees seeded tokens")
        whole = DEFAULT if source is None else read_spec(source)
        spec, notes = whole.alone, ("one block of the stack, on its own",) if whole != whole.alone else ()
        count = max(map(len, vars(sweep).values()), default=1) or 1
        if not measured:
            return Asked(of_spec(spec, sweep, given, target), count, {"scalars": "expected at initialisation"}, notes)
        provenance = {"weights": f"drawn from seed {seed}", "data": f"drawn from seed {seed}"}
        return Asked(
            of_drawn(source or "the default block", spec, sweep, given, target, seed), count, provenance, notes
        )
    return _of_checkpoint(source, sweep, given, target, measured, layers, data)


def _of_checkpoint(
    source: str,
    sweep: Sweep,
    given: Mapping[str, float],
    target: str,
    measured: bool,
    layers: str | None,
    data: Mapping[str, Any],
) -> Asked:
    from hesscore import blocks
    from hesscore.analysis import select

    for name, values in vars(sweep).items():
        if name != "seq_len" and values:
            raise UsageError(f"{option(name)} is of a spec: a checkpoint has its own")
    problem = blocks.open_blocks(source, **data)
    spec, chosen = problem.spec, blocks.by_layer(select(problem, layers, None))
    provenance = {**problem.provenance, "spec": spec.model_dump()}
    if measured:
        if sweep.seq_len:
            raise UsageError("--seq-len: the data have their own length; without --data it may be chosen")
        blocks.check(problem, chosen)
        found = of_data(problem, list(chosen), given, target, data.get("seed", 0))
        return Asked(found, len(chosen), provenance, problem.notes)
    lengths = sweep.seq_len or [spec.length]
    if spec.positions == "learned" and max(lengths) > spec.length:
        raise UsageError(f"--seq-len {max(lengths)}: {source} has {spec.length} positions")
    each = (of_weights(spec, problem.parameters, list(chosen), length, given, target) for length in lengths)
    provenance = {name: value for name, value in provenance.items() if name in ("family", "checkpoint_sha256", "spec")}
    notes = ("no --data: bounds hold for any tokens, and are loose by what nothing is known of",)
    return Asked(chain.from_iterable(each), len(chosen) * len(lengths), provenance, notes)


def of_spec(spec: Spec, sweep: Sweep, given: Mapping[str, float], target: str) -> Iterator[Setting]:
    """Of a spec's block as it is initialised, without a tensor."""
    for one, length, norm in _varied(spec, sweep):
        _check(one, given, length)
        chosen = given if norm is None else {"input.norm": norm, **given}
        scalars = known.expected(one, length, target, chosen.get("input.norm"))
        origin = dict.fromkeys(scalars, "expected") | dict.fromkeys(chosen, "given")
        yield Setting(0, one, length, {**scalars, **chosen}, origin)


def of_drawn(
    source: str, spec: Spec, sweep: Sweep, given: Mapping[str, float], target: str, seed: int
) -> Iterator[Setting]:
    """Of a spec's block with seeded weights, on seeded tokens of which the longest has the norm that is asked for."""
    from hesscore.problem import drawn

    for one, length, norm in _varied(spec, sweep):
        one = one.model_copy(update={"seq_len": length})
        _check(one, given, length)
        yield _measured(0, drawn(source, one, seed, norm), length, given, target, seed)


def of_data(
    problem: Problem, layers: Sequence[int], given: Mapping[str, float], target: str, seed: int
) -> Iterator[Setting]:
    """Of a model's blocks on their own, each on its real input."""
    length = problem.batches[0].constants["weights"].shape[1]
    for layer in layers:
        _check(problem.spec.alone, given, length)
        yield _measured(layer, problem, length, given, target, seed)


def of_weights(
    spec: Spec,
    weights: Mapping[str, Tensor],
    layers: Sequence[int],
    length: int,
    given: Mapping[str, float],
    target: str,
) -> Iterator[Setting]:
    """Of a model's blocks whatever the tokens: as long as the embeddings and the blocks before can make them."""
    from hesscore.bounds import measure

    one = spec.alone
    _check(one, given, length)
    norm = measure.embedded(spec, weights)
    for layer in range(max(layers) + 1):
        mine = f"blocks.{spec.owner(layer)}."
        own = {name.replace(mine, "blocks.0."): weight.double() for name, weight in weights.items()}
        aim = known.target_norm(one, length, target, norm)
        certain = {"input.norm": norm, "input.spread": norm, "target.norm": aim}
        certain |= {name: sqrt(spec.norm_eps) for name in known.names(one) if name.endswith(".scale")}
        certain |= {} if spec.causal else {"attn.peak": 1.0}
        of_block = measure.of_weights(one, own)
        scalars = {**certain, **of_block, **given}
        origin = dict.fromkeys(certain, "certain") | dict.fromkeys(of_block, "weights") | dict.fromkeys(given, "given")
        if layer in layers:
            yield Setting(layer, one, length, scalars, origin)
        norm = output_norm(one, scalars, length)


def _measured(layer: int, problem: Problem, length: int, given: Mapping[str, float], target: str, seed: int) -> Setting:
    """``UsageError`` where the data go beyond a scalar that is given: the bound would not hold."""
    from hesscore.bounds import measure

    one, curvature = problem.spec.alone, problem.block(layer, target, seed)
    of_block, of_tokens = measure.of_weights(one, curvature.leaves), measure.of_data(curvature, one)
    found = of_block | of_tokens
    for name, value in given.items():
        seen, allowed = (1 / found[name], 1 / value) if name.endswith(".scale") else (found[name], value)
        if seen > allowed * (1 + ROUNDING):
            raise UsageError(f"{name}: {value:g} is given, but block {layer} has {found[name]:g} on these data")
    origin = dict.fromkeys(of_block, "weights") | dict.fromkeys(of_tokens, "data") | dict.fromkeys(given, "given")
    return Setting(layer, one, length, {**found, **given}, origin, curvature)


def _check(spec: Spec, given: Mapping[str, float], length: int) -> None:
    """``UsageError`` that names a scalar which the block does not have, or which cannot be."""
    names = known.names(spec)
    for name, value in given.items():
        if name not in names:
            near = get_close_matches(name, names, 1)
            raise UsageError(
                f"{name or repr(name)}: no scalar of this block" + (f", did you mean {near[0]}?" if near else "")
            )
        if not 0 <= value < inf:
            raise UsageError(f"{name}: {value} is no finite number of at least 0")
        if not value and name.endswith(".scale"):
            raise UsageError(f"{name}: no row scale is 0")
    peak = given.get("attn.peak", 1.0)
    if not 1 / length <= peak * (1 + ROUNDING) or peak > 1:
        raise UsageError(f"attn.peak: {peak} does not lie between 1/{length} and 1")


def _varied(spec: Spec, sweep: Sweep) -> Iterator[tuple[Spec, int, float | None]]:
    """A spec, a length and the norm of the longest token, for each value."""
    widths, heads = sweep.width or [spec.d_model], sweep.heads or [spec.heads]
    lengths, norms = sweep.seq_len or [spec.seq_len], sweep.input_norm or [None]
    for width, count, length, norm in product(widths, heads, lengths, norms):
        fields = {"d_model": width, "d_ff": spec.hidden_at(width), "heads": count}
        yield make_spec({**spec.model_dump(), **fields}), length, norm
