"""Where a page's cells depart from the SDPO paper and its published code, read off the declarations."""

from collections.abc import Collection, Iterable, Mapping

from reports.markdown import escape
from reports.page import Page
from sdpo_core.algorithm_specs import SdpoSpec
from sdpo_core.specs import CellSpec

_REDUCTIONS = {
    "token_mean": "divides by all response tokens of an optimizer step, as the paper writes it; the published code "
    "averages the token means of single sequences (micro-batches of one), so long answers weigh less there",
    "sequence_mean": "averages over the sequences that carry a loss, whatever their length; the paper's formula "
    "divides by all tokens, its code by all sequences",
    "sequence_mean_of_all": "averages over all sequences, those without a loss included, as the published code does in "
    "effect; the paper's formula divides by all tokens",
}
_DEMONSTRATIONS = {
    "random": "drawn uniformly with a seeded stream from the other successful rollouts of the group, and recorded; the "
    "published code takes the first of the batch",
    "first": "the first other successful rollout of the group as they were sampled; the published code takes the first "
    "after it has reordered the batch by length",
    "shortest": "the shortest other successful rollout of the group; the published code takes the first of the batch",
}


def departures(page: Page) -> list[str]:
    """One finished line a departure."""
    lines = [
        *_reductions(page),
        *_rollout_correction(page),
        "Selection: the last step is the headline, and a dev split carved out of train chooses the other step shown; "
        "the paper reports the best validation point, and its validation set is the test set.",
        "Budget: a fixed number of steps; the paper compares at fixed hours of training.",
        f"Model: {_models(page)}; the paper trains Qwen3-8B and Olmo-3-7B-Instruct. A small model tests the "
        "method's parts, not the paper's claim.",
        *_scales(page),
        "Data: rows are normalised, checked and graded by this project (a damaged row is quarantined, not scored).",
    ]
    sdpo = {arm.name: spec for arm in page.arms if isinstance(spec := page.spec_of(arm).algorithm, SdpoSpec)}
    if sdpo:
        lines += [*_demonstrations(sdpo), *_teachers(page, names=sdpo), *_feedback(page, sdpo)]
    others = [arm.name for arm in page.arms if arm.name not in sdpo and _is_of_another_source(page.spec_of(arm))]
    if others:
        lines.append(
            f"Other methods ({_listed(others)}): not the paper's; where each departs from its own source stands "
            "with the arms above."
        )
    return lines


def _is_of_another_source(spec: CellSpec) -> bool:
    return spec.algorithm.name != "grpo" or spec.opd is not None or spec.anchor is not None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(escape(name) for name in names)


def _reductions(page: Page) -> list[str]:
    used: dict[str, list[str]] = {}
    for arm in page.arms:
        used.setdefault(page.spec_of(arm).algorithm.reduction, []).append(arm.name)
    return [f"Reduction `{name}` ({_listed(arms)}): {_REDUCTIONS[name]}." for name, arms in used.items()]


def _rollout_correction(page: Page) -> list[str]:
    without = [arm.name for arm in page.arms if page.spec_of(arm).algorithm.rollout_cap is None]
    if not without:
        return []
    return [
        f"Rollout correction: none ({_listed(without)}); the published code weighs each token by the ratio of the "
        "trainer's probability to the rollout engine's, at most 2."
    ]


def _demonstrations(sdpo: Mapping[str, SdpoSpec]) -> list[str]:
    used: dict[str, list[str]] = {}
    for name, spec in sdpo.items():
        used.setdefault(spec.demonstration.rule, []).append(name)
    return [f"Demonstration ({_listed(arms)}): {_DEMONSTRATIONS[rule]}." for rule, arms in used.items()]


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


def _teachers(page: Page, *, names: Collection[str]) -> list[str]:
    arms = [arm for arm in page.taught_arms if arm.name in names]
    listed = ", ".join(f"{escape(arm.name)}: {escape(str(arm.teacher))}" for arm in arms)
    return [f"Teacher: {listed}; the paper's runs use an EMA teacher or a trust region."]


def _feedback(page: Page, sdpo: Mapping[str, SdpoSpec]) -> list[str]:
    told = [name for name, spec in sdpo.items() if spec.include_feedback]
    if not told:
        return []
    levels = dict.fromkeys(cell.spec.training.feedback_level for cell in page.cells)
    return [
        f"Feedback level ({_listed(told)}): {', '.join(levels)} (`diagnostic` never names the right answer); the "
        "paper's science and tool runs give no feedback text."
    ]
