"""Whether training trained: steps taken, gradient, reward, signal in the groups."""

from reports.page import Page, by_dataset, meanings

_NAMES = (
    "train/optimizer_steps",
    "train/grad_norm",
    "train/loss",
    "train/reward",
    "train/dead_group_fraction",
    "train/entropy",
    "train/response_tokens",
    "train/truncated_fraction",
    "train/value_loss",
    "train/engine_gap",
    "train/engine_gap_max",
    "drift/kl_to_base",
)
_TO_EXPLAIN = ("train/dead_group_fraction", "train/entropy", "train/value_loss", "train/engine_gap", "drift/kl_to_base")


def render(page: Page) -> str:
    """One table a data set, one column an arm."""
    note = (
        "Each number is one run's steps (sum of the optimizer steps, largest of the largest gaps, mean of the others), "
        "then mean \u00b1 sample sd over seeds. Losses of different algorithms are not comparable."
    )
    tables = by_dataset(page, arms=page.arms, names=page.emitted(_NAMES))
    return f"## Training\n\n{note} {meanings(page.emitted(_TO_EXPLAIN))}\n\n{tables}"
