"""Routing of teacher context, exhaustively, and the teacher's prompt."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sdpo_core import random_streams
from sdpo_core.algorithm_specs import DemonstrationSpec, OpsdSpec, SdpoSpec, TeacherSpec
from sdpo_core.errors import DataError
from sdpo_core.records import GradedRollout, Message
from sdpo_core.teacher.context import (
    TeacherContext,
    check_privileged,
    privileged_context,
    route,
    teacher_messages,
)
from tests.sdpo_core.micro import make_member, make_problem


def make_sdpo(
    *, include: bool = True, only_without: bool = True, threshold: float = 1.0, **demonstration: Any
) -> SdpoSpec:
    return SdpoSpec(
        teacher=TeacherSpec(schedule="static"),
        demonstration=DemonstrationSpec(**demonstration),
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


def shown(members: list[GradedRollout], **demonstration: Any) -> list[tuple[int | None, str | None] | None]:
    """Demonstrator and demonstration of each member."""
    found = contexts(members, make_sdpo(include=False, **demonstration))
    return [None if context is None else (context.demonstrator, context.demonstration) for context in found]


def success(*response: int, text: str) -> GradedRollout:
    return make_member(response, score=1.0, text=text)


def test_random_rule_draws_one_place_among_the_siblings() -> None:
    """The draw itself, as recorded runs have it: one integer of the member's stream."""
    members = [success(i, text=f"t{i}") for i in range(5)]
    for i, context in enumerate(contexts(members, make_sdpo())):
        siblings = [j for j in range(5) if j != i]
        assert context is not None
        assert context.demonstrator == siblings[int(streams()(i).integers(4))]


def test_first_rule_takes_the_first_other_success() -> None:
    members = [make_member((0,)), success(1, text="b"), success(2, text="c")]
    assert shown(members, rule="first") == [(1, "b"), (2, "c"), (1, "b")]


def test_shortest_rule_counts_response_tokens_and_takes_the_first_of_equals() -> None:
    """Tokens 3, 2, 2, none: text length has no say."""
    members = [success(1, 2, 3, text="a"), success(1, 2, text="long text"), success(1, 2, text="c"), make_member((1,))]
    assert [found and found[0] for found in shown(members, rule="shortest")] == [1, 2, 1, 1]


def test_a_success_shows_itself_only_where_it_may() -> None:
    members = [success(1, text="a"), make_member((2,))]
    assert shown(members, rule="first") == [None, (0, "a")]
    assert shown(members, rule="first", exclude_self=False) == [(0, "a"), (0, "a")]
    assert shown(members, exclude_self=False) == [(0, "a"), (0, "a")]


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("<answer>\nA\n</answer>", True),
        ("so <ANSWER>A</Answer> it is", True),
        ("A", False),
        ("<answer>A", False),
        ("A</answer>", False),
        ("<answer>B</answer> no, <answer>A</answer>", False),
    ],
)
def test_single_answer_lets_one_block_demonstrate(text: str, may: bool) -> None:
    members = [make_member((0,)), success(1, text=text)]
    assert shown(members, single_answer=True)[0] == ((1, text) if may else None)
    assert shown(members)[0] == (1, text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>\nA?\n</think>\n\nB", "B"),
        ("A <think>x</think>\nB <think>y</think> C", "A B C"),
        ("x?\n</think>\n\nB", "B"),
        ("x <think>y</think> z </think> B", "B"),
        ("<THINK>x</Think>B", "B"),
        ("B <think>x", "B <think>x"),
        ("plain", "plain"),
    ],
)
def test_strip_thinking_leaves_what_follows(text: str, left: str) -> None:
    """Complete blocks go, and what stands before the end of a block that the template opened."""
    members = [make_member((0,)), success(1, text=text)]
    assert shown(members, strip_thinking=True)[0] == (1, left)
    assert shown(members)[0] == (1, text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("why <answer>A</answer> and more", "why <answer>A</answer>"),
        ("<answer>A</ANSWER>\n<answer>B</answer>", "<answer>A</ANSWER>"),
        ("no block\nat all", "no block\nat all"),
    ],
)
def test_stop_at_answer_ends_with_the_first_block(text: str, left: str) -> None:
    members = [make_member((0,)), success(1, text=text)]
    assert shown(members, stop_at_answer=True)[0] == (1, left)


def test_thinking_goes_before_the_first_answer_is_looked_for() -> None:
    members = [make_member((0,)), success(1, text="<think><answer>B</answer></think>So <answer>A</answer>.")]
    assert shown(members, strip_thinking=True, stop_at_answer=True)[0] == (1, "So <answer>A</answer>")


def test_an_empty_demonstration_is_none() -> None:
    """It leaves no draw to win, and a group of such successes has no context but its feedback."""
    members = [make_member((0,), feedback="no"), success(1, text="<think>A</think>\n"), success(2, text=" \n")]
    found = contexts(members, make_sdpo(strip_thinking=True))
    assert found == (TeacherContext(feedback="no"), None, None)
    assert [item and item[0] for item in shown([*members, success(3, text="A")], strip_thinking=True)[:3]] == [3, 3, 3]


@pytest.mark.parametrize(("prompt", "is_reason_first"), [("plain", False), ("reason_first", True)])
def test_privileged_context_is_the_problems_own_text(prompt: Any, is_reason_first: bool) -> None:
    spec = OpsdSpec(prompt=prompt)
    problem = replace(make_problem(0), privileged=" cba\n")
    expected = TeacherContext(privileged="cba", is_reason_first=is_reason_first)
    assert privileged_context(problem, spec=spec) == expected
    for blank in (None, "", " \n"):
        assert privileged_context(replace(problem, privileged=blank), spec=spec) is None


def test_check_privileged_warns_of_some_and_refuses_none(caplog: pytest.LogCaptureFixture) -> None:
    blank = [replace(make_problem(i), privileged=value) for i, value in enumerate((None, " "))]
    told = replace(make_problem(2), privileged="a")
    with caplog.at_level(logging.WARNING, logger="sdpo_core.teacher.context"):
        check_privileged([told])
        assert caplog.messages == []
        check_privileged([*blank, told])
    assert len(caplog.messages) == 1
    assert "2 of 3" in caplog.messages[0]
    with pytest.raises(DataError, match="got no privileged text in any of 2 problems"):
        check_privileged(blank)


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


def test_privileged_text_has_a_demonstrations_frame() -> None:
    """The base models know these texts; only the request to reason first is a new one."""
    problem = make_problem(0)
    told = TeacherContext(privileged="P")
    assert teacher_messages(problem, told) == teacher_messages(problem, TeacherContext(demonstration="P"))
    plain, reasoned = (teacher_messages(problem, replace(told, is_reason_first=b))[-1].content for b in (False, True))
    head, end = "A correct solution:\n\nP", "\n\nNow solve the original problem correctly."
    assert plain.endswith(head + end)
    assert reasoned.startswith(plain.removesuffix(end))
    assert reasoned.endswith(end)
    assert "in your own words" in reasoned.removesuffix(end)


def test_teacher_messages_without_context_are_the_prompt() -> None:
    """Whatever the last turn is: nothing is put into it."""
    for role in ("user", "assistant"):
        problem = make_problem(0, prompt=(Message(role="system", content="s "), Message(role=role, content=" x \n")))
        assert teacher_messages(problem, None) is problem.prompt


@pytest.mark.parametrize("context", [None, TeacherContext(feedback="F")])
def test_content_that_is_no_text_is_refused_by_kind(context: TeacherContext | None) -> None:
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What is this?"}]
    message = Message(role="user", content="")
    object.__setattr__(message, "content", parts)
    problem = make_problem(0, prompt=(message, Message(role="user", content="x")))
    with pytest.raises(DataError, match="train-0: got content with parts of kind image, text, expected plain text"):
        teacher_messages(problem, context)


def test_prompt_that_does_not_end_with_the_user_is_refused() -> None:
    problem = make_problem(0, prompt=(Message(role="user", content="x"), Message(role="assistant", content="y")))
    with pytest.raises(DataError, match="train-0: got a prompt that ends with role 'assistant'"):
        teacher_messages(problem, TeacherContext(feedback="F"))
