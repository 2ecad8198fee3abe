"""Where a page's cells depart from the SDPO paper and its published code, read off the declarations."""

from reports.markdown import escape
from reports.page import Page

_REDUCTIONS = {
    "token_mean": "divides by all response tokens of an optimizer step, as the paper writes it; the published code "
    "averages the token means of single sequences (micro-batches of one), so long answers weigh less there",
    "sequence_mean": "averages over sequences, as the published code does in effect; the paper's formula divides by "
    "all tokens",
}


def departures(page: Page) -> list[str]:
    """One finished line a departure."""
    lines = [
        *_reductions(page),
        "Selection: the last step is the headline, and a dev split carved out of train chooses the other step shown; "
        "the paper reports the best validation point, and its validation set is the test set.",
        "Budget: a fixed number of steps; the paper compares at fixed hours of training.",
        f"Model: {_models(page)}; the paper trains Qwen3-8B and Olmo-3-7B-Instruct. A small model tests the "
        "method's parts, not the paper's claim.",
        *_scales(page),
        "Data: rows are normalised, checked and graded by this project (a damaged row is quarantined, not scored).",
    ]
    if page.taught_arms:
        lines += [
            "Demonstration: drawn uniformly with a seeded stream from the other successful rollouts of the group, and "
            "recorded; the published code takes the first of the batch.",
            *_teachers(page),
            *_feedback(page),
        ]
    return lines


def _reductions(page: Page) -> list[str]:
    used: dict[str, list[str]] = {}
    for arm in page.arms:
        spec = next(cell.spec.algorithm for cell in page.cells if cell.arm == arm.name)
        used.setdefault(spec.reduction, []).append(escape(arm.name))
    return [f"Reduction `{name}` ({', '.join(arms)}): {_REDUCTIONS[name]}." for name, arms in used.items()]


def _models(page: Page) -> str:
    names = dict.fromkeys(cell.spec.base.name for cell in page.cells)
    sizes = dict.fromkeys(f"{base.parameters:,}" for base in page.bases)
    size = f" ({', '.join(sizes)} parameters)" if sizes else ""
    return f"{', '.join(escape(name) for name in names)}{size}, warmed up here"


def _scales(page: Page) -> list[str]:
    lines = []
    for dataset in page.datasets:
        training = next(cell.spec.training for cell in page.cells if cell.dataset == dataset)
        lines.append(
            f"Scale of {escape(dataset)}: {training.problems_per_step} problems x {training.rollouts_per_problem} "
            f"rollouts a step, {training.steps} steps, at most {training.max_response_tokens} response tokens; the "
            "paper uses 32 x 8 and up to 8,192 tokens."
        )
    return lines


def _teachers(page: Page) -> list[str]:
    names = {arm.name: arm.teacher for arm in page.taught_arms}
    listed = ", ".join(f"{escape(name)}: {escape(str(teacher))}" for name, teacher in names.items())
    return [f"Teacher: {listed}; the paper's runs use an EMA teacher or a trust region."]


def _feedback(page: Page) -> list[str]:
    levels = dict.fromkeys(cell.spec.training.feedback_level for cell in page.cells)
    return [
        f"Feedback level: {', '.join(levels)} (`diagnostic` never names the right answer); the paper's science and "
        "tool runs give no feedback text."
    ]
