"""The question and the prediction, as they were declared before the run."""

from collections import Counter

from reports.markdown import escape, quote
from reports.page import Page


def render(page: Page) -> str:
    """Title, question, prediction and how many cells are in which state."""
    experiment = page.experiment
    states = Counter(cell.state for cell in page.cells)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return (
        f"# {escape(experiment.name)}: results\n\n"
        f"**Question**\n\n{quote(experiment.question)}\n\n"
        f"**Prediction, written before the run**\n\n{quote(experiment.prediction)}\n\n"
        f"{len(page.cells)} cells (data set x arm x seed): {counts}. "
        "Files: [cells.csv](cells.csv), [results.json](results.json)."
    )
