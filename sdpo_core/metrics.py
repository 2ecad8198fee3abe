"""Every metric, declared once: name, unit, better direction, which arms emit it and when.

A worker that emits an undeclared name, or leaves out one its arm promises, fails the cell.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sdpo_core.errors import DataError

Moment = Literal["step", "evaluate", "end"]
Trait = Literal["any", "distill", "ema"]
Summary = Literal["mean", "token_mean", "sum", "max", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """`moment`: emitted at every training step, at every evaluation on dev, or once at the end.

    `trait`: emitted by every arm, only by arms with a teacher, or only by arms whose teacher follows the student.
    `summary`: how a run's steps become one number; "token_mean" weights each step by `distill/tokens`.
    """

    name: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    moment: Moment
    trait: Trait
    meaning: str
    summary: Summary = "last"


Better = Literal["higher", "lower", "neither"]


def _step(name: str, unit: str, better: Better, trait: Trait, summary: Summary, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, better=better, moment="step", trait=trait, meaning=meaning, summary=summary)


def _scores(prefix: str, moment: Moment, what: str) -> tuple[Metric, ...]:
    rows: tuple[tuple[str, str, Better, str], ...] = (
        ("accuracy", "fraction", "higher", "avg@k"),
        ("pass_at_k", "fraction", "higher", "at least one of k samples right"),
        ("format_rate", "fraction", "higher", "responses from which an answer could be read"),
        ("response_tokens", "tokens", "neither", "mean response length"),
    )
    return tuple(
        Metric(
            name=f"{prefix}/{name}", unit=unit, better=better, moment=moment, trait="any", meaning=f"{what}: {meaning}"
        )
        for name, unit, better, meaning in rows
    )


PHASES = ("rollout", "grade", "teacher", "update", "other")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_scores("eval", "evaluate", "dev split while training"),
        *_scores("test", "end", "test split, weights of the last step"),
        *_scores("test_at_best_dev", "end", "test split, weights of the step with the best dev accuracy"),
        Metric(
            name="test_at_best_dev/step",
            unit="step",
            better="neither",
            moment="end",
            trait="any",
            meaning="the step with the best dev accuracy (the earliest of equals)",
        ),
        Metric(
            name="cost/step_seconds/evaluate",
            unit="s",
            better="lower",
            moment="evaluate",
            trait="any",
            meaning="seconds of one evaluation on dev",
            summary="mean",
        ),
        _step("train/reward", "score", "higher", "any", "mean", "mean score over all polled rollouts"),
        _step("train/dead_group_fraction", "fraction", "lower", "any", "mean", "groups whose scores are all equal"),
        _step("train/loss", "loss", "neither", "any", "mean", "mean over the optimizer steps of the training step"),
        _step("train/grad_norm", "norm", "neither", "any", "mean", "global norm before clipping"),
        _step("train/optimizer_steps", "count", "neither", "any", "sum", "optimizer steps of this training step"),
        _step("train/response_tokens", "tokens", "neither", "any", "mean", "mean response length"),
        _step("train/truncated_fraction", "fraction", "lower", "any", "mean", "responses cut at the length limit"),
        _step("distill/tokens", "tokens", "neither", "distill", "sum", "response tokens that carried the divergence"),
        _step(
            "distill/divergence",
            "nats",
            "lower",
            "distill",
            "token_mean",
            "the trained divergence (its alpha is in the spec)",
        ),
        _step(
            "distill/kl_reverse", "nats", "lower", "distill", "token_mean", "KL(student||teacher) on support and tail"
        ),
        _step(
            "distill/kl_forward", "nats", "lower", "distill", "token_mean", "KL(teacher||student) on support and tail"
        ),
        _step(
            "distill/student_coverage",
            "probability",
            "higher",
            "distill",
            "token_mean",
            "student mass inside the support",
        ),
        _step(
            "distill/teacher_coverage",
            "probability",
            "higher",
            "distill",
            "token_mean",
            "teacher mass inside the support",
        ),
        _step(
            "distill/tail_share",
            "fraction",
            "lower",
            "distill",
            "token_mean",
            "share of the divergence carried by the tail cell",
        ),
        _step(
            "feedback/effective_fraction", "fraction", "higher", "distill", "mean", "rollouts the teacher could score"
        ),
        _step("feedback/from_demo_fraction", "fraction", "neither", "distill", "mean", "rollouts with a demonstration"),
        _step(
            "feedback/no_context_fraction", "fraction", "lower", "distill", "mean", "rollouts without teacher context"
        ),
        _step("feedback/skipped_prompts", "count", "lower", "distill", "sum", "problems polled and not trained on"),
        _step("cost/tokens_per_second", "tokens/s", "higher", "any", "mean", "response tokens over the step's seconds"),
        _step("cost/rollouts_per_second", "rollouts/s", "higher", "any", "mean", "rollouts over the step's seconds"),
        *(_step(f"cost/step_seconds/{phase}", "s", "lower", "any", "mean", f"{phase} phase") for phase in PHASES),
        _step("cost/peak_memory_bytes/student", "bytes", "lower", "any", "max", "peak of the student worker"),
        _step("cost/peak_memory_bytes/teacher", "bytes", "lower", "distill", "max", "peak of the teacher worker"),
        _step("cost/teacher_forwards", "count", "lower", "distill", "sum", "sequences the teacher scored"),
        _step("cost/teacher_seconds", "s", "lower", "distill", "sum", "seconds spent in teacher scoring"),
        _step("cost/ema_updates", "count", "neither", "ema", "sum", "commits to the teacher's weights"),
        _step("cost/ema_seconds", "s", "lower", "ema", "sum", "seconds spent in those commits"),
    )
}


def promised(moment: Moment, traits: Iterable[Trait]) -> frozenset[str]:
    """Names an arm with `traits` must emit at `moment`."""
    wanted = {"any", *traits}
    return frozenset(metric.name for metric in METRICS.values() if metric.moment == moment and metric.trait in wanted)


def check_emitted(values: Mapping[str, float | None], *, moment: Moment, traits: Iterable[Trait], where: str) -> None:
    """Raise DataError unless `values` holds exactly the promised names.

    None stands for a mean over nothing (no token distilled in this step): it is written as null and read as `n/a`.
    """
    names, expected = frozenset(values), promised(moment, traits)
    if names != expected:
        raise DataError(
            f"{where}: got metrics without {sorted(expected - names)} and with undeclared {sorted(names - expected)}, "
            "expected exactly the promised ones. Declare new ones in sdpo_core/metrics.py."
        )


def summarise(records: Sequence[tuple[Moment, Mapping[str, float | None]]]) -> dict[str, float | None]:
    """One number a metric from a run's records in order, by its `summary`; None is skipped, not counted as 0."""
    series: dict[str, list[tuple[float, float]]] = {}
    for _, values in records:
        weight = values.get("distill/tokens") or 0.0
        for name, value in values.items():
            series.setdefault(name, [])
            if value is not None:
                series[name].append((value, weight))
    return {name: _summary(METRICS[name].summary, points) for name, points in series.items()}


def _summary(kind: Summary, points: Sequence[tuple[float, float]]) -> float | None:
    values = [value for value, _ in points]
    if not values:
        return None
    if kind == "last":
        return values[-1]
    if kind == "sum":
        return math.fsum(values)
    if kind == "max":
        return max(values)
    weights = [weight for _, weight in points] if kind == "token_mean" else [1.0] * len(points)
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(weights)
