"""Test accuracy on parts of the test split: by task, by domain, and where no question stands in train."""

from collections.abc import Iterator

from reports.markdown import escape
from reports.page import Arm, Page, arm_table
from reports.rows import PartRow
from reports.statistics import Value, format_spread, spread


def render(page: Page) -> str:
    """One table a data set that has parts; empty where none has."""
    tables = [table for dataset in page.datasets if (table := _table(page, dataset=dataset))]
    if not tables:
        return ""
    note = (
        "Accuracy on the test split, last step, mean \u00b1 sample sd over seeds. `stem disjoint` is `true` for rows "
        "whose question does not stand in train as the source gives it: the part that cannot have been seen."
    )
    joined = "\n\n".join(tables)
    return f"## Parts of the test split\n\n{note}\n\n{joined}"


def _table(page: Page, *, dataset: str) -> str:
    cells = [cell for cell in page.cells if cell.dataset == dataset]
    found = dict.fromkeys((part.kind, part.value, part.problems) for cell in cells for part in cell.parts)
    if not found:
        return ""
    rows = [
        (
            escape(kind),
            escape(value),
            str(problems),
            *(
                format_spread(
                    spread(list(_accuracies(page, dataset=dataset, arm=arm, kind=kind, value=value))), unit="fraction"
                )
                for arm in page.arms
            ),
        )
        for kind, value, problems in found
    ]
    header = ("By", "Part", "Problems", *(escape(arm.name) for arm in page.arms))
    return f"### {escape(dataset)}\n\n{arm_table(header, rows=rows, num_arms=len(page.arms))}"


def _accuracies(page: Page, *, dataset: str, arm: Arm, kind: str, value: str) -> Iterator[Value]:
    """One value a seed: the accuracy, or why there is none."""
    for cell in page.select(dataset=dataset, arm=arm.name):
        if cell.state != "done":
            yield cell.state
        else:
            yield _accuracy(cell.parts, kind=kind, value=value)


def _accuracy(parts: tuple[PartRow, ...], *, kind: str, value: str) -> Value:
    return next((float(part.accuracy) for part in parts if (part.kind, part.value) == (kind, value)), "missing")
