"""Pictures of tables: light, with a palette and marks that colour-blind readers can tell apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Okabe and Ito (2008), the strongest first, without the yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKS = "os^Dv*PX<>p"


@dataclass
class Picture:
    """Lines over a number, or, where the `x` are words, marks over them; the median of every `y`, and its spread."""

    x: str
    y: str  # with its unit
    lines: dict[str, list[tuple[float | str, list[float]]]] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False

    def add(self, line: str, x: float | str, y: Sequence[float]) -> None:
        if y:
            self.lines.setdefault(line, []).append((x, list(y)))


def draw(picture: Picture, title: str, path: Path, *beside: Picture) -> bool:
    """Writes an SVG with the picture, and those `beside` it to its right; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = (picture, *beside)
    style = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": title, "axes.spines.top": False}
    with pyplot.rc_context({**style, "axes.spines.right": False, "axes.edgecolor": "#999999"}):
        size = (7 + 2 * len(beside), 3.6)
        figure, row = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
        for axes, panel in zip(row[0], panels, strict=True):
            words = any(isinstance(x, str) for points in panel.lines.values() for x, _ in points)
            (_marks if words else _lines)(axes, panel)
            axes.grid(axis="x" if words else "y", color="#E5E5E5", linewidth=0.6)
            axes.set_axisbelow(True)
        for axes in row[0][1:]:  # the words stand beside the first
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
        row[0][0].set_title(title, loc="left", fontsize=10)
        if len(picture.lines) > 1:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return True


def _lines(axes: Any, picture: Picture) -> None:
    for number, (name, points) in enumerate(picture.lines.items()):
        points = sorted(points, key=lambda point: point[0])
        x = [at for at, _ in points]
        middle, whiskers = _middle_and_whiskers([y for _, y in points])
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        axes.errorbar(x, middle, whiskers, label=name, color=colour, marker=mark, ms=5, lw=1.5, elinewidth=0.8)
    _scale(axes.set_xscale, picture.log_x)
    _scale(axes.set_yscale, picture.log_y)
    if picture.log_x:  # the values that were measured, not powers of ten
        ticks = sorted({x for points in picture.lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" if isinstance(tick, float) else f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
    if not picture.log_y:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=picture.x, ylabel=picture.y)


def _marks(axes: Any, picture: Picture) -> None:
    """Words below each other, so that long ones can be read."""
    words = list(dict.fromkeys(str(x) for points in picture.lines.values() for x, _ in points))
    for number, (name, points) in enumerate(picture.lines.items()):
        middle, whiskers = _middle_and_whiskers([y for _, y in points])
        shift = 0.2 * (number - (len(picture.lines) - 1) / 2)
        at = [words.index(str(x)) + shift for x, _ in points]
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        axes.errorbar(middle, at, xerr=whiskers, label=name, color=colour, marker=mark, ms=6, lw=0, elinewidth=1.2)
    axes.set_yticks(range(len(words)), words)
    axes.invert_yaxis()
    _scale(axes.set_xscale, picture.log_y)
    axes.set(xlabel=picture.y, ylabel=picture.x)


def _scale(set_scale: Any, logarithmic: bool) -> None:
    if logarithmic:
        set_scale("log")


def _middle_and_whiskers(values: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    middle = [statistics.median(y) for y in values]
    below = [m - min(y) for m, y in zip(middle, values, strict=True)]
    above = [max(y) - m for m, y in zip(middle, values, strict=True)]
    return middle, [below, above]
