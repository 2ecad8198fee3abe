"""The life of the teacher's weights: what one commit after a training step does to them."""

from collections.abc import Callable

from sdpo_core.specs import TeacherSpec

# Share of the student's weights in one commit; None: the teacher never changes.
_RATES: dict[str, Callable[[TeacherSpec], float | None]] = {
    "static": lambda _: None,
    "ema": lambda spec: spec.rate,
    "live": lambda _: 1.0,
}


def commit_rate(spec: TeacherSpec) -> float | None:
    """teacher <- (1 - rate) * teacher + rate * student, once a training step; None for a static teacher."""
    return _RATES[spec.schedule](spec)
