"""Questions as requests, answers as scores, without a server: the cells of a union, what is checked before sending."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdpo_core.backends.base import TeacherQuestion, TokenRow
from sdpo_core.backends.scorer import union_ids
from sdpo_core.errors import DataError
from sdpo_core.sglang.wire import score_body
from sdpo_core.teacher import served_answers
from sdpo_core.teacher.served_answers import score_request, union_cells

ROW = TokenRow(prompt_ids=(5, 6, 7), response_ids=(8, 9))
IDS = np.array([[1, 2], [4, 3]])


@given(
    rows=st.integers(1, 4),
    k=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_union_cells_are_those_of_the_trainer(rows: int, k: int, seed: int) -> None:
    """Each id once, ascending, -1 last, each with the log-probability it came with."""
    draw = np.random.default_rng(seed)
    sides = [np.stack([draw.permutation(9)[:k] for _ in range(rows)]) for _ in range(2)]
    both = np.concatenate(sides, axis=1)
    whole = draw.normal(size=(rows, 9)).astype(np.float32)
    ids, logps = union_cells(both, np.take_along_axis(whole, both, axis=1))
    np.testing.assert_array_equal(ids, union_ids(*map(torch.from_numpy, sides)).numpy())
    for t in range(rows):
        expected = [whole[t, id_] if id_ >= 0 else -np.inf for id_ in ids[t]]
        assert logps[t].tolist() == expected


@pytest.mark.parametrize(
    ("support", "width", "top_k", "best"),
    [("student", 2, 2, False), ("teacher", 0, 2, True), ("union", 2, 2, True), (None, 0, 0, False)],
)
def test_a_support_asks_for_its_columns_and_no_others(support: Any, width: int, top_k: int, best: bool) -> None:
    question = TeacherQuestion(row=ROW, student_ids=IDS)
    request = score_request(question, support=support, top_k=top_k, temperature=0.5, vocab=10)
    assert (request.width, request.top_k, request.best, request.temperature) == (width, top_k, best, 0.5)
    assert (request.prompt_ids, request.response_ids) == (ROW.prompt_ids, ROW.response_ids)


@pytest.mark.parametrize(
    "change", [{"logprob_start_len": 1}, {"logprob_start_len": 3}, {"input_ids": [5, 6, 7, 8, 8]}, {"input_ids": [5]}]
)
def test_what_would_be_scored_elsewhere_is_not_sent(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    monkeypatch.setattr(served_answers, "score_body", lambda request: score_body(request) | change)
    with pytest.raises(DataError, match="got a request whose scores start at"):
        score_request(TeacherQuestion(row=ROW), support=None, top_k=0, temperature=1.0, vocab=10)
