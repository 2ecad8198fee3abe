"""What passed from teacher to student: divergence, KLs, coverage, feedback."""

from reports.markdown import bullets, code, escape
from reports.page import Page, by_dataset, meanings
from sdpo_core.metrics import METRICS


def render(page: Page) -> str:
    """One table a data set, one column an arm with a teacher; every metric declared for them."""
    if not page.taught_arms:
        return "## Self-distillation\n\nn/a: no arm of this page has a teacher."
    names = tuple(name for name in METRICS if name.startswith(("distill/", "feedback/")))
    parts = (
        "## Self-distillation",
        "Means over response tokens (`distill/*`) or rollouts (`feedback/*`) of all training steps, sums for counts; "
        "then mean \u00b1 sample sd over seeds.",
        bullets([_divergence(page, name=arm.name) for arm in page.taught_arms]),
        by_dataset(page, arms=page.taught_arms, names=names),
        meanings(names),
    )
    return "\n\n".join(parts)


def _divergence(page: Page, *, name: str) -> str:
    """The declared divergence with its direction, so that nobody has to guess it."""
    spec = next(cell.spec.algorithm for cell in page.cells if cell.arm == name)
    alpha, top_k = getattr(spec, "alpha", None), getattr(spec, "top_k", None)
    form = {
        None: "divergence as its algorithm defines it",
        0.0: "forward KL(teacher||student), alpha = 0",
        1.0: "reverse KL(student||teacher), alpha = 1",
    }.get(alpha, f"generalised Jensen-Shannon divergence, alpha = {alpha}")
    support = "" if top_k is None else f", on the student's top {top_k} tokens and one tail cell"
    return f"{escape(name)}: {code(form)}{support}"
