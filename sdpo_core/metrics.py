"""Every metric, declared once: name, unit, better direction, which arms emit it and when.

A worker that emits an undeclared name, or leaves out one its arm promises, fails the cell.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sdpo_core.errors import DataError

Moment = Literal["start", "step", "evaluate", "end"]
Trait = Literal["any", "teacher", "follows", "divergence", "support", "sampled", "context", "anchor", "value"]
Summary = Literal["mean", "token_mean", "sum", "max", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """`moment`: emitted before the first step, at every training step, at every evaluation on dev, or at the end.

    `trait`: emitted by every arm, or by arms that have it: a "teacher"; one that "follows" the student; a "divergence"
    of whole distributions, on a "support"; a reverse KL "sampled" at the student's tokens; a teacher "context"; an
    "anchor"; a "value" head. `summary`: how a run's steps become one number; "token_mean" weights each step by
    `distill/tokens`.
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


# name, unit, better, trait, meaning; each a mean over `distill/tokens`
_DISTILL: tuple[tuple[str, str, Better, Trait, str], ...] = (
    ("divergence", "nats", "lower", "divergence", "the trained divergence (its alpha and support are in the spec)"),
    ("kl_reverse", "nats", "lower", "support", "KL(student||teacher) on support and tail"),
    ("kl_forward", "nats", "lower", "support", "KL(teacher||student) on support and tail"),
    ("student_coverage", "probability", "higher", "support", "student mass inside the support"),
    ("teacher_coverage", "probability", "higher", "support", "teacher mass inside the support"),
    ("tail_share", "fraction", "lower", "support", "share of the divergence carried by the tail cell"),
    ("topk_overlap", "fraction", "higher", "support", "share of the support among as many of the teacher's best ids"),
    ("clipped_fraction", "fraction", "lower", "divergence", "tokens weighed down by the token clip"),
    ("sampled_kl", "nats", "lower", "sampled", "mean log-ratio student/teacher of the sampled tokens (k1)"),
    ("teacher_entropy", "nats", "neither", "teacher", "entropy of the teacher"),
)
# name, unit, better, summary, meaning
_FEEDBACK: tuple[tuple[str, str, Better, Summary, str], ...] = (
    ("effective_fraction", "fraction", "higher", "mean", "rollouts the teacher could score"),
    ("from_demo_fraction", "fraction", "neither", "mean", "rollouts with a demonstration"),
    ("no_context_fraction", "fraction", "lower", "mean", "rollouts without teacher context"),
    ("cut_fraction", "fraction", "lower", "mean", "rollouts whose context was cut to fit the teacher's prompt"),
    ("skipped_prompts", "count", "lower", "sum", "problems polled and not trained on"),
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
            name="distill/self_distance",
            unit="nats",
            better="lower",
            moment="start",
            trait="divergence",
            meaning="trained divergence of equal weights on equal prompts, before the first step: its floor",
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
        _step("train/entropy", "nats", "neither", "any", "mean", "mean entropy of the student over the trained tokens"),
        _step(
            "train/engine_gap",
            "nats",
            "lower",
            "any",
            "mean",
            "distance of the engine's log-probabilities of the trained tokens from the policy's, before any update",
        ),
        _step("train/engine_gap_max", "nats", "lower", "any", "max", "the largest of these distances"),
        _step("train/value_loss", "loss", "lower", "value", "mean", "value loss, mean over the trained tokens"),
        _step(
            "distill/tokens", "tokens", "neither", "teacher", "sum", "response tokens that carried the teacher's term"
        ),
        *(
            _step(f"distill/{name}", unit, better, trait, "token_mean", meaning)
            for name, unit, better, trait, meaning in _DISTILL
        ),
        _step("teacher/failed_fraction", "fraction", "lower", "teacher", "mean", "requested rollouts without scores"),
        _step(
            "drift/kl_to_base", "nats", "lower", "anchor", "mean", "k3 estimate of KL(student||base), sampled tokens"
        ),
        *(
            _step(f"feedback/{name}", unit, better, "context", summary, meaning)
            for name, unit, better, summary, meaning in _FEEDBACK
        ),
        _step("cost/tokens_per_second", "tokens/s", "higher", "any", "mean", "response tokens over the step's seconds"),
        _step("cost/rollouts_per_second", "rollouts/s", "higher", "any", "mean", "rollouts over the step's seconds"),
        *(_step(f"cost/step_seconds/{phase}", "s", "lower", "any", "mean", f"{phase} phase") for phase in PHASES),
        _step("cost/peak_memory_bytes/student", "bytes", "lower", "any", "max", "peak of a student process"),
        _step("cost/peak_memory_bytes/teacher", "bytes", "lower", "teacher", "max", "peak of a teacher process"),
        _step("cost/peak_memory_bytes/anchor", "bytes", "lower", "anchor", "max", "peak of an anchor process"),
        _step("cost/teacher_forwards", "count", "lower", "teacher", "sum", "sequences the teacher scored"),
        _step("cost/teacher_seconds", "s", "lower", "teacher", "sum", "seconds spent in teacher scoring"),
        _step("cost/ema_updates", "count", "neither", "follows", "sum", "commits to the teacher's weights"),
        _step("cost/ema_seconds", "s", "lower", "follows", "sum", "seconds spent in those commits"),
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
