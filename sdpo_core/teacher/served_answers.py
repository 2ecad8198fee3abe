"""A teacher's question as a request to an SGLang server, and the server's answer as the scores of that question.

What comes out equals the answer of `ModelScorer`: the same ids in the same order, the tail last, -1 in empty cells.
"""

import numpy as np
from jaxtyping import Float, Int

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import TeacherQuestion, TeacherScores
from sdpo_core.errors import DataError, SpecError
from sdpo_core.sglang.wire import ScoreAnswer, ScoreRequest, score_body


def score_request(
    question: TeacherQuestion, *, support: Support | None, top_k: int, temperature: float, vocab: int
) -> ScoreRequest:
    """What to ask for a question's support.

    Raises:
        SpecError: the question lacks the student's ids.
        DataError: they are no support of the vocabulary, or what would travel is not prompt and response.
    """
    is_asked = support in ("student", "union")
    request = ScoreRequest(
        prompt_ids=question.row.prompt_ids,
        response_ids=question.row.response_ids,
        temperature=temperature,
        ids=_student_ids(question, support=support, top_k=top_k, vocab=vocab) if is_asked else None,
        top_k=top_k if support is not None else 0,
        best=support in ("teacher", "union"),
    )
    _check_place(question, request)
    return request


def teacher_scores(question: TeacherQuestion, answer: ScoreAnswer, *, support: Support | None) -> TeacherScores:
    """The columns of an answer, float32."""
    # Copies: an answer's columns are parts of one table that nobody may write to.
    logps, entropies = answer.logps.copy(), answer.entropies.copy()
    if support is None:
        return TeacherScores(logps=logps, entropies=entropies)
    ids, values, tails = _cells(question, answer, support=support)
    return TeacherScores(
        logps=logps,
        entropies=entropies,
        support_ids=ids,
        table=np.concatenate([values, tails[:, None]], axis=1),
        overlap=None if answer.overlap is None else answer.overlap.copy(),
    )


def union_cells(
    ids: Int[np.ndarray, "token both"], logps: Float[np.ndarray, "token both"]
) -> tuple[Int[np.ndarray, "token both"], Float[np.ndarray, "token both"]]:
    """Each id of a row once, ascending, with its log-probability; then -1 with -inf (as `scorer.union_ids`)."""
    last = np.iinfo(ids.dtype).max
    for _ in range(2):
        order = ids.argsort(axis=1, kind="stable")
        ids, logps = np.take_along_axis(ids, order, axis=1), np.take_along_axis(logps, order, axis=1)
        # Doubles go behind every id.
        ids[:, 1:] = np.where(ids[:, 1:] == ids[:, :-1], last, ids[:, 1:])
    return np.where(ids == last, -1, ids), np.where(ids == last, -np.inf, logps).astype(logps.dtype)


def _cells(
    question: TeacherQuestion, answer: ScoreAnswer, *, support: Support
) -> tuple[Int[np.ndarray, "token k"], Float[np.ndarray, "token k"], Float[np.ndarray, " token"]]:
    """Ids and log-probabilities of the cells of a support, and the tail outside them."""
    if support == "student":
        assert question.student_ids is not None
        return question.student_ids, answer.table, answer.tails
    assert answer.best_ids is not None
    assert answer.best_table is not None
    assert answer.best_tails is not None
    best = answer.best_ids.astype(np.int64)
    if support == "teacher":
        return best, answer.best_table, answer.best_tails
    assert question.student_ids is not None
    both = np.concatenate([question.student_ids, best], axis=1)
    return *union_cells(both, np.concatenate([answer.table, answer.best_table], axis=1)), answer.best_tails


def _student_ids(
    question: TeacherQuestion, *, support: Support | None, top_k: int, vocab: int
) -> Int[np.ndarray, "token k"]:
    """The ids a question brings: distinct ones of the vocabulary, as many as are the teacher's part."""
    ids = question.student_ids
    if ids is None:
        raise SpecError(
            f"served teacher: got a question without the student's ids for support {support!r}, expected them in each. "
            "Ask the student first."
        )
    ordered = np.sort(ids, axis=1)
    if ids.shape[1] != top_k or ids.min() < 0 or ids.max() >= vocab or (ordered[:, 1:] == ordered[:, :-1]).any():
        raise DataError(
            f"served teacher: got {ids.shape[1]} ids a token between {ids.min()} and {ids.max()}, expected {top_k} "
            f"different ones from 0 to {vocab - 1}. Check that student and teacher share one tokenizer."
        )
    return ids


def _check_place(question: TeacherQuestion, request: ScoreRequest) -> None:
    """Raise DataError unless what travels ends in the response, and its scores start at the position before it."""
    body, row = score_body(request), question.row
    start, sent = body["logprob_start_len"], body["input_ids"]
    if start != len(row.prompt_ids) - 1 or tuple(sent[start + 1 :]) != row.response_ids:
        raise DataError(
            f"served teacher: got a request whose scores start at {start} of {len(sent)} ids, expected them at "
            f"{len(row.prompt_ids) - 1}, and the response from there on."
        )
