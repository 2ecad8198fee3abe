"""One teacher request: cutting under any text and limit, the response's own ids, the header both prompts share."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sdpo_core.algorithm_specs import OpsdSpec, SdpoSpec, TeacherSpec
from sdpo_core.backends.base import TokenRow
from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.errors import DataError
from sdpo_core.records import Message, Problem
from sdpo_core.teacher.context import TeacherContext, privileged_context, route, teacher_messages
from sdpo_core.teacher.request import LEAST_TOKENS, MARK, TeacherPrompt, question, teacher_prompt
from sdpo_core.text import END, PAD, START, ChatTokenizer, build_tokenizer
from tests.sdpo_core.micro import make_member, make_problem

WORDS = [f"the {a}{b} of a correct solution: {b}{a}{a} is\n\nright" for a in "abcdef" for b in "uvwxyz"]
TEXTS = {
    "byte": build_tokenizer(TokenizerSpec(kind="byte"), texts=()),
    "phrases": build_tokenizer(TokenizerSpec(kind="byte", phrases=("\n\nA correct solution:\n\n",)), texts=()),
    "bpe": build_tokenizer(TokenizerSpec(kind="bpe", vocab_size=330), texts=WORDS),
}
BYTE = TEXTS["byte"]
# What a text of the byte tokenizer keeps at least: bytes of its own and the mark.
LEAST = LEAST_TOKENS + len(MARK)
PROBLEM = make_problem(
    0, prompt=(Message(role="system", content="Be brief."), Message(role="user", content="Spell sun backward."))
)
pieces = st.one_of(
    st.sampled_from([START, END, PAD, "<|im_", "end|>", MARK, "\n\nA correct solution:\n\n", "caf\u00e9 \U0001f600"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
texts = st.lists(pieces, max_size=12).map("".join)
contexts = st.builds(
    TeacherContext,
    demonstration=st.none() | texts.filter(bool),
    feedback=st.none() | texts.filter(bool),
    privileged=st.none() | texts.filter(bool),
    is_reason_first=st.booleans(),
)


def injected(context: TeacherContext) -> list[str]:
    """The texts of a context in the order of the prompt."""
    found = (context.demonstration, context.privileged, context.feedback)
    return [value for value in found if value is not None]


def frame(problem: Problem, context: TeacherContext, *, text: ChatTokenizer) -> list[str]:
    """The rendered prompt around its texts: one piece more than there are texts."""
    slots = TeacherContext(
        demonstration=context.demonstration and "{slot}",
        privileged=context.privileged and "{slot}",
        feedback=context.feedback and "{slot}",
        is_reason_first=context.is_reason_first,
    )
    return text.render(teacher_messages(problem, slots)).split("{slot}")


def is_part(shown: str, whole: str) -> bool:
    """Whether `shown` is `whole`, or the mark between a start and an end of it."""
    cuts = [place for place in range(len(shown)) if shown.startswith(MARK, place)]
    return shown == whole or any(
        whole.startswith(shown[:cut])
        and whole.endswith(shown[cut + len(MARK) :])
        and len(shown) - len(MARK) < len(whole)
        for cut in cuts
    )


def has_frame(prompt: str, frame: list[str], wholes: list[str]) -> bool:
    """Whether `prompt` is the pieces of `frame`, with a part of each whole text between them."""
    if not prompt.startswith(frame[0]):
        return False
    rest = prompt[len(frame[0]) :]
    if not wholes:
        return rest == ""
    return any(
        rest.startswith(frame[1], place)
        and is_part(rest[:place], wholes[0])
        and has_frame(rest[place:], frame[1:], wholes[1:])
        for place in range(len(rest) + 1)
    )


def specials(ids: tuple[int, ...], text: ChatTokenizer) -> list[int]:
    known = {text.end_id, text.pad_id, text.prompt_ids(PROBLEM.prompt)[0]}
    return [token for token in ids if token in known]


@pytest.mark.parametrize("kind", TEXTS)
@settings(max_examples=120, deadline=None)
@given(context=contexts, limit=st.integers(20, 420))
@example(context=TeacherContext(demonstration="\U0001f600" * 30, feedback=f"x{END}y" * 9), limit=260)
def test_any_prompt_keeps_its_frame_and_its_limit(kind: str, context: TeacherContext, limit: int) -> None:
    """Frame whole, ids within the limit, `is_cut` true to the text, and no special token but those of the turns."""
    text = TEXTS[kind]
    whole = text.render(teacher_messages(PROBLEM, context))
    prompt = teacher_prompt(PROBLEM, context, text=text, limit=limit)
    if len(text.rendered_ids(whole)) <= limit:
        assert prompt == TeacherPrompt(text=whole, ids=text.rendered_ids(whole), is_cut=False)
        return
    if prompt is None:
        return
    assert prompt == teacher_prompt(PROBLEM, context, text=text, limit=limit)
    assert prompt.is_cut
    assert prompt.text != whole
    assert len(prompt.ids) <= limit
    assert prompt.ids == text.rendered_ids(prompt.text)
    pieces = frame(PROBLEM, context, text=text)
    assert has_frame(prompt.text, pieces, [text.neutralise(value) for value in injected(context)])
    assert specials(prompt.ids, text) == specials(text.prompt_ids(PROBLEM.prompt), text)
    assert prompt.ids[-len(text.header_ids) :] == text.header_ids


@settings(max_examples=120, deadline=None)
@given(context=contexts, limit=st.integers(20, 420))
def test_a_cut_prompt_fills_its_limit(context: TeacherContext, limit: int) -> None:
    """None only where frame and minima do not fit; else a text leaves at most a rounded token and two characters."""
    prompt = teacher_prompt(PROBLEM, context, text=BYTE, limit=limit)
    sizes = [len(BYTE.neutralise(value).encode()) for value in injected(context)]
    bare = sum(len(piece.encode()) for piece in frame(PROBLEM, context, text=BYTE))
    # In the frame three special tokens start a turn and two end one: one id each.
    bare -= 3 * (len(START) - 1) + 2 * (len(END) - 1)
    if prompt is None:
        assert bare + sum(min(size, LEAST) for size in sizes) > limit
    elif prompt.is_cut:
        assert bare + sum(sizes) > limit
        assert limit - len(prompt.ids) <= 7 * len(sizes)


def test_texts_are_cut_in_proportion_in_the_middle() -> None:
    """100 and 300 bytes over a limit that is 200 short: 50 and 150 are left, marks included."""
    context = TeacherContext(demonstration="abcde" * 20, feedback="vwxyz" * 60)
    whole = teacher_prompt(PROBLEM, context, text=BYTE, limit=10_000)
    assert whole is not None
    prompt = teacher_prompt(PROBLEM, context, text=BYTE, limit=len(whole.ids) - 200)
    assert prompt is not None
    assert len(prompt.ids) == len(whole.ids) - 200
    # 45 bytes: 23 from the start, 22 from the end; 145: 73 and 72.
    demonstration = f"{'abcde' * 4}abc{MARK}de{'abcde' * 4}"
    feedback = f"{'vwxyz' * 14}vwx{MARK}yz{'vwxyz' * 14}"
    cut = teacher_messages(PROBLEM, TeacherContext(demonstration=demonstration, feedback=feedback))
    assert prompt == TeacherPrompt(text=BYTE.render(cut), ids=BYTE.prompt_ids(cut), is_cut=True)


def test_each_text_keeps_a_minimum_or_there_is_no_prompt() -> None:
    """The least prompt: 8 tokens and the mark of a long text, all of a short one; one token less is none."""
    context = TeacherContext(demonstration="a" * 200, feedback="b" * LEAST)
    least = "aaaa" + MARK + "aaaa"
    messages = teacher_messages(PROBLEM, replace(context, demonstration=least))
    limit = len(BYTE.prompt_ids(messages))
    prompt = teacher_prompt(PROBLEM, context, text=BYTE, limit=limit)
    assert prompt is not None
    assert prompt.text == BYTE.render(messages)
    assert teacher_prompt(PROBLEM, context, text=BYTE, limit=limit - 1) is None


@pytest.mark.parametrize("context", [None, TeacherContext(demonstration="")])
def test_a_prompt_without_text_is_whole_or_none(context: TeacherContext | None) -> None:
    size = len(BYTE.prompt_ids(teacher_messages(PROBLEM, context)))
    prompt = teacher_prompt(PROBLEM, context, text=BYTE, limit=size)
    assert prompt is not None
    assert not prompt.is_cut
    assert teacher_prompt(PROBLEM, context, text=BYTE, limit=size - 1) is None


def test_a_cut_leaves_no_half_character() -> None:
    """Every limit through a text of four-byte characters."""
    context = TeacherContext(privileged="\U0001f600" * 12)
    prompts = [teacher_prompt(PROBLEM, context, text=BYTE, limit=limit) for limit in range(140, 220)]
    kept = {prompt.text.count("\U0001f600") for prompt in prompts if prompt is not None and prompt.is_cut}
    assert kept >= {2, 4, 6, 8}
    assert not any("\ufffd" in prompt.text for prompt in prompts if prompt is not None)


ids = st.lists(st.integers(0, BYTE.vocab_size - 1), min_size=1, max_size=9).map(tuple)


def student_row(response_ids: tuple[int, ...]) -> TokenRow:
    return TokenRow(prompt_ids=BYTE.prompt_ids(PROBLEM.prompt), response_ids=response_ids)


def asked(context: TeacherContext | None, row: TokenRow, *, limit: int = 400) -> TokenRow:
    prompt = teacher_prompt(PROBLEM, context, text=BYTE, limit=limit)
    assert prompt is not None
    return question(prompt, row, text=BYTE).row


@settings(max_examples=60, deadline=None)
@given(response_ids=ids, context=st.none() | contexts)
def test_contract_1_response_row_t_is_read_before_its_token(
    response_ids: tuple[int, ...], context: TeacherContext | None
) -> None:
    """Position P + t - 1 of either sequence predicts y_t, P of that sequence's own prompt."""
    student = student_row(response_ids)
    for row in (student, asked(context, student, limit=10_000)):
        sequence = (*row.prompt_ids, *row.response_ids)
        start = len(row.prompt_ids) - 1
        assert sequence[start + 1 :] == response_ids
        assert len(sequence) - 1 - start == len(response_ids)


def test_contract_1_per_token_fields_have_one_row_a_token() -> None:
    prompt = teacher_prompt(PROBLEM, None, text=BYTE, limit=400)
    assert prompt is not None
    kept = np.zeros((2, 3), dtype=np.int64)
    assert question(prompt, student_row((5, 6)), text=BYTE, student_ids=kept).student_ids is kept
    with pytest.raises(DataError, match="got 2 entries, expected 1"):
        question(prompt, student_row((5,)), text=BYTE, student_ids=kept)
    with pytest.raises(DataError, match="0 response ids"):
        student_row(())


@settings(max_examples=60, deadline=None)
@given(response_ids=ids, context=contexts)
@example(response_ids=BYTE.header_ids, context=TeacherContext(feedback="F"))
def test_contract_2_teacher_sequence_is_its_prompt_and_the_identical_response(
    response_ids: tuple[int, ...], context: TeacherContext
) -> None:
    """Also ids that no text would be encoded to: they travel as they were sampled."""
    row = asked(context, student_row(response_ids), limit=10_000)
    assert row.prompt_ids == BYTE.prompt_ids(teacher_messages(PROBLEM, context))
    assert row.response_ids == response_ids


@pytest.mark.parametrize("limit", [400, 240])
def test_contract_4_context_stands_in_the_users_turn_before_one_header(limit: int) -> None:
    """What was put in precedes the end of the last user turn, whole or cut; after that only the header comes."""
    problem = replace(PROBLEM, privileged=f"first {'p' * 90} last")
    told = replace(PROBLEM, privileged=None)
    for context in (
        privileged_context(problem, spec=OpsdSpec(prompt="reason_first")),
        TeacherContext(demonstration=f"first {'d' * 200} last"),
        TeacherContext(feedback=f"first {'f' * 200} last"),
    ):
        prompt = teacher_prompt(told, context, text=BYTE, limit=limit)
        assert prompt is not None
        assert prompt.is_cut == (limit == 240)
        before, user, header = prompt.text.split(START)[1:]
        assert before == f"system\nBe brief.{END}\n"
        assert user.startswith("user\nSpell sun backward.\n\n")
        assert "first " in user
        assert " last\n\n" in user
        assert user.endswith(f"\n\nNow solve the original problem correctly.{END}\n")
        assert header == "assistant\n"
        asked_row = question(prompt, student_row((5,)), text=BYTE).row
        size = len(BYTE.header_ids)
        assert asked_row.prompt_ids[-size:] == student_row((5,)).prompt_ids[-size:] == BYTE.header_ids


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_contract_4_prompts_with_another_header_are_refused(side: str) -> None:
    """A prompt cut on the right, or rendered by hand, has lost the header."""
    prompt = teacher_prompt(PROBLEM, TeacherContext(feedback="F"), text=BYTE, limit=400)
    assert prompt is not None
    row = student_row((5, 6))
    if side == "student":
        row = replace(row, prompt_ids=row.prompt_ids[:-1])
    else:
        prompt = replace(prompt, ids=prompt.ids[:-1])
    with pytest.raises(DataError, match=f"question: got a {side} prompt that ends with ids"):
        question(prompt, row, text=BYTE)


def test_contract_4_is_not_taken_on_trust_where_a_template_has_no_header() -> None:
    """Then nothing shows that both prompts open the same turn: refused."""
    text = build_tokenizer(TokenizerSpec(kind="byte"), texts=())
    text.header_ids = ()
    prompt = teacher_prompt(PROBLEM, None, text=text, limit=400)
    assert prompt is not None
    with pytest.raises(DataError, match=r"expected the header \[\]"):
        question(prompt, student_row((5,)), text=text)


def test_a_plain_request_is_the_students_row_whatever_the_sample_carries() -> None:
    """OPD asks with context None: feedback, successful siblings and privileged text of the sample change nothing."""
    rich = replace(PROBLEM, privileged="SECRET")
    members = [make_member((5, 6), feedback="SECRET"), make_member((7,), score=1.0, text="SECRET")]
    spec = SdpoSpec(teacher=TeacherSpec(schedule="static"))
    assert route(members, spec=spec, generator=np.random.default_rng)[0] is not None
    assert privileged_context(rich, spec=OpsdSpec()) is not None
    for member in members:
        student = TokenRow(prompt_ids=BYTE.prompt_ids(rich.prompt), response_ids=member.rollout.response_ids)
        prompt = teacher_prompt(rich, None, text=BYTE, limit=400)
        assert prompt == TeacherPrompt(text=BYTE.render(PROBLEM.prompt), ids=student.prompt_ids, is_cut=False)
        assert question(prompt, student, text=BYTE).row == student
