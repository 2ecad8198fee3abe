"""Scores of each arm: mean and sample sd over seeds."""

from reports.page import Page, by_dataset

_NAMES = (
    "eval/accuracy",
    "test/accuracy",
    "test_at_best_dev/accuracy",
    "test_at_best_dev/step",
    "test/pass_at_k",
    "test/format_rate",
    "test/response_tokens",
)


def render(page: Page) -> str:
    """One table a data set, one column an arm."""
    note = "Mean \u00b1 sample sd over seeds. `eval/*` is the dev split, `eval/accuracy` that of the last step."
    return f"## Scores by arm\n\n{note}\n\n{by_dataset(page, arms=page.arms, names=_NAMES)}"
