"""The headline table: test accuracy, seed by seed, teacher by teacher.

One block of rows for each data set and arm with a teacher. Arms without a teacher stand in every block, a column
each; arms with one share a column by algorithm. Arms without any teacher beside them make one block a data set. Where
that would need many columns, every arm has a block of its own instead.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reports.markdown import bullets, escape, table
from reports.page import Arm, Page
from reports.rows import CellRow
from reports.statistics import PLUS_MINUS, Value, format_holes, format_spread, format_value, spread

_ACCURACY = "test/accuracy"
_FRACTION = "fraction"
_MOST_COLUMNS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    """`arm`: the arm of a column of its own; None: the block's arm, if its algorithm is `algorithm` (None: any)."""

    title: str
    algorithm: str | None
    arm: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """`blocks`: the arms that have one; `names_arms`: an arm's name opens its rows."""

    columns: tuple[_Column, ...]
    blocks: tuple[Arm | None, ...]
    names_arms: bool


def render(page: Page) -> str:
    """Table, then the cells that are not done and why."""
    layout = _layout(page)
    header = (
        "Dataset",
        "Split",
        "Student",
        *(("Arm",) if layout.names_arms else ()),
        "Teacher",
        "Seed(s)",
        *(column.title for column in layout.columns),
        "Effective feedback",
        "Top-K coverage",
        "Throughput / memory",
        "Status",
    )
    rows = [
        row
        for dataset in page.datasets
        for arm in layout.blocks
        for row in _block(page, dataset=dataset, arm=arm, layout=layout)
    ]
    text = f"## Test accuracy at the last step\n\n{table(header, rows=rows)}"
    open_cells = [_explain(cell) for cell in page.cells if cell.state != "done"]
    if open_cells:
        text += f"\n\nCells that are not done enter no number on this page:\n\n{bullets(open_cells)}"
    return text


def _layout(page: Page) -> _Layout:
    columns = _columns(page)
    if len(columns) > _MOST_COLUMNS:
        one = _Column(title="Accuracy", algorithm=None, arm=None)
        return _Layout(columns=(one,), blocks=page.arms, names_arms=True)
    return _Layout(columns=columns, blocks=page.taught_arms or (None,), names_arms=False)


def _columns(page: Page) -> tuple[_Column, ...]:
    alone = [arm for arm in page.arms if arm.teacher is None]
    shared = Counter(arm.algorithm for arm in alone)
    columns = [
        _Column(title=_title(arm, is_shared=shared[arm.algorithm] > 1), algorithm=arm.algorithm, arm=arm.name)
        for arm in alone
    ]
    for name in dict.fromkeys(arm.algorithm for arm in page.taught_arms):
        title = f"{escape(name.upper())} with a teacher" if name in shared else escape(name.upper())
        columns.append(_Column(title=title, algorithm=name, arm=None))
    return tuple(columns)


def _title(arm: Arm, *, is_shared: bool) -> str:
    name = escape(arm.algorithm.upper())
    return f"{name} ({escape(arm.name)})" if is_shared else name


def _block(page: Page, *, dataset: str, arm: Arm | None, layout: _Layout) -> list[tuple[str, ...]]:
    names = [_arm_of(column, arm=arm) for column in layout.columns]
    by_seed = [
        [None if name is None else page.cell(dataset=dataset, arm=name, seed=seed) for name in names]
        for seed in page.seeds
    ]
    lead = arm.name if arm is not None else next(name for name in names if name is not None)
    leads = [page.cell(dataset=dataset, arm=lead, seed=seed) for seed in page.seeds]
    planned = [
        (seed, cells, first)
        for seed, cells, first in zip(page.seeds, by_seed, leads, strict=True)
        if any(cell is not None for cell in cells)
    ]
    opening = _opening(page, dataset=dataset, arm=arm, names_arms=layout.names_arms)
    rows = [
        (*opening, str(seed), *(_accuracy(cell) for cell in cells), *_measures(first), _status(cells))
        for seed, cells, first in planned
    ]
    if planned:
        rows.append((*opening, *_summary([cells for _, cells, _ in planned], leads=[first for *_, first in planned])))
    return rows


def _arm_of(column: _Column, *, arm: Arm | None) -> str | None:
    if column.arm is not None:
        return column.arm
    return arm.name if arm is not None and column.algorithm in (None, arm.algorithm) else None


def _opening(page: Page, *, dataset: str, arm: Arm | None, names_arms: bool) -> tuple[str, ...]:
    cell = next(cell for cell in page.cells if cell.dataset == dataset)
    facts = page.facts_of(dataset)
    rows, limit = (facts.splits.get("test") if facts else None), cell.spec.evaluation.test_problems
    sizes = [size for size in (rows, limit) if size is not None]
    split = f"test ({min(sizes)} problems)" if rows is not None else "test"
    profile, base = cell.spec.profile, cell.spec.base.name
    student = base if profile in base else f"{profile}, {base}"
    if names_arms and arm is not None:
        return escape(dataset), split, escape(student), escape(arm.name), escape(arm.teacher or "n/a")
    return escape(dataset), split, escape(student), _teacher(page, arm=arm)


def _teacher(page: Page, *, arm: Arm | None) -> str:
    if arm is None or arm.teacher is None:
        return "n/a"
    alike = [other for other in page.taught_arms if (other.algorithm, other.teacher) == (arm.algorithm, arm.teacher)]
    return escape(arm.teacher) if len(alike) == 1 else f"{escape(arm.teacher)} ({escape(arm.name)})"


def _value(cell: CellRow | None, *, name: str) -> Value:
    return "n/a" if cell is None else cell.value(name)


def _accuracy(cell: CellRow | None) -> str:
    return format_value(_value(cell, name=_ACCURACY), unit=_FRACTION)


def _measures(cell: CellRow | None) -> tuple[str, str, str]:
    """Effective feedback, coverage, throughput and memory of one cell."""
    rate = format_value(_value(cell, name="cost/tokens_per_second"), unit="tokens/s")
    return (
        format_value(_value(cell, name="feedback/effective_fraction"), unit=_FRACTION),
        format_value(_value(cell, name="distill/teacher_coverage"), unit="probability"),
        _throughput(rate, cells=[cell]),
    )


def _throughput(rate: str, *, cells: Sequence[CellRow | None]) -> str:
    """`rate / student + teacher memory`, or the one word that fills both."""
    peaks = [
        spread([_value(cell, name=f"cost/peak_memory_bytes/{worker}") for cell in cells])
        for worker in ("student", "teacher")
    ]
    written = [format_spread(peak, unit="bytes").split(" ")[0] for peak in peaks if peak.mean is not None]
    if not written:
        return format_holes(peaks[0].holes)
    kinds = dict.fromkeys(str(cell.environment["memory"]) for cell in cells if cell is not None and cell.environment)
    return f"{rate} tokens/s / {' + '.join(written)} MiB {escape(', '.join(kinds))}"


def _status(cells: Sequence[CellRow | None]) -> str:
    present = [cell for cell in cells if cell is not None]
    states = dict.fromkeys(cell.state for cell in present)
    if len(states) == 1:
        return next(iter(states))
    return ", ".join(f"{escape(cell.arm)} {cell.state}" for cell in present)


def _summary(rows: Sequence[Sequence[CellRow | None]], *, leads: Sequence[CellRow | None]) -> tuple[str, ...]:
    def described(cells: Sequence[CellRow | None], name: str, unit: str) -> str:
        return format_spread(spread([_value(cell, name=name) for cell in cells]), unit=unit)

    cells = [cell for row in rows for cell in row if cell is not None]
    rate = spread([_value(cell, name="cost/tokens_per_second") for cell in leads])
    return (
        f"**mean {PLUS_MINUS} sd**",
        *(f"**{described(column, _ACCURACY, _FRACTION)}**" for column in zip(*rows, strict=True)),
        described(leads, "feedback/effective_fraction", _FRACTION),
        described(leads, "distill/teacher_coverage", "probability"),
        _throughput(format_spread(rate, unit="tokens/s", with_n=False), cells=leads),
        f"{sum(cell.state == 'done' for cell in cells)} of {len(cells)} cells done",
    )


def _explain(cell: CellRow) -> str:
    note = f" ({escape(cell.note)})" if cell.note else ""
    return f"{escape(cell.spec.label)}: {cell.state}{note}"
