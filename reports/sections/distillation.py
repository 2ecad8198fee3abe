"""What passed from teacher to student: divergence, KLs, coverage, feedback."""

from collections.abc import Iterator

from reports.markdown import bullets, code, escape
from reports.page import Page, by_dataset, meanings
from sdpo_core.algorithm_specs import DivergenceSpec, OpdSpec
from sdpo_core.metrics import METRICS
from sdpo_core.specs import CellSpec

_FORMS = {0.0: "forward KL(teacher||student), alpha = 0", 1.0: "reverse KL(student||teacher), alpha = 1"}
_SUPPORTS = {
    "student": "the student's top {} tokens",
    "teacher": "the teacher's top {} tokens",
    "union": "the top {} tokens of both",
    "full": "the whole vocabulary",
}
_TRUNCATIONS = {
    "tail": " and one tail cell",
    "renormalised": ", renormalised over them",
    "bregman": ", their Bregman terms alone",
}


def render(page: Page) -> str:
    """One table a data set, one column an arm with a teacher; every metric declared for them."""
    if not page.taught_arms:
        return "## Distillation\n\nn/a: no arm of this page has a teacher."
    names = page.emitted(name for name in METRICS if name.startswith(("distill/", "teacher/", "feedback/")))
    parts = (
        "## Distillation",
        "Means over response tokens (`distill/*`) or rollouts (`feedback/*`) of all training steps, sums for counts; "
        "then mean \u00b1 sample sd over seeds.",
        bullets([f"{escape(arm.name)}: {'; '.join(_terms(page.spec_of(arm)))}" for arm in page.taught_arms]),
        by_dataset(page, arms=page.taught_arms, names=names),
        meanings(names),
    )
    return "\n\n".join(parts)


def _terms(spec: CellSpec) -> Iterator[str]:
    """The declared term with its direction, so that nobody has to guess it, and its weight where it has one."""
    opd, blend = spec.opd, getattr(spec.algorithm, "blend", None)
    if spec.divergence is not None:
        yield _divergence(spec.divergence)
    elif opd is not None:
        yield _estimate(opd)
    if opd is not None:
        yield f"coefficient {opd.coefficient:g}, {'without' if opd.only else 'beside'} the task's reward"
    if blend is not None:
        yield f"weight {1 - blend.weight:g} beside a policy loss of weight {blend.weight:g}"


def _divergence(spec: DivergenceSpec) -> str:
    form = _FORMS.get(spec.alpha, f"generalised Jensen-Shannon divergence, alpha = {spec.alpha:g}")
    support = _SUPPORTS[spec.support].format(spec.top_k)
    rest = "" if spec.support == "full" else _TRUNCATIONS[spec.truncation]
    clips = "" if spec.entry_clip is None else f", each cell at most {spec.entry_clip:g} nats"
    clips += "" if spec.token_clip is None else f", tokens above {spec.token_clip:g} nats weighed down to it"
    return f"{code(form)}, on {support}{rest}{clips}"


def _estimate(spec: OpdSpec) -> str:
    later = f", later tokens discounted by {spec.discount:g}" if spec.discount else ""
    form = f"reverse KL(student||teacher), {spec.estimator} of the sampled tokens"
    return f"{code(form)}, in the {spec.placement}{later}"
