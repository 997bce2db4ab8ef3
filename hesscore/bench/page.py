"""The speed tables as a page, from what ``hess bench --json`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

SUMMARY = ("what", "size", "ours", "fastest rival", "times as fast", "/ floor")

Row = Mapping[str, Any]
"""A ``timing.Timing``, by field."""

TIGHT = ("part", "tier", "pairs", "median", "largest", "whole")

COLUMNS = ("contestant", "time", "/ ours", "/ floor", "peak (MB)", "of a run (MB)", "error")

LEGEND = """\
Each table is one thing, computed by several contestants from the same weights and data. `hess bench` also times
[curvlinops](https://pypi.org/project/curvlinops-for-pytorch/) 3.0 (with the norms written out, as it is wrong on
`F.layer_norm`) and [hessian-eigenthings](https://pypi.org/project/hessian-eigenthings/) 1.0, where they are installed.

- **Roles**: *ours* is `hesscore`; *rivals* are autograd, `torch.func` and other libraries, each in a way that is right
  (`torch.func.hessian` is not, on a norm that learns); a *floor* is what no implementation can do without: to write the
  result once, or the matrix products alone. What is *structured* is written out for its value alone, not in its time,
  and may be below that floor.
- **Time**: the median over turns taken by all contestants of a table, after a first run that does not count. Where a
  name says no more, it is from weights and data to the result. In a Hessian-vector product what does not depend on the
  vector is prepared before: the point and its gradient for ours, the graph of the gradient for the kept graph, and
  nothing for the others.
- **Fresh memory**: an array of more than 32 MiB is made of new pages in every call, which cost several times what
  filling them does; smaller ones find the memory of the call before. So where the result is larger than that, all free
  memory is given back to the system before every run, ours and the floor's too (which takes glibc): nobody finds what
  others left behind. Elsewhere memory is warm for all, as it is in a loop.
- **/ ours, / floor**: the time over that of the first contestant, and over that of the floor.
- **Peak**: the most memory at any moment from weights and data to the result, preparation included; compare it with
  that of double backward from scratch. **Of a run**: the most that what is timed takes beyond what was prepared;
  compare it with that of double backward on a kept graph. Both are of the resident size, in a process for each case,
  from fresh memory and after a first run, so that code does not count. They come in pages of 4 kB, and vary by a few of
  these, or by a tenth, from run to run.
- **Error**: the relative distance, in the Frobenius norm, to the value of the first contestant. An estimate has none:
  Hutchinson's takes as many probes as a standard error of the given part of the trace needs, by the exact variance
  `2 (|H|_F^2 - sum_i h_ii^2)` of a product with random signs.
"""

LIMITS = """\
## What limits each

- **Jacobians at the papers' size** (8 tokens, d 16): a few calls of torch and a few lines of Python, at one to two
  microseconds each, are all there is. A thousand times as fast as plain autograd would leave six to ten microseconds
  for all of it.
- **Larger dense Jacobians of a LayerNorm and an FFN**: most of the time is writing the matrix, for us and for rivals
  alike. Fresh memory is handed out page by page, which takes several times as long as filling it, and all end at the
  same floor. By the input that matrix is nearly all zeros, between different tokens: *structured* does without them.
- **Attention and block Jacobians**: every map between a weight and the output is a few calls, for all outputs of the
  weight at once; `jacrev` needs as many for all outputs of the block.
- **16 tokens, by W_1 and W_2**: the strongest rival takes six times as long as writing the matrix once, we take less
  than twice: eight times as fast as that rival would be faster than writing it.
- **Attention Hessian**: *structured* takes an eighth of the time. The rest is to form the matrix from 16 tokens' maps,
  head by head, and to copy it into its place; writing it once takes a third of it, in fresh memory.
- **Dense block Hessian**: a third is the sum itself, sweeps with as many tangents as the weights have outputs, and a
  fifth is fresh memory for the matrix. The rest are matrix products over 16 tokens, so thin that they cost what
  writing their result costs, and two strided copies to put that into its place.
- **Hessian-vector products**: the floor is six matrix products a weight, run again on the same arrays. Passes over
  activations (softmax, norms, gates, sums) come on top, each a call of its own. A kept graph has the same products to
  do.
- **Memory of a product**: what is kept of the point is about what autograd keeps: the values, and the gradient at every
  map that has curvature. The point is computed in float64 and rounded as the sweep goes, which shows in the peak.
"""


def page(record: Mapping[str, Any]) -> str:
    """Markdown: where it was measured, the legend, and a table for each case."""
    return "\n".join(_lines(record))


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    yield "# Speed\n"
    quick = (
        " Sizes are small (`--quick`): these tables are for the values, not for the times, and memory is not measured."
        if record["quick"]
        else ""
    )
    yield f"Written by `hess bench --md`.{quick}\n"
    for name in ("processor", "cores", "threads", "system", "python", "torch"):
        yield f"- {name}: {record[name]}"
    yield f"- hess: {record['hess_version']}\n"
    cases = by_case(record["rows"])
    yield from _table(SUMMARY, (_summary(case, size, rows) for (case, size), rows in cases.items()))
    yield LEGEND
    yield LIMITS
    if record["tightness"]:
        yield "## How tight the bounds are\n"
        yield "Bound over exact norm, on the papers' block with seeded weights and data; see [bounds](bounds.md).\n"
        yield from _table(TIGHT, (_tight(row) for row in record["tightness"]))
    for (case, size), rows in cases.items():
        yield f"## {case}: {size}\n"
        yield from _table(COLUMNS, _cells(rows))


def by_case(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The contestants of each case, which goes by its name and size."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["size"]), []).append(row)
    return cases


def ratios(row: Row, rows: Sequence[Row]) -> tuple[float, float | None]:
    """The time over that of the first contestant, and over that of the floor if the case has one."""
    floor = next((row["seconds"] for row in rows if row["role"] == "floor"), None)
    return row["seconds"] / rows[0]["seconds"], floor and row["seconds"] / floor


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    yield from (f"| {' | '.join(cells)} |" for cells in lines)
    yield ""


def _summary(case: str, size: str, rows: Sequence[Row]) -> list[str]:
    """A case in a line: our first contestant, the fastest rival, and the floor."""
    ours = rows[0]["seconds"]
    rival = min(row["seconds"] for row in rows if row["role"] == "rival")
    return [case, size, duration(ours), duration(rival), digits(rival / ours), digits(ratios(rows[0], rows)[1])]


def _cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Of the contestants of one case."""
    for row in rows:
        yield [
            f"{row['contestant']} ({row['role']})",
            duration(row["seconds"]),
            *map(digits, ratios(row, rows)),
            *(digits(row[name] and row[name] / 1e6) for name in ("peak_bytes", "run_bytes")),
            "-" if row["error"] is None else f"{row['error']:.1e}" if row["error"] else "0",
        ]


def _tight(row: Mapping[str, Any]) -> list[str]:
    return [value if isinstance(value := row[name], str) else digits(value) for name in TIGHT]


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123456), duration(9.999e-4), duration(75.25)
    ('12.3 ms', '1000 µs', '75.2 s')
    """
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{digits(seconds * scale)} {unit}"


def digits(number: float | None) -> str:
    """Three of them.

    >>> digits(1234.5), digits(0.012345), digits(None)
    ('1230', '0.0123', '-')
    """
    return "-" if number is None else f"{float(f'{number:.3g}'):g}"
