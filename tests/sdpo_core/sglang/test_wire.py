"""Answers are held to their questions: whatever does not fit is refused, with what is wrong."""

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdpo_core.errors import DataError
from sdpo_core.sglang.wire import (
    GenerateRequest,
    ScoreRequest,
    abort_reason,
    generate_body,
    read_generated,
    read_scores,
    score_body,
)

GENERATE = GenerateRequest(prompt_ids=(1, 2, 3), seed=5, temperature=0.7, max_new_tokens=3, end_id=9, stop=("U",))
IDS = np.array([[4, 5], [6, 4]])
SCORE = ScoreRequest(prompt_ids=(1, 2, 3), response_ids=(4, 8), temperature=1.0, ids=IDS, top_k=2, best=True)
# Masses by hand: 1/2 + 1/4 at the ids and 1/4 outside; 1/8 + 1/8 and 3/4.
COLUMNS = np.log(np.array([[1 / 2, 1 / 4, 1 / 4, 1 / 2], [1 / 8, 1 / 8, 3 / 4, 1 / 4]]))
# Entropy, share of the ids among the two best, mass outside both, the two best.
MORE = np.array([[1.0, 0.5, np.log(1 / 8), np.log(1 / 2), np.log(1 / 8)], [1.5, 0.0, np.log(1 / 2), -1.4, -1.4]])


def generated(ids: list[int], finish: dict[str, Any]) -> Any:
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(ids)],
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "weight_version": "a-1",
            "weight_versions": [{"version": "a-1", "start": 0, "end": len(ids)}],
        },
    }


def packed(values: np.ndarray, ids: np.ndarray) -> dict[str, Any]:
    return {
        "input_top_logprobs_shape": list(values.shape),
        "input_top_logprobs_val_flat_b64": base64.b64encode(values.astype("<f4").tobytes()).decode(),
        "input_top_logprobs_idx_flat_b64": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
    }


def score_ids() -> np.ndarray:
    return np.array([[4, 5, -1, 4, -2, -3, -4, 4, 2], [6, 4, -1, 8, -2, -3, -4, 3, 2]])


def scored(values: np.ndarray | None = None, ids: np.ndarray | None = None) -> Any:
    values = np.concatenate([COLUMNS, MORE], axis=1) if values is None else values
    return {"meta_info": {**packed(values, score_ids() if ids is None else ids), "weight_version": "a-1"}}


def test_body_names_every_number_that_sampling_depends_on() -> None:
    """A model's own settings (top-p, penalties) must not come in by omission."""
    parameters = generate_body(GENERATE)["sampling_params"]
    assert parameters == {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "sampling_seed": 5,
        "stop_token_ids": [9],
        "stop": ["U"],
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }


@pytest.mark.parametrize(
    ("ids", "finish", "kind", "matched"),
    [
        ([7, 8, 6], {"type": "length", "length": 3}, "length", None),
        ([7, 9], {"type": "stop", "matched": 9}, "stop", None),
        ([7, 8, 9], {"type": "stop", "matched": 9}, "stop", None),
        ([7, 8], {"type": "stop", "matched": "U"}, "stop", "U"),
    ],
)
def test_response_is_read(ids: list[int], finish: dict[str, Any], kind: str, matched: str | None) -> None:
    answer = read_generated(GENERATE, generated(ids, finish))
    assert answer is not None
    assert (answer.response_ids, answer.finish, answer.matched) == (tuple(ids), kind, matched)
    assert answer.logps.tolist() == [-0.5 - i for i in range(len(ids))]
    assert (answer.weights, answer.cached_tokens) == ("a-1", 2)


def test_abort_has_a_reason_and_an_answer_has_none() -> None:
    assert abort_reason(generated([7], {"type": "abort", "message": "Aborted"})) == "Aborted"
    assert abort_reason(generated([7], {"type": "length", "length": 1})) is None
    assert abort_reason(scored()) is None


LENGTH = {"type": "length", "length": 3}


@pytest.mark.parametrize(
    ("ids", "finish"),
    [
        ([7, 8], LENGTH),  # shorter than asked for, and nothing says why
        ([7, 8, 6, 5], LENGTH),
        ([7, 8, 9], LENGTH),  # ends with the end token
        ([9, 8, 9], {"type": "stop", "matched": 9}),  # goes on after the end token
        ([7, 8], {"type": "stop", "matched": 8}),  # stops at another token
        ([7, 9], {"type": "stop", "matched": 8}),
        ([7, 9], {"type": "stop", "matched": "V"}),
        ([7, 9], {"type": "stop", "matched": "NaN happened"}),
        ([7, 9], {"type": "finished"}),
        ([7, 8, 6, 9], {"type": "stop", "matched": 9}),
    ],
)
def test_finish_that_the_ids_deny_is_refused(ids: list[int], finish: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="got finish"):
        read_generated(GENERATE, generated(ids, finish))


def _short(answer: Any) -> None:
    answer["meta_info"]["output_token_logprobs"].pop()


def _other(answer: Any) -> None:
    answer["output_ids"][0] = 4


def _count(answer: Any) -> None:
    answer["meta_info"]["completion_tokens"] = 2


def _nan(answer: Any) -> None:
    answer["meta_info"]["output_token_logprobs"][1][0] = float("nan")


def _positive(answer: Any) -> None:
    answer["meta_info"]["output_token_logprobs"][1][0] = 0.1


def _null(answer: Any) -> None:
    answer["meta_info"]["output_token_logprobs"][1][0] = None


def _no_ids(answer: Any) -> None:
    del answer["output_ids"]


def _no_finish(answer: Any) -> None:
    answer["meta_info"]["finish_reason"] = None


def _no_meta(answer: Any) -> None:
    del answer["meta_info"]


def _mixed(answer: Any) -> None:
    answer["meta_info"]["weight_versions"].insert(0, {"version": "a-0", "start": 0, "end": 1})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_short, "3 ids, log-probabilities of 2"),
        (_other, "expected the same ids in all three"),
        (_count, "2 tokens counted"),
        (_nan, "no numbers"),
        (_positive, "above 0"),
        (_null, "no ids with log-probabilities"),
        (_no_ids, "no ids with log-probabilities"),
        (_no_finish, "finish reason None"),
        (_no_meta, "expected an answer with meta_info"),
        (_mixed, "tokens of several weights"),
    ],
)
def test_damaged_response_is_refused(damage: Callable[[Any], None], reason: str) -> None:
    answer = generated([7, 8, 6], LENGTH)
    read_generated(GENERATE, copy.deepcopy(answer))
    damage(answer)
    with pytest.raises(DataError, match=reason):
        read_generated(GENERATE, answer)


def test_score_body_asks_from_the_last_prompt_token_on() -> None:
    body = score_body(SCORE)
    assert (body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]) == ([1, 2, 3, 4, 8], 2, 9)
    assert np.frombuffer(
        base64.b64decode(body["sampling_params"]["custom_params"]["score"]["ids"]), "<i4"
    ).tolist() == [
        4,
        5,
        6,
        4,
    ]
    assert json.loads(json.dumps(body)) == body


def test_scores_are_read_by_column() -> None:
    answer = read_scores(SCORE, scored())
    np.testing.assert_allclose(answer.table, COLUMNS[:, :2], rtol=1e-6)
    np.testing.assert_allclose(answer.tails, COLUMNS[:, 2], rtol=1e-6)
    np.testing.assert_allclose(answer.logps, COLUMNS[:, 3], rtol=1e-6)
    assert answer.overlap is not None
    assert answer.best_ids is not None
    assert answer.best_table is not None
    assert answer.best_tails is not None
    assert (answer.entropies.tolist(), answer.overlap.tolist()) == ([1.0, 1.5], [0.5, 0.0])
    np.testing.assert_allclose(answer.best_tails, MORE[:, 2], rtol=1e-6)
    assert answer.best_ids.tolist() == [[4, 2], [3, 2]]
    np.testing.assert_allclose(answer.best_table, MORE[:, 3:], rtol=1e-6)


def test_scores_without_ids_are_those_of_the_response() -> None:
    request = ScoreRequest(prompt_ids=(1,), response_ids=(4,), temperature=1.0)
    answer = read_scores(request, scored(np.array([[0.0, -2.0, 3.0]]), np.array([[-1, 4, -2]])))
    assert (answer.logps.tolist(), answer.entropies.tolist(), answer.table.shape) == ([-2.0], [3.0], (1, 0))
    assert (answer.overlap, answer.best_ids, answer.best_table, answer.best_tails) == (None,) * 4


@pytest.mark.parametrize("column", range(7))
def test_scores_at_other_ids_are_refused(column: int) -> None:
    """A server without the hooks answers with its own best ids, in as many columns."""
    ids = score_ids()
    ids[1, column] += 1
    with pytest.raises(DataError, match="scores at other ids than were asked for"):
        read_scores(SCORE, scored(ids=ids))


@pytest.mark.parametrize("column", range(9))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(column: int, value: float) -> None:
    values = np.concatenate([COLUMNS, MORE], axis=1)
    values[1, column] = value
    with pytest.raises(DataError, match=r"no numbers|negative entropy"):
        read_scores(SCORE, scored(values))


@pytest.mark.parametrize(
    ("row", "column", "value", "reason"),
    [
        (0, 0, -2.0, "mass 0.6353 to 1.0000"),
        (0, 2, -np.inf, "mass 0.7500"),
        (1, 3, -np.inf, "no numbers"),
        (1, 4, -0.1, "negative entropy"),
    ],
)
def test_mass_that_is_lost_is_refused(row: int, column: int, value: float, reason: str) -> None:
    values = np.concatenate([COLUMNS, MORE], axis=1)
    values[row, column] = value
    with pytest.raises(DataError, match=reason):
        read_scores(SCORE, scored(values))


def test_row_that_repeats_an_id_has_no_mass_to_check() -> None:
    request = ScoreRequest(prompt_ids=(1,), response_ids=(4,), temperature=1.0, ids=np.array([[4, 4]]))
    values = np.log(np.array([[0.75, 0.75, 0.25, 0.75, np.e]]))
    assert read_scores(request, scored(values, np.array([[4, 4, -1, 4, -2]]))).table.shape == (1, 2)


def test_best_ids_that_repeat_are_refused() -> None:
    ids = score_ids()
    ids[0, 8] = 4
    with pytest.raises(DataError, match="the same best id twice"):
        read_scores(SCORE, scored(ids=ids))


@pytest.mark.parametrize("change", [{"input_top_logprobs_shape": [3, 9]}, {"input_top_logprobs_val_flat_b64": "?"}])
def test_scores_without_a_table_are_refused(change: dict[str, Any]) -> None:
    answer = scored()
    answer["meta_info"] |= change
    with pytest.raises(DataError, match="no table of scores"):
        read_scores(SCORE, answer)


def test_scores_of_fewer_rows_are_refused() -> None:
    values = np.concatenate([COLUMNS, MORE], axis=1)[:1]
    with pytest.raises(DataError, match=r"shape \[1, 9\], expected \[2, 9\]"):
        read_scores(SCORE, scored(values, score_ids()[:1]))


@pytest.mark.parametrize(
    "change",
    [{"prompt_ids": ()}, {"max_new_tokens": 0}, {"temperature": 0.0}, {"temperature": float("inf")}, {"seed": 2**63}],
)
def test_request_that_cannot_be_sampled_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"prompt_ids": (1,), "seed": 0, "temperature": 1.0, "max_new_tokens": 1, "end_id": 2}
    GenerateRequest(**fields)
    with pytest.raises(DataError, match="GenerateRequest: got"):
        GenerateRequest(**{**fields, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"response_ids": ()},
        {"prompt_ids": ()},
        {"temperature": 0.0},
        {"ids": np.zeros((1, 2), dtype=np.int64)},
        {"top_k": -1},
        {"best": True},
    ],
)
def test_response_that_cannot_be_scored_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"prompt_ids": (1,), "response_ids": (2, 3), "temperature": 1.0}
    ScoreRequest(**fields)
    with pytest.raises(DataError, match="ScoreRequest: got"):
        ScoreRequest(**{**fields, **change})
