"""What the numbers mean and how far a claim may go."""

from reports.markdown import bullets, escape
from reports.page import Page


def render(page: Page) -> str:
    """Notes whose claims are no wider than the seeds and data of this page."""
    seeds = ", ".join(str(seed) for seed in page.seeds)
    names = ", ".join(escape(name) for name in page.datasets)
    notes = [
        "Accuracy is avg@k: the mean over problems of the share of k sampled responses that are right "
        f"({'; '.join(_sampling(page, dataset=dataset) for dataset in page.datasets)}).",
        "The headline is the last step. The test split chooses nothing: the step of `test_at_best_dev/*` is chosen on "
        "dev, which is carved out of train.",
        f"The number after \u00b1 is the sample standard deviation (divisor n - 1) over seeds ({seeds}); n counts the "
        "finished ones. It shows how much a seed matters, it is no confidence interval, and it leaves out that "
        "another choice of test problems would give other numbers.",
        "One seed gives every arm the same problems in the same order, so arms are best compared seed by seed.",
        "Effective feedback is the share of rollouts the teacher could score (a demonstration or feedback was there). "
        "Top-K coverage is the teacher's probability inside the K tokens that the divergence compares, mean over the "
        "response tokens of all training steps; the rest is one tail cell.",
        "`n/a`: the arm does not have it, or too few seeds for it. `missing`, `failed`, `running`, `stale` (done under "
        "older numerics): the cell that would hold the number is not done. None of them counts as 0.",
        f"What is measured holds for {names}, profile {escape(page.experiment.profile)}, {len(page.seeds)} "
        f"{'seed' if len(page.seeds) == 1 else 'seeds'} and these budgets. It says nothing about other models, data "
        "sets or scales.",
        *_repeatability(page),
    ]
    return f"## How to read this page\n\n{bullets(notes)}"


def _repeatability(page: Page) -> list[str]:
    """Nothing where all finished cells sample exactly the same again, or do not say."""
    found = (str(cell.environment.get("rollouts", "exact")) for cell in page.cells)
    kinds = dict.fromkeys(kind for kind in found if kind != "exact")
    if not kinds:
        return []
    return [
        f"Rollouts are {' or '.join(map(escape, kinds))} (see Environment): trained again with the same seeds, a cell "
        "may end with other numbers."
    ]


def _sampling(page: Page, *, dataset: str) -> str:
    spec = next(cell.spec for cell in page.cells if cell.dataset == dataset)
    evaluation = spec.evaluation
    return f"{escape(dataset)}: k = {evaluation.samples_per_problem}, temperature {evaluation.temperature:g}"
