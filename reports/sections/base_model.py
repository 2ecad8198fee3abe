"""Where training started: the base model, what context gives it, what a guess gives, and what each arm gained."""

from collections.abc import Sequence
from dataclasses import dataclass

from reports.markdown import bullets, code, escape, table
from reports.page import Page, arm_table
from reports.rows import BaseRow
from reports.statistics import Spread, Value, difference, format_spread, format_value, spread

_FRACTION = "fraction"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guess:
    name: str
    accuracy: float


def render(page: Page) -> str:
    """Base model, guess baselines, gains, and a warning for every arm that a guess would match."""
    parts = [
        "## Base model and guesses",
        "The base model before training. Demonstration and feedback: the same weights, on dev, with that in the "
        "prompt; the gap to the plain dev accuracy is what a teacher has to give.",
        _base_table(page),
        "A guess answers without reading the problem. Gain: test accuracy at the last step minus that of the base.",
        _gain_table(page),
    ]
    if any(base.is_teacher for base in page.bases):
        parts[1] += (
            " A teacher that is another model has a row of its own: what it has to give is the gap between the plain "
            "accuracies of the two."
        )
    warnings = [line for dataset in page.datasets for line in _warnings(page, dataset=dataset)]
    if warnings:
        parts.append(bullets(warnings))
    return "\n\n".join(parts)


def _base_table(page: Page) -> str:
    header = (
        "Dataset",
        "Model",
        "Base dev accuracy",
        "with demonstration",
        "with feedback",
        "Base test accuracy",
        "Base test format rate",
        "Parameters",
        "Warm-up seconds",
    )
    rows = [
        (escape(dataset), *_base_cells(base))
        for dataset in page.datasets
        for base in (page.base_of(dataset), *page.teacher_bases_of(dataset))
    ]
    return table(header, rows=rows)


def _base_cells(base: BaseRow | None) -> tuple[str, ...]:
    if base is None:
        return ("missing",) * 8
    feedback: Value = "n/a" if base.feedback_accuracy is None else base.feedback_accuracy
    accuracies: tuple[Value, ...] = (
        base.dev_accuracy,
        base.demonstration_accuracy,
        feedback,
        base.test_accuracy,
        base.test_format_rate,
    )
    return (
        f"{escape(base.name)} (teacher)" if base.is_teacher else escape(base.name),
        *(format_value(value, unit=_FRACTION) for value in accuracies),
        f"{base.parameters:,}",
        format_value("n/a" if base.seconds is None else base.seconds, unit="s"),
    )


def _gain_table(page: Page) -> str:
    header = ("Dataset", "Guesses (test)", *(f"{escape(arm.name)}: gain over base" for arm in page.arms))
    rows = [_gain_row(page, dataset=dataset) for dataset in page.datasets]
    return arm_table(header, rows=rows, num_arms=len(page.arms))


def _gain_row(page: Page, *, dataset: str) -> tuple[str, ...]:
    base = page.base_of(dataset)
    baseline: Value = "missing" if base is None else base.test_accuracy
    gains = (
        spread(difference(page.values("test/accuracy", dataset=dataset, arm=arm.name), baseline=baseline))
        for arm in page.arms
    )
    guesses = [
        f"{code(guess.name)} {format_value(guess.accuracy, unit=_FRACTION)}" for guess in _guesses(page, dataset)
    ]
    return (
        escape(dataset),
        ", ".join(guesses) or ("n/a" if page.facts_of(dataset) else "missing"),
        *(format_spread(gain, unit=_FRACTION) for gain in gains),
    )


def _guesses(page: Page, dataset: str) -> Sequence[_Guess]:
    facts = page.facts_of(dataset)
    if facts is None:
        return ()
    return [_Guess(name=name, accuracy=splits["test"]) for name, splits in facts.baselines.items() if "test" in splits]


def _warnings(page: Page, *, dataset: str) -> list[str]:
    guesses = _guesses(page, dataset)
    if not guesses:
        return []
    best = max(guesses, key=lambda guess: guess.accuracy)
    spreads = {arm.name: spread(page.values("test/accuracy", dataset=dataset, arm=arm.name)) for arm in page.arms}
    lines = (_warning(dataset, arm=arm, described=described, best=best) for arm, described in spreads.items())
    return [line for line in lines if line is not None]


def _warning(dataset: str, *, arm: str, described: Spread, best: _Guess) -> str | None:
    """A sentence for an arm that a guess matches, or that its own seeds do not set apart from one."""
    if described.mean is None:
        return None
    compared = (
        f"{format_spread(described, unit=_FRACTION)} against {format_value(best.accuracy, unit=_FRACTION)} "
        f"({code(best.name)})"
    )
    subject = f"**{escape(dataset)}, {escape(arm)}**"
    if described.mean <= best.accuracy:
        return (
            f"{subject} does not beat its best guess: {compared}. Nothing on this page shows that it learned the task "
            "itself; a gain over the base may be the answer format or the habits of the answer key."
        )
    if described.sd is None or described.mean - described.sd <= best.accuracy:
        return f"{subject} is not set apart from its best guess by its seeds: {compared}."
    return None
