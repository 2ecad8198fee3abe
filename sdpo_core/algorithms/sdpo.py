"""SDPO: the teacher sees a successful sibling and/or feedback; the student chooses the cells it is judged at."""

from collections.abc import Sequence

from sdpo_core import random_streams
from sdpo_core.algorithm_specs import SdpoSpec
from sdpo_core.algorithms.base import StepTools
from sdpo_core.algorithms.self_distillation import SelfDistillation
from sdpo_core.records import Group
from sdpo_core.teacher.context import TeacherContext, route


def sdpo(spec: SdpoSpec) -> SelfDistillation:
    """SDPO as declared."""

    def contexts(group: Group, tools: StepTools) -> Sequence[TeacherContext | None]:
        return route(
            group.members,
            spec=spec,
            generator=lambda member: random_streams.stream(
                tools.spec.seed, random_streams.DEMONSTRATION, tools.step, group.position, member
            ),
        )

    return SelfDistillation(spec, contexts=contexts, no_context=spec.no_context, check=lambda _: None, blend=spec.blend)
