"""The floor of a divergence: against dense distributions, and where there is none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sdpo_core.backends.base import TokenRow
from sdpo_core.errors import CellError
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.self_distance import self_distance
from sdpo_core.specs import CellSpec
from sdpo_core.workers import StudentWorker
from tests.oracles import distributions
from tests.sdpo_core.algorithms.groups import Setting, make_setting
from tests.sdpo_core.algorithms.teachers import WireTeacher, failing
from tests.sdpo_core.micro import Base, make_problem

FULL = {"support": "full", "top_k": None}


class Listening(StudentWorker):
    """Keeps what it sampled."""

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        self.sampled = super().generate(requests, sampling=sampling)
        return self.sampled


def measure(setting: Setting) -> dict[str, float | None]:
    return self_distance(
        setting.spec,
        problems=[make_problem(index) for index in range(6)],
        student=setting.workers.student,
        teacher=setting.workers.teacher,
        text=setting.base.text,
    )


@pytest.mark.parametrize(
    ("divergence", "k"),
    [
        ({"top_k": 3, "alpha": 0.0}, 3),
        ({"top_k": 259, "alpha": 1.0}, 259),
        ({**FULL, "alpha": 0.3}, 20),
    ],
)
def test_it_is_the_trained_divergence_on_plain_prompts(
    cell_spec: CellSpec, base: Base, divergence: Mapping[str, Any], k: int
) -> None:
    """Mean over the tokens of four rollouts; of a student that has moved, so that there is something to see."""
    setting = make_setting(cell_spec, base, arm="sdpo-static", divergence=divergence)
    student = Listening(setting.spec, folder=base.folder, device="cpu")
    setting = replace(setting, workers=replace(setting.workers, student=student))
    setting.move()
    found = measure(setting)["distill/self_distance"]
    dense, other = setting.dense(), setting.start()
    assert len(student.sampled) == 4
    values = []
    for rollout in student.sampled:
        row = TokenRow(prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids)
        for p, q in zip(dense.masses(row), other.masses(row), strict=True):
            ids = distributions.ranked_ids(p, k=k)
            own, others = (distributions.cell_masses(side, ids) for side in (p, q))
            values.append(distributions.divergence(own, others, alpha=divergence["alpha"]))
    assert found is not None
    assert found == pytest.approx(sum(values) / len(values), rel=1e-3)
    assert found > 1e-4


@pytest.mark.parametrize("arm", ["grpo", "ppo", "opd", "opd-k2", "grpo-k1"])
def test_arm_without_a_divergence_has_none(cell_spec: CellSpec, base: Base, arm: str) -> None:
    assert measure(make_setting(cell_spec, base, arm=arm)) == {}


def test_teacher_of_other_weights_has_no_floor(cell_spec: CellSpec, base: Base) -> None:
    """It differs from the student by what it is: n/a, not 0."""
    weights = {"kind": "checkpoint", "cell": "0" * 20, "step": "last"}
    setting = make_setting(cell_spec, base, arm="sdpo-static", teacher={"schedule": "static", "weights": weights})
    assert measure(setting) == {"distill/self_distance": None}


def test_floor_that_cannot_be_measured_stops_the_cell(cell_spec: CellSpec, base: Base) -> None:
    """Contract 33: also where failures are allowed while training."""
    teacher = {"schedule": "static", "max_failed_fraction": 1.0}
    setting = make_setting(cell_spec, base, arm="sdpo-static", teacher=teacher)
    with pytest.raises(CellError, match=r"self-distance: got no scores \(timeout\)"):
        measure(setting.with_teacher(WireTeacher(setting.workers.teacher, failing(2))))
