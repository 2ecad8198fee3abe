"""Routing of teacher context, exhaustively, and the teacher's prompt."""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from sdpo_core import random_streams
from sdpo_core.errors import DataError
from sdpo_core.records import GradedRollout, Message
from sdpo_core.specs import SdpoSpec, TeacherSpec
from sdpo_core.teacher.context import TeacherContext, route, teacher_messages
from tests.sdpo_core.micro import make_member, make_problem


def make_sdpo(
    *, include: bool = True, only_without: bool = True, threshold: float = 1.0, teacher: TeacherSpec | None = None
) -> SdpoSpec:
    return SdpoSpec(
        teacher=teacher or TeacherSpec(schedule="static"),
        include_feedback=include,
        feedback_only_without_demonstration=only_without,
        success_threshold=threshold,
    )


def streams(*keys: int) -> Callable[[int], np.random.Generator]:
    return lambda member: random_streams.stream(1, "x", *keys, member)


def contexts(members: list[GradedRollout], spec: SdpoSpec) -> tuple[TeacherContext | None, ...]:
    return route(members, spec=spec, generator=streams())


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("only_without", [True, False])
@pytest.mark.parametrize("succeeds", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("informed", [True, False])
def test_route_follows_the_table(include: bool, only_without: bool, succeeds: tuple[bool, ...], informed: bool) -> None:
    """Every group of three: who succeeded, whether failures carry feedback, both switches."""
    members = [
        make_member((i,), score=float(good), feedback="" if good or not informed else f"f{i}", text=f" t{i}\n")
        for i, good in enumerate(succeeds)
    ]
    found = contexts(members, make_sdpo(include=include, only_without=only_without))
    for i, (good, context) in enumerate(zip(succeeds, found, strict=True)):
        siblings = [j for j in range(3) if j != i and succeeds[j]]
        has_feedback = informed and not good and include and not (siblings and only_without)
        if not siblings and not has_feedback:
            assert context is None
            continue
        assert context is not None
        assert context.feedback == (f"f{i}" if has_feedback else None)
        if siblings:
            assert context.demonstrator in siblings
            assert context.demonstration == f"t{context.demonstrator}"
        else:
            assert (context.demonstrator, context.demonstration) == (None, None)


def test_lone_success_has_no_context_and_serves_the_others() -> None:
    members = [make_member((0,), text="a"), make_member((1,), score=1.0, text="b"), make_member((2,), text="c")]
    found = contexts(members, make_sdpo())
    served = TeacherContext(demonstration="b", demonstrator=1)
    assert found == (served, None, served)


def test_blank_feedback_is_no_feedback() -> None:
    assert contexts([make_member((0,), feedback=" \n ")], make_sdpo()) == (None,)


@pytest.mark.parametrize(("threshold", "demonstrator"), [(0.5, 0), (0.51, None)])
def test_success_threshold_is_inclusive(threshold: float, demonstrator: int | None) -> None:
    """A partial score demonstrates where the arm lets it; its own feedback still reaches its own teacher."""
    members = [make_member((0,), score=0.5, text="half", feedback="almost"), make_member((1,), feedback="no")]
    first, second = contexts(members, make_sdpo(threshold=threshold))
    assert first == TeacherContext(feedback="almost")
    assert second is not None
    assert second.demonstrator == demonstrator
    assert second.feedback == (None if demonstrator == 0 else "no")


def test_demonstrations_are_drawn_uniformly_and_seeded() -> None:
    """3,000 draws over three siblings: each within 5 standard deviations of a third."""
    members = [make_member((i,), score=float(i < 3), text=f"t{i}") for i in range(4)]
    drawn: Counter[int | None] = Counter()
    for key in range(3_000):
        first, again = (route(members, spec=make_sdpo(), generator=streams(key)) for _ in range(2))
        assert first == again
        assert first[3] is not None
        drawn[first[3].demonstrator] += 1
    assert set(drawn) == {0, 1, 2}
    assert max(abs(count - 1_000) for count in drawn.values()) < 5 * (3_000 * 2 / 9) ** 0.5


def test_a_members_draw_does_not_depend_on_the_others() -> None:
    """One stream a rollout: a sibling without choice takes nothing from its neighbour's stream."""
    members = [make_member((i,), score=float(i < 3), text=f"t{i}") for i in range(4)]
    whole = route(members, spec=make_sdpo(), generator=streams())
    other = route([make_member((0,), score=1.0, text="other"), *members[1:]], spec=make_sdpo(), generator=streams())
    assert [c and c.demonstrator for c in whole] == [c and c.demonstrator for c in other]


def test_teacher_messages_keep_earlier_turns_and_extend_the_last() -> None:
    earlier = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Hello "),
    )
    problem = make_problem(0, prompt=(*earlier, Message(role="user", content="Say a\n\n")))
    both = teacher_messages(problem, TeacherContext(demonstration="D", feedback="F", demonstrator=2))
    assert both[:3] == earlier
    assert both[3].role == "user"
    assert both[3].content == (
        "Say a\n\nA correct solution:\n\nD\n\nFeedback on an earlier attempt that failed:\n\nF"
        "\n\nNow solve the original problem correctly."
    )
    only = teacher_messages(problem, TeacherContext(feedback="F"))[3].content
    assert "solution:" not in only
    assert only.startswith("Say a\n\nFeedback")
    shown = teacher_messages(problem, TeacherContext(demonstration="D"))[3].content
    assert "Feedback" not in shown
    assert "D\n\nNow solve" in shown


def test_prompt_that_does_not_end_with_the_user_is_refused() -> None:
    problem = make_problem(0, prompt=(Message(role="user", content="x"), Message(role="assistant", content="y")))
    with pytest.raises(DataError, match="train-0: got a prompt that ends with role 'assistant'"):
        teacher_messages(problem, TeacherContext(feedback="F"))
