"""Learning curves as pictures: one figure a metric, one panel a data set, one line an arm."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from reports.page import Arm, Page
from reports.rows import CellRow
from reports.statistics import mean
from sdpo_core.metrics import METRICS

_Dash = Literal[":"] | tuple[float, tuple[float, ...]]

# Okabe and Ito's palette without its yellow: told apart with every common colour vision, and on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# More markers than colours: the pair repeats only after 42 arms.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GREY = "#555555"
_GUESS_DASH: _Dash = ":"
_DEMONSTRATION_DASH: _Dash = (0, (7, 2, 1, 2, 1, 2))
_PANELS_A_ROW = 3
# Inches that an entry of the legend takes; a picture with many is made wide enough for four beside each other.
_HANDLE_WIDTH = 2.3
_LEGEND_WIDTH = 4 * _HANDLE_WIDTH
_FEW_HANDLES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Style:
    """How an arm's mean is drawn: the same in every figure of a page."""

    index: int
    colour: str
    marker: str
    width: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FigurePlan:
    """A picture of one metric through training. `is_share`: the axis runs from 0 to 1."""

    file_name: str
    metric: str
    label: str
    caption: str
    is_share: bool


FIGURES = (
    FigurePlan(
        file_name="dev-accuracy.png",
        metric="eval/accuracy",
        label="dev accuracy (fraction)",
        caption="Dev accuracy by step; step 0 is the base model.",
        is_share=True,
    ),
    FigurePlan(
        file_name="train-reward.png",
        metric="train/reward",
        label="train reward (mean score)",
        caption="Mean score of the training rollouts by step; no result, the model trains on these problems.",
        is_share=True,
    ),
    FigurePlan(
        file_name="divergence.png",
        metric="distill/divergence",
        label="divergence to the teacher (nats)",
        caption="The trained divergence between student and teacher by step, arms that train one.",
        is_share=False,
    ),
)


def planned_figures(page: Page) -> tuple[FigurePlan, ...]:
    """The figures for which a finished cell has a point."""
    return tuple(figure for figure in FIGURES if any(_has_points(cell, figure.metric) for cell in page.cells))


def draw(page: Page, *, figure: FigurePlan) -> bytes:
    """Draw a figure as PNG bytes that depend on the records alone."""
    columns = min(len(page.datasets), _PANELS_A_ROW)
    rows = math.ceil(len(page.datasets) / columns)
    handles = _legend_handles(page, figure=figure)
    width = max(5.2, 4.6 * columns, _LEGEND_WIDTH if len(handles) > _FEW_HANDLES else 0.0)
    ncols = min(len(handles), 4, int(width / _HANDLE_WIDTH))
    height = 3.4 * rows + 0.25 * math.ceil(len(handles) / ncols)
    canvas = Canvas(figsize=(width, height), dpi=120, layout="constrained")
    panels = list(canvas.subplots(rows, columns, squeeze=False).flat)
    for panel, dataset in zip(panels, page.datasets, strict=False):
        _draw_panel(panel, page=page, dataset=dataset, figure=figure)
    for unused in panels[len(page.datasets) :]:
        unused.set_axis_off()
    canvas.legend(handles=handles, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
    file = io.BytesIO()
    canvas.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _draw_panel(panel: Axes, *, page: Page, dataset: str, figure: FigurePlan) -> None:
    drawn = 0
    for arm in page.arms:
        cells = [cell for cell in page.select(dataset=dataset, arm=arm.name) if _has_points(cell, figure.metric)]
        for cell in cells:
            steps, values = _points(cell.series(figure.metric))
            panel.plot(steps, values, color=_style(page, arm=arm).colour, linewidth=0.7, alpha=0.3, zorder=1.5)
        if cells:
            _draw_mean(panel, series=mean_series(cells, metric=figure.metric), style=_style(page, arm=arm))
        drawn += len(cells)
    if figure.metric == "eval/accuracy":
        _draw_references(panel, page=page, dataset=dataset)
    if drawn == 0:
        panel.text(0.5, 0.5, "no finished cell", ha="center", va="center", transform=panel.transAxes, color=_GREY)
    _dress(panel, title=dataset, figure=figure)


def _draw_mean(panel: Axes, *, series: Sequence[tuple[int, float | None]], style: _Style) -> None:
    """The thick line, with about eight markers at most, staggered between arms so that none hides another's."""
    steps, values = _points(series)
    every = max(1, len(steps) // 8)
    panel.plot(
        steps,
        values,
        color=style.colour,
        linewidth=style.width,
        marker=style.marker,
        markersize=5,
        markevery=(style.index % every, every),
    )


def _draw_references(panel: Axes, *, page: Page, dataset: str) -> None:
    facts, base = page.facts_of(dataset), page.base_of(dataset)
    guesses = [splits["dev"] for splits in facts.baselines.values() if "dev" in splits] if facts else []
    if guesses:
        panel.axhline(max(guesses), color=_GREY, linestyle=_GUESS_DASH, linewidth=1.4)
    if base:
        panel.axhline(base.demonstration_accuracy, color=_GREY, linestyle=_DEMONSTRATION_DASH, linewidth=1.0)


def _dress(panel: Axes, *, title: str, figure: FigurePlan) -> None:
    panel.set_title(_plain(title), fontsize=11)
    panel.set_xlabel("training step")
    panel.set_ylabel(figure.label)
    panel.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    if figure.is_share:
        panel.set_ylim(-0.02, 1.02)
    else:
        panel.set_ylim(bottom=0.0)


def _legend_handles(page: Page, *, figure: FigurePlan) -> list[Line2D]:
    handles = []
    for arm in page.arms:
        if METRICS[figure.metric].trait not in page.spec_of(arm).traits:
            continue
        style, label = _style(page, arm=arm), _plain(arm.name)
        line = Line2D([], [], color=style.colour, marker=style.marker, markersize=5, linewidth=style.width, label=label)
        handles.append(line)
    handles.append(Line2D([], [], color=_GREY, linewidth=0.8, alpha=0.6, label="one seed (thin)"))
    if figure.metric == "eval/accuracy":
        handles.append(Line2D([], [], color=_GREY, linestyle=_GUESS_DASH, linewidth=1.4, label="best guess"))
        label = "base with a demonstration"
        handles.append(Line2D([], [], color=_GREY, linestyle=_DEMONSTRATION_DASH, linewidth=1.0, label=label))
    return handles


def mean_series(cells: Sequence[CellRow], *, metric: str) -> tuple[tuple[int, float | None], ...]:
    """Mean over cells at each step; None, a gap, where one of them has no value, lest the line change its seeds."""
    by_step: dict[int, list[float | None]] = {}
    for cell in cells:
        for step, value in cell.series(metric):
            by_step.setdefault(step, []).append(value)
    series = []
    for step, values in sorted(by_step.items()):
        present = [value for value in values if value is not None]
        series.append((step, mean(present) if len(present) == len(cells) else None))
    return tuple(series)


def _points(series: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Coordinates for a plot; NaN is how it is told to leave a gap."""
    return [step for step, _ in series], [math.nan if value is None else value for _, value in series]


def _has_points(cell: CellRow, metric: str) -> bool:
    return cell.state == "done" and any(value is not None for _, value in cell.series(metric))


def _style(page: Page, *, arm: Arm) -> _Style:
    index = page.arms.index(arm)
    return _Style(
        index=index,
        colour=_COLOURS[index % len(_COLOURS)],
        marker=_MARKERS[index % len(_MARKERS)],
        # Later arms are thinner, so that a line under another one still shows at its edges.
        width=max(1.4, 2.6 - 0.4 * index),
    )


def _plain(text: str) -> str:
    """A dollar sign would start a formula."""
    return text.replace("$", r"\$")
