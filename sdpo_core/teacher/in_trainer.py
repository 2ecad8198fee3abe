"""A teacher on the trainer's own backend: a model, or a mixture of two, in the worker's processes."""

from pathlib import Path

from sdpo_core.algorithm_specs import TeacherSpec
from sdpo_core.backends.base import ScoringModel, WeightsAt
from sdpo_core.backends.table import backend
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.schedule import logit_shares


def load_scorer(
    spec: CellSpec,
    *,
    life: TeacherSpec,
    at: WeightsAt,
    device: str,
    scratch: Path | None,  # noqa: ARG001
) -> ScoringModel:
    """The scoring model of the cell's backend."""
    return backend(spec).load_scorer(spec, at=at, device=device, shares=logit_shares(life))
