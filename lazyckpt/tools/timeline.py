"""Draws one checkpoint of a timeline beside the training, as in DataStates-LLM, figure 15."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lazyckpt.errors import ConfigError
from lazyckpt.observe.trace_file import COMMITS, COPIES, RING, TRAINING, WRITES
from lazyckpt.tools.trace import Span, TracedCheckpoint
from lazyckpt.tools.units import duration, size

# The palette of Okabe and Ito, which colour-blind people can tell apart. Vermilion marks phases that training waits
# for.
_TENSORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_BLOCKED = "#D55E00"
_OTHER, _TRAINING, _STEP, _CREATE = "#C9CDD2", "#E8EBEF", "#A3ABB5", "#B9C0C8"
_FSYNC, _COMMIT, _INK, _RING = "#7A8490", "#3B4450", "#2B3138", "#B4C4DA"
_STEP_END: dict[str, Any] = {"color": _STEP, "lw": 0.8, "ls": (0, (2, 3))}
_MARGIN = 0.04  # before and after, as a part of the time shown
_FURTHER = 1.6  # show the next optimizer step if it ends within this multiple of the checkpoint's time
_SHORTEST = 0.0015  # draw no span shorter than this part of the time shown
_PALE = 0.15  # alpha where copies wait for the ring
_DPI = 200
_LONGEST_NAME = 42  # characters; two columns of such names fit into the legend


def draw(checkpoint: TracedCheckpoint, output: Path) -> None:
    """Writes a picture in the format that the name asks for.

    Raises ConfigError without matplotlib, or if it does not know that format, and OSError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib; to get it, use pip install 'lazyckpt[trace]'") from error
    picture = _Picture(checkpoint, Figure(figsize=(11, 7.2), layout="constrained", dpi=_DPI))
    try:
        picture.figure.savefig(output, format=output.suffix[1:])  # without a format it would add a suffix
    except ValueError as error:
        raise ConfigError(f"{output}: {error}; give a name such as timeline.png") from error


class _Picture:
    def __init__(self, checkpoint: TracedCheckpoint, figure: Any) -> None:
        self.figure = figure
        self._checkpoint = checkpoint
        end = checkpoint.end_s
        if (following := self._next_step()) is not None and following.end_s < _FURTHER * end:
            end = max(end, following.end_s)
        self._scale, unit = (1.0, "s") if end >= 2 else (1e3, "ms")
        self._begin, self._end = -_MARGIN * end, (1 + _MARGIN) * end
        training = self._seen(checkpoint.others)
        rows = {
            "training": [[*training, *self._seen(checkpoint.own)]],
            "copies": _lanes(checkpoint.spans(COPIES)),
            "writes": _lanes(checkpoint.spans(WRITES)),
            "create, commit": _lanes(checkpoint.spans(COMMITS)),
        }
        heights = [max(1.0, min(0.5 * len(lanes), 3.2)) for lanes in rows.values()]
        ratios = (sum(heights) + 1.5, 1.9, 1.9)
        chart, ring, memory = figure.subplots(3, 1, sharex=True, height_ratios=ratios)
        # The largest tensors get a colour, in the order of their copies.
        names = dict.fromkeys(s.args["tensor"] for s in checkpoint.spans(COPIES) if "tensor" in s.args)
        self._colours = dict(zip(names, _TENSORS, strict=False))
        top = 0.0
        for (name, lanes), height in zip(rows.items(), heights, strict=True):
            self._row(chart, name, lanes, top, height)
            top += height + 0.5
        self._ring(ring)
        self._memory(memory)
        step_ends = [s.end_s for s in training if s.name == "optimizer.step" and s.end_s < self._end]
        for axes in (chart, ring, memory):
            for step in step_ends:
                axes.axvline(step * self._scale, **_STEP_END, zorder=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.spines["bottom"].set_color(_STEP)
            axes.tick_params(colors=_INK, length=0)
        chart.set_xlim(self._begin * self._scale, self._end * self._scale)
        chart.set_ylim(top, -0.5)
        chart.set_yticks([])
        for axes in (chart, ring):
            axes.tick_params(labelbottom=False)
        figure.align_ylabels((ring, memory))
        memory.set_xlabel(f"{unit} since save() was called", color=_INK)
        self._title(chart)
        self._legend()

    def _seen(self, spans: list[Span]) -> list[Span]:
        return [s for s in spans if s.kind == TRAINING and s.end_s > self._begin and s.begin_s < self._end]

    def _next_step(self) -> Span | None:
        """The first optimizer step after save(), which must not wait for the copies."""
        steps = (s for s in self._checkpoint.others if s.name == "optimizer.step" and s.begin_s > 0)
        return min(steps, key=lambda s: s.begin_s, default=None)

    def _row(self, axes: Any, name: str, lanes: list[list[Span]], top: float, height: float) -> None:
        middle = top + height / 2
        axes.text(-0.012, middle, name, transform=axes.get_yaxis_transform(), ha="right", va="center", color=_INK)
        lane_height = height / max(len(lanes), 1)
        for number, spans in enumerate(lanes):
            for span in spans:
                self._span(axes, span, top + lane_height * (number + 0.5), lane_height)

    def _span(self, axes: Any, span: Span, middle: float, lane_height: float) -> None:
        colour, share, order = self._look(span)
        begin = max(span.begin_s, self._begin)
        width = max(min(span.end_s, self._end) - begin, _SHORTEST * (self._end - self._begin))
        x, length, y = begin * self._scale, width * self._scale, middle - lane_height * share / 2
        edge = "white" if span.kind in (COPIES, WRITES) else colour
        axes.broken_barh([(x, length)], (y, lane_height * share), fc=colour, ec=edge, lw=0.3, zorder=order)
        about: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": _BLOCKED}
        text = f"{span.name} {duration(span.duration_s)}"
        if span.name == "save()":
            axes.annotate(text, (x, y), xytext=(0, 3), ha="left", va="bottom", **about)
        elif span.name == "gate":  # below, since it may be close to save()
            below = x + length / 2, y + lane_height * share
            axes.annotate(text, below, xytext=(0, -3), ha="center", va="top", **about)

    def _look(self, span: Span) -> tuple[str, float, int]:
        """Colour, share of the lane's height, and drawing order."""
        if span.kind in (COPIES, WRITES):
            return self._colours.get(span.args.get("tensor", ""), _OTHER), 0.9, 2
        if span.kind == COMMITS:
            return {"create": _CREATE, "fsync": _FSYNC}.get(span.name, _COMMIT), 0.7, 2
        if span.name in ("save()", "gate"):
            return _BLOCKED, 0.9, 4
        if span.name == "optimizer.step":
            return _STEP, 0.7, 3
        return _TRAINING, 0.7 if span.name == "iteration" else 0.0, 2

    def _counter(
        self, axes: Any, label: str, known: list[tuple[float, int]], first: int
    ) -> tuple[list[float], list[float]]:
        """Prepares the axes of a counter, and returns its times in the unit of the axis and its values in MiB.
        ``first`` is its value before any sample."""
        before = [nbytes for at, nbytes in known if at < self._begin]
        inside = [(at, nbytes) for at, nbytes in known if self._begin <= at <= self._end]
        series = [(self._begin, before[-1] if before else first), *inside]
        series.append((self._end, series[-1][1]))
        mib = [nbytes / (1 << 20) for _, nbytes in series]
        axes.set_ylim(0, max(mib) * 1.15 or 1)
        axes.set_ylabel(label, color=_INK)
        axes.grid(axis="y", color="#EEF0F2")
        axes.set_axisbelow(True)
        return [at * self._scale for at, _ in series], mib

    def _ring(self, axes: Any) -> None:
        times, mib = self._counter(axes, "in the ring\n(MiB)", self._checkpoint.ring, 0)
        axes.fill_between(times, mib, step="post", color=_RING, lw=0)
        for wait in self._checkpoint.spans(RING):
            axes.axvspan(wait.begin_s * self._scale, wait.end_s * self._scale, color=_BLOCKED, alpha=_PALE, lw=0)

    def _memory(self, axes: Any) -> None:
        """Draws the memory of the process, sampled at optimizer steps and at both ends of a checkpoint."""
        known = self._checkpoint.memory
        times, mib = self._counter(axes, "memory of\nthe process\n(MiB)", known, known[0][1] if known else 0)
        axes.plot(times, mib, drawstyle="steps-post", color=_COMMIT, lw=1.2)

    def _title(self, axes: Any) -> None:
        c, m = self._checkpoint, self._checkpoint.metrics
        blocked = sum(s.duration_s for s in c.own if s.name in ("save()", "gate"))
        what = "failed" if c.error is not None else f"durable after {duration(m['durable_s'])}"
        iteration = "" if c.iteration_s is None else f"; an iteration takes {duration(c.iteration_s)}"
        title = f"{_text(Path(c.path).name)}: {size(m['bytes'])}, {what}, "
        title += f"training blocked for {duration(blocked)}{iteration}"
        axes.set_title(title, loc="left", fontsize=12, color=_INK, pad=10)

    def _legend(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        spans = self._checkpoint.spans(COPIES)
        meanings = {_text(name): colour for name, colour in self._colours.items()}
        if any("tensor" not in s.args for s in spans):
            meanings["other chunks"] = _OTHER
        meanings |= {
            "forward, backward": _TRAINING,
            "optimizer step": _STEP,
            "training waits": _BLOCKED,
            "create the files": _CREATE,
            "fsync": _FSYNC,
            "commit": _COMMIT,
        }
        patches = [Patch(color=colour, label=name) for name, colour in meanings.items()]
        if self._checkpoint.spans(RING):
            patches.append(Patch(color=_BLOCKED, alpha=_PALE, lw=0, label="copies wait for the ring"))
        self.figure.legend(
            handles=[*patches, Line2D([], [], label="end of an iteration", **_STEP_END)],
            loc="outside lower center",
            ncols=4,
            frameon=False,
            fontsize=9,
            labelcolor=_INK,
            handlelength=1.2,
        )


def _lanes(spans: list[Span]) -> list[list[Span]]:
    return [[s for s in spans if s.lane == lane] for lane in sorted({s.lane for s in spans})]


def _text(name: str) -> str:
    """Escapes what the font lacks and dollars, which mark formulas in matplotlib; cuts a long name in its middle."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties())).get_charmap()
    shown = "".join(c if c.isprintable() and ord(c) in glyphs else c.encode("unicode_escape").decode() for c in name)
    if len(shown) > _LONGEST_NAME:
        shown = f"{shown[: _LONGEST_NAME // 3]}…{shown[-_LONGEST_NAME * 2 // 3 :]}"
    return shown.replace("$", r"\$")
