"""Draws pictures of results. Only this file uses matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maecho import disk
from maecho.errors import InputError
from maecho.lab.experiment import Experiment
from maecho.lab.report.tables import Figure, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png", ".pdf")
OURS, THEIRS, MANY = "#c2410c", "#475569", "#94a3b8"
"""Colours of echo-chain and echo-relay, of the others, and of ensembles."""
LINE = 0.038
"""Height of a label as a share of the height of the picture."""
OURS_ABOVE: tuple[tuple[int, int], dict[str, Any]] = ((-3, 6), {"rotation": 60, "ha": "left", "va": "bottom"})
OURS_BELOW: tuple[tuple[int, int], dict[str, Any]] = ((4, -4), {"rotation": -22, "ha": "left", "va": "top"})
"""Where the labels of echo-chain stand, and those of its further rounds."""
ACCURACIES = (0, 50, 70, 80, 90, 95, 98, 99, 99.5)
"""Where the axis has ticks."""


def check(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is run for it."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"a picture must be one of {', '.join(SUFFIXES)}, got {path.name!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("a picture needs matplotlib, got none: pip install 'maecho[plots]'") from error


def against_bytes(experiment: Experiment, table: Table, path: Path) -> None:
    """Draw accuracy against what a client uploads, a panel for every cell. Lines join the rungs of our ladder."""
    check(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure as Picture

    shown = [
        (cell, {column: f for column, f in figures.items() if f.bytes})  # a client's own model is not uploaded at all
        for cell, figures in table
    ]
    shown = [(cell, figures) for cell, figures in shown if figures]
    if not shown:
        raise InputError(f"results of {experiment.name} must say how many bytes were uploaded, got none that does")
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "maecho", "font.size": 9}
    with mpl.rc_context(style):
        picture = Picture(figsize=(6.4 * len(shown), 5.2), layout="constrained")
        for axes, (cell, figures) in zip(picture.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            _draw(axes, experiment, figures)
            axes.set_title(", ".join(f"{key} {value}" for key, value in cell.items()))
        picture.suptitle(experiment.title)
        how: dict[str, Any] = {"format": path.suffix[1:], "dpi": 160}
        if path.suffix == ".svg":
            how["metadata"] = {"Date": None}
        disk.write_whole(path, lambda file: picture.savefig(file, **how))


def _draw(axes: Axes, experiment: Experiment, figures: Mapping[str, Figure]) -> None:
    """Errors on a logarithmic scale, labelled as accuracies: from 80 to 90 is as far as from 90 to 95."""
    kinds = {column: str(experiment.methods[column]["method"]) for column in figures}
    points = {column: ((f.bytes or 0) / 1e6, _error(f.mean)) for column, f in figures.items()}
    for column, f in figures.items():
        x, y = points[column]
        colour = OURS if kinds[column].startswith("echo") else MANY if kinds[column] == "ensemble" else THEIRS
        spread = [[max(0.0, y - _error(f.high))], [max(0.0, _error(f.low) - y)]]  # a mean of equals may be off by a bit
        axes.errorbar(x, y, spread, fmt="o", color=colour, ms=5, lw=1, capsize=2)
    for kind, where in (("echo-chain", OURS_ABOVE), ("echo-relay", OURS_BELOW)):
        rungs = [column for column in figures if kinds[column] == kind]
        # A relay of every layer (no `rounds`) uploads no weights, so it does not continue the line of the others.
        line = sorted(points[c] for c in rungs if kind == "echo-chain" or "rounds" in experiment.methods[c])
        axes.plot([x for x, _ in line], [y for _, y in line], color=OURS, lw=1.2, alpha=0.5, zorder=1)
        for c in rungs:
            axes.annotate(c, points[c], where[0], textcoords="offset points", color=OURS, fontsize=7.5, **where[1])
    others = {c: point for c, point in points.items() if not kinds[c].startswith("echo")}
    low, high = min(x for x, _ in points.values()), max(x for x, _ in points.values())
    top = min(min(_error(f.high) for f in figures.values()) / 2.2, 9.0)
    bottom = max(_error(f.low) for f in figures.values()) * 1.08
    axes.set(xscale="log", yscale="log", ylim=(bottom, top), xlim=(low / 1.25, high * (high / low) ** 0.2))
    axes.set(xlabel="a client uploads, MB", ylabel="accuracy, per cent")
    decades = [m * 10**k for k in range(-3, 4) for m in (1, 2, 5)]
    ticks = [t for t in decades if low / 1.25 <= t <= high * 1.25]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks([_error(a) for a in ACCURACIES], [f"{a:g}" for a in ACCURACIES])
    axes.minorticks_off()
    axes.set_ylim(bottom, top)
    axes.grid(alpha=0.25, lw=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    places = _apart(list(others.values()), (bottom / top) ** LINE)
    for (column, (x, y)), place in zip(others.items(), places, strict=True):
        axes.annotate(
            column,
            (x, y),
            (x * (high / low) ** 0.025, place),
            color=THEIRS,
            fontsize=7.5,
            va="center",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": MANY, "shrinkA": 0, "shrinkB": 3},
        )


def _error(accuracy: float) -> float:
    """The error in per cent. It is never 0, since 0 has no logarithm."""
    return max(100 - accuracy, 0.01)


def _apart(points: Sequence[tuple[float, float]], step: float) -> list[float]:
    """The heights of labels. They are chosen so that no label covers another one that begins near it.

    Labels are placed from below, each as near to its point as the labels before it allow. The axis is logarithmic, with
    small errors at the top. So the height of a label is not a number of per cent but a factor, `step`.
    """
    near = 1.9
    places: dict[int, float] = {}
    for i in sorted(range(len(points)), key=lambda k: -points[k][1]):
        x, y = points[i]
        beside = [places[k] for k in places if 1 / near < points[k][0] / x < near]
        places[i] = min([y, *(place / step for place in beside)])
    return [places[i] for i in range(len(points))]
