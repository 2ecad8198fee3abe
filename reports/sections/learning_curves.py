"""The learning curves, as pictures."""

from reports.figures import planned_figures
from reports.page import Page


def render(page: Page) -> str:
    """One picture a metric, with what it shows."""
    figures = planned_figures(page)
    pictures = [f"![{figure.caption}](figures/{figure.file_name})\n\n{figure.caption}" for figure in figures]
    note = "Thick: mean over seeds, with a gap where a seed has no value; thin: the seeds. Finished cells only."
    return "\n\n".join(("## Learning curves", note, *(pictures or ("No cell is finished yet.",))))
