"""OPSD: the teacher, frozen as a rule, sees the problem's privileged text; rollouts of other problems are left out."""

from collections.abc import Sequence

from sdpo_core.algorithm_specs import OpsdSpec
from sdpo_core.algorithms.base import StepTools
from sdpo_core.algorithms.self_distillation import SelfDistillation
from sdpo_core.records import Group
from sdpo_core.teacher.context import TeacherContext, check_privileged, privileged_context


def opsd(spec: OpsdSpec) -> SelfDistillation:
    """OPSD as declared."""

    def contexts(group: Group, _: StepTools) -> Sequence[TeacherContext | None]:
        return [privileged_context(group.problem, spec=spec)] * len(group.members)

    return SelfDistillation(spec, contexts=contexts, no_context="drop", check=check_privileged)
