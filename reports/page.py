"""The records of one page, with the look-ups its sections share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reports.markdown import escape, table
from reports.rows import BaseRow, CellRow, DatasetFacts
from reports.statistics import Value, display_unit, format_spread, spread
from sdpo_core.metrics import METRICS
from sdpo_core.specs import ArmSpec, CellSpec, ExperimentSpec

# Beyond so many, arms stand in rows where that makes a table narrower.
_MOST_COLUMNS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """An arm as pages group it: `teacher` is None for an algorithm that has none."""

    name: str
    algorithm: str
    teacher: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Everything a section may use. Data sets, arms and seeds appear in the order of the cells."""

    experiment: ExperimentSpec
    cells: tuple[CellRow, ...]
    bases: tuple[BaseRow, ...]
    facts: tuple[DatasetFacts, ...]
    declared_arms: tuple[ArmSpec, ...]

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.dataset for cell in self.cells))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(cell.seed for cell in self.cells))

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(
            dict.fromkeys(Arm(name=cell.arm, algorithm=cell.algorithm, teacher=cell.teacher) for cell in self.cells)
        )

    @property
    def taught_arms(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.teacher is not None)

    def emitted(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those metrics that some arm of the page has."""
        traits = {trait for cell in self.cells for trait in cell.traits}
        return tuple(name for name in names if METRICS[name].trait in traits)

    def spec_of(self, arm: Arm) -> CellSpec:
        """A cell of the arm: all of them have its algorithm."""
        return next(cell.spec for cell in self.cells if cell.arm == arm.name)

    def declared(self, arm: Arm) -> ArmSpec | None:
        return next((spec for spec in self.declared_arms if spec.name == arm.name), None)

    def select(self, *, dataset: str, arm: str) -> tuple[CellRow, ...]:
        """Cells of one data set and arm, one a seed."""
        return tuple(cell for cell in self.cells if cell.dataset == dataset and cell.arm == arm)

    def cell(self, *, dataset: str, arm: str, seed: int) -> CellRow | None:
        """One cell; None when it was not planned."""
        return next((cell for cell in self.select(dataset=dataset, arm=arm) if cell.seed == seed), None)

    def values(self, name: str, *, dataset: str, arm: str) -> tuple[Value, ...]:
        """A metric of one data set and arm, one value a seed."""
        return tuple(cell.value(name) for cell in self.select(dataset=dataset, arm=arm))

    def base_of(self, dataset: str) -> BaseRow | None:
        """What the students start from."""
        return next((base for base in self.bases if base.dataset == dataset and not base.is_teacher), None)

    def teacher_bases_of(self, dataset: str) -> tuple[BaseRow, ...]:
        """Models of their own that teachers start from."""
        return tuple(base for base in self.bases if base.dataset == dataset and base.is_teacher)

    def facts_of(self, dataset: str) -> DatasetFacts | None:
        return next((facts for facts in self.facts if facts.name == dataset), None)


def metric_table(page: Page, *, dataset: str, arms: Sequence[Arm], names: Sequence[str]) -> str:
    """Rows are metrics, with unit and better direction as declared; columns are arms, mean +- sd over seeds."""
    return arm_table(
        ("Metric", "Unit", "Better", *(escape(arm.name) for arm in arms)),
        rows=[metric_line(page, name=name, dataset=dataset, arms=arms) for name in names],
        num_arms=len(arms),
    )


def arm_table(header: Sequence[str], *, rows: Sequence[Sequence[str]], num_arms: int) -> str:
    """A table whose last `num_arms` columns are arms, or, of many arms and fewer rows, turned on its side."""
    if num_arms > _MOST_COLUMNS and len(rows) + 1 < len(header):
        header, *rows = zip(header, *rows, strict=True)
    return table(header, rows=rows)


def metric_line(page: Page, *, name: str, dataset: str, arms: Sequence[Arm]) -> tuple[str, ...]:
    """One row of `metric_table`."""
    metric = METRICS[name]
    spreads = (spread(page.values(name, dataset=dataset, arm=arm.name)) for arm in arms)
    return (
        f"`{name}`",
        display_unit(metric.unit),
        metric.better,
        *(format_spread(described, unit=metric.unit) for described in spreads),
    )


def by_dataset(page: Page, *, arms: Sequence[Arm], names: Sequence[str]) -> str:
    """One `metric_table` a data set, each under its heading."""
    return "\n\n".join(
        f"### {escape(dataset)}\n\n{metric_table(page, dataset=dataset, arms=arms, names=names)}"
        for dataset in page.datasets
    )


def meanings(names: Sequence[str]) -> str:
    """One line that says what some metrics are, from their declaration."""
    return "; ".join(f"`{name}`: {METRICS[name].meaning}" for name in names) + "."
