"""Curves of what several values give: a panel for each part, a line for each weight, on logarithmic axes."""

from __future__ import annotations

from hesscore.bounds.report import BoundsReport
from hesscore.errors import UsageError
from hesscore.picture import check_format, style, written

NAMES = {"seq_len": "sequence length", "input_norm": "norm of the longest token", "heads": "heads", "width": "width"}

MARKERS = "osv^D*PX<"

STYLES = {"apriori": "-", "exact": "--"}
"""The tiers that are drawn."""


def check(path: str, swept: str | None) -> None:
    """``UsageError`` unless there is a curve to draw, in a known format."""
    check_format("--plot", path)
    if swept is None:
        raise UsageError("--plot needs several values of --seq-len, --input-norm, --heads or --width")


def draw(report: BoundsReport, path: str) -> bytes:
    """In the format of ``path``."""
    from matplotlib.figure import Figure

    assert report.swept is not None
    own = [row for row in report.rows if row.row == row.column]
    names = list(dict.fromkeys(row.row for row in own))
    growth = report.growth
    values = list(dict.fromkeys(getattr(row, report.swept) for row in own))
    with style():
        figure = Figure((9, 4), layout="constrained")
        figure.suptitle(f"{report.source}: bounds on the spectral norm of the Hessian", fontsize=10)
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, part in zip(panels, ("outer", "functional"), strict=True):
            for i, name in enumerate(names):
                for tier, dashes in STYLES.items():
                    points = [
                        (getattr(row, report.swept), value)
                        for row in own
                        if (row.row, row.part) == (name, part) and (value := getattr(row, tier))
                    ]
                    if points:
                        fit = growth.get((name, name, part), {}).get(tier)
                        label = f"{name.removesuffix('.weight')} {tier}" + (f", {fit}" if fit else "")
                        marker = MARKERS[i % len(MARKERS)]
                        thick = 3 - 2 * i / len(names)  # what lies below another curve is seen beside it
                        panel.plot(
                            *zip(*points, strict=True), dashes, marker=marker, lw=thick, color=f"C{i}", label=label
                        )
            panel.set(xscale="log", yscale="log", xlabel=NAMES[report.swept], title=part)
            panel.set_xticks(values, [f"{value:g}" for value in values])
            panel.set_xticks([], minor=True)
            panel.grid(which="major", color="0.9")
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        panels[0].set_ylabel("spectral norm")
        return written(figure, path)
