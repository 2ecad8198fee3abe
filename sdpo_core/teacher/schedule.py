"""The life of the teacher's weights: what it starts with, and what one commit after a training step does to them."""

from collections.abc import Callable

from sdpo_core.algorithm_specs import TeacherSpec

# Share of the student's weights in one commit; None: the teacher never changes.
_RATES: dict[str, Callable[[TeacherSpec], float | None]] = {
    "static": lambda _: None,
    "ema": lambda spec: spec.rate,
    "live": lambda _: 1.0,
    "trust_region": lambda _: 1.0,
}


def commit_rate(spec: TeacherSpec) -> float | None:
    """teacher <- (1 - rate) * teacher + rate * student, once a training step; None for a static teacher.

    Of a "trust_region" teacher it is the second part that is copied (see `logit_shares`).
    """
    return _RATES[spec.schedule](spec)


def logit_shares(spec: TeacherSpec) -> tuple[float, ...]:
    """The models a teacher is made of, by the share of their logits: the initial one, then the one that follows.

    A mixture of logits is, up to the normaliser, q = q_initial^(1 - rate) q_student^rate.
    """
    if spec.schedule == "trust_region":
        assert spec.rate is not None
        return (1.0 - spec.rate, spec.rate)
    return (1.0,)
