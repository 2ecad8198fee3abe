"""What a scoring request says, and what makes it none. The server's answers to wrong ones: tests/sdpo_core/sglang."""

import base64
from typing import Any

import pytest
import torch

from sdpo_sglang.question import parse

TOKENS = [4, 5, 6, 7]


def make_score(**fields: Any) -> dict[str, Any]:
    ids = base64.b64encode(torch.tensor([[1, 2], [3, 0]], dtype=torch.int32).numpy().tobytes()).decode()
    return {"ids": ids, "k": 2, "start": 1, "temperature": 0.5, "top_k": 3, "best": True, **fields}


def test_parse_reads_rows_of_the_response() -> None:
    question = parse(make_score(), input_ids=TOKENS, vocab=10)
    assert question.ids.tolist() == [[1, 2], [3, 0]]
    assert question.own.tolist() == [6, 7]
    assert (question.temperature, question.top_k, question.best) == (0.5, 3, True)


@pytest.mark.parametrize(
    ("fields", "columns"),
    [
        ({}, 2 + 3 + 1 + 1 + 3),
        ({"best": False}, 2 + 3 + 1),
        ({"best": False, "top_k": 0}, 2 + 3),
        ({"k": 0, "ids": ""}, 0 + 3 + 1 + 3),
        ({"k": 0, "ids": "", "best": False}, 0 + 3),
    ],
)
def test_num_columns(fields: dict[str, Any], columns: int) -> None:
    """Ids; tail, own and entropy; overlap; tail outside of both; best ids."""
    assert parse(make_score(**fields), input_ids=TOKENS, vocab=10).num_columns == columns


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"temperature": True}, "temperature True"),
        ({"k": True}, "k True"),
        ({"start": 1.0}, "start 1.0"),
        ({"top_k": -1}, "top_k -1"),
        ({"best": 1}, "best 1"),
        ({"ids": "@@@@"}, "no base64"),
        ({"start": 3, "k": 0, "ids": ""}, "expected a response after it"),
    ],
)
def test_parse_refuses(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(make_score(**fields), input_ids=TOKENS, vocab=10)


def test_parse_refuses_own_tokens_beyond_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="got id 7, expected 0 to 6"):
        parse(make_score(), input_ids=TOKENS, vocab=7)
