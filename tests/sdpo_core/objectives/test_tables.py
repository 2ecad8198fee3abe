"""Requests that cannot be met, refused by every function that takes one, before anything is projected."""

import pytest
import torch
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, score_tables, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates

FULL = FullDivergence(alpha=0.5)
IDS = torch.tensor([0, 1])
TEACHER = TeacherStates(hidden=torch.zeros(2, 1), head=Head(weight=torch.zeros(4, 1), temperature=1.0, vocab=3))
OTHER = TeacherStates(hidden=torch.zeros(2, 1), head=Head(weight=torch.zeros(4, 1), temperature=1.0, vocab=4))
SHORT = TeacherStates(hidden=torch.zeros(1, 1), head=TEACHER.head)


def loss_of(small: Tables, rows: slice) -> Tensor:
    raise AssertionError(f"read {len(small.logp)} tokens of {rows} before the request was refused")


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (TableRequest(own_ids=IDS, top_k=4), SpecError, "got top_k 4, expected 0 to 3"),
        (TableRequest(own_ids=IDS, top_k=-1), SpecError, "got top_k -1"),
        (TableRequest(own_ids=IDS, full=FULL), SpecError, "a full divergence without a teacher"),
        (TableRequest(own_ids=IDS, teacher=TEACHER), SpecError, "a teacher without a support"),
        (TableRequest(own_ids=IDS, top_k=1, teacher=OTHER), SpecError, "a teacher of 4 ids, expected 3"),
        (TableRequest(own_ids=IDS, top_k=1, teacher=SHORT), DataError, "teacher.hidden: got 1 rows, expected 2"),
        (TableRequest(own_ids=torch.tensor([0])), DataError, "own_ids: got 1 rows, expected 2"),
        (TableRequest(own_ids=torch.tensor([0, 3])), DataError, "own_ids: got an id outside 0 to 2"),
        (TableRequest(own_ids=torch.tensor([-1, 0])), DataError, "own_ids: got an id outside 0 to 2"),
        (TableRequest(own_ids=IDS, support_ids=torch.tensor([[0, 3], [0, 1]])), DataError, "support_ids: got an id"),
        (TableRequest(own_ids=IDS, support_ids=torch.tensor([[0, -2], [0, 1]])), DataError, "outside -1 to 2"),
        (TableRequest(own_ids=IDS, support_ids=torch.tensor([[0, 1], [2, 2]])), DataError, "an id twice"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(request_: TableRequest, error: type[Exception], words: str) -> None:
    head = Head(weight=torch.zeros(4, 1), temperature=1.0, vocab=3)

    for call in (
        lambda: score_tables(torch.zeros(2, 1), head, request_),
        lambda: tables(torch.zeros(2, 1), head, request_),
        lambda: loss_and_gradient(torch.zeros(2, 1), head, request_, loss_of, weight_gradient=None),
    ):
        with pytest.raises(error, match=words):
            call()
