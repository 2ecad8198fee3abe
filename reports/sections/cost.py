"""What a cell costs: speed, seconds by phase, memory, the teacher's share."""

from collections import Counter

from reports.markdown import escape
from reports.page import Page, arm_table, metric_line
from reports.statistics import format_spread, spread
from sdpo_core.metrics import METRICS


def render(page: Page) -> str:
    """One table a data set; every declared cost, and the wall seconds of the whole cell."""
    parts = [
        "## Cost",
        "Rates and seconds are means over training steps, counts and `cost/teacher_seconds` are sums over the run, "
        "memory is the highest peak; then mean \u00b1 sample sd over seeds. Cells that shared a machine slowed each "
        f"other down, and the wall clock of an interrupted cell runs through the interruption. {_memory(page)}",
        *(_dataset(page, dataset=dataset) for dataset in page.datasets),
    ]
    return "\n\n".join(parts)


def _dataset(page: Page, *, dataset: str) -> str:
    names = page.emitted(name for name in METRICS if name.startswith("cost/"))
    wall = (
        format_spread(spread([cell.seconds for cell in page.select(dataset=dataset, arm=arm.name)]), unit="s")
        for arm in page.arms
    )
    rows = [metric_line(page, name=name, dataset=dataset, arms=page.arms) for name in names]
    rows.append(("whole cell, wall clock", "s", "lower", *wall))
    header = ("Metric", "Unit", "Better", *(escape(arm.name) for arm in page.arms))
    return f"### {escape(dataset)}\n\n{arm_table(header, rows=rows, num_arms=len(page.arms))}"


def _memory(page: Page) -> str:
    kinds = Counter(str(cell.environment.get("memory", "unknown")) for cell in page.cells if cell.state == "done")
    if not kinds:
        return "No cell is finished, so no memory was measured."
    return f"Peak memory is {', '.join(f'{escape(kind)} memory ({count} cells)' for kind, count in kinds.items())}."
