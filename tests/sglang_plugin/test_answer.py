"""Columns of an answer by hand, and in cases that no model of a test shows: ties, padding, NaN, parts of a question.

Against Hugging Face, through a real server: tests/sdpo_core/sglang/test_scoring.py.
"""

import math

import pytest
import torch

from sdpo_sglang.answer import ROWS, best_ids, score_rows
from sdpo_sglang.question import Question


def make_question(
    ids: list[list[int]], own: list[int], *, temperature: float = 1.0, top_k: int = 0, best: bool = False
) -> Question:
    table = torch.tensor(ids, dtype=torch.int64).reshape(len(own), -1)
    return Question(ids=table, own=torch.tensor(own), temperature=temperature, top_k=top_k, best=best)


def test_columns_by_hand() -> None:
    """Masses 1/2, 1/4, 1/8, 1/8 of the four ids; two ids that the tokenizer does not have would hold most of it."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 2.0, 99.0, 99.0]]).log()
    question = make_question([[1, 3]], [2], top_k=2, best=True)
    values, ids = score_rows(logits, question, first=0, vocab=4)
    assert ids.tolist() == [[1, 3, -1, 2, -2, -3, -4, 0, 1]]
    half, quarter, eighth = -math.log(2), -math.log(4), -math.log(8)
    # Outside 1 and 3: 1/2 + 1/8. Best two: 0 and 1, of the given ids one. Outside 0, 1 and 3: 1/8.
    entropy = math.log(2) / 2 + math.log(4) / 4 + 2 * math.log(8) / 8
    wanted = [quarter, eighth, math.log(5 / 8), eighth, entropy, 0.5, eighth, half, quarter]
    assert values[0].tolist() == pytest.approx(wanted, abs=1e-6)


def test_overlap_is_a_share_of_the_ids_that_were_given() -> None:
    """Of two given ids one is among the best three; of their first one, none is the best."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    shares = [score_rows(logits, make_question([[1, 3]], [0], top_k=k), first=0, vocab=4)[0][0, -1] for k in (3, 1)]
    assert [float(share) for share in shares] == [0.5, 0.0]


def test_temperature_divides_the_logits() -> None:
    """Squares of 3 and 1 at temperature 1/2: masses 9/10 and 1/10."""
    values, _ = score_rows(
        torch.tensor([[3.0, 1.0]]).log(), make_question([[0]], [1], temperature=0.5), first=0, vocab=2
    )
    assert values[0].tolist() == pytest.approx(
        [math.log(0.9), math.log(0.1), math.log(0.1), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)], abs=1e-6
    )


def test_tail_of_nothing_is_minus_infinity() -> None:
    values, _ = score_rows(torch.zeros(1, 2), make_question([[1, 0]], [0]), first=0, vocab=2)
    assert values[0, 2] == -math.inf


def test_small_tail_keeps_its_size() -> None:
    """1 minus the mass inside would be 0 in float32."""
    values, _ = score_rows(torch.tensor([[0.0, -30.0]]), make_question([[0]], [0]), first=0, vocab=2)
    assert values[0, 1].item() == pytest.approx(-30.0, abs=1e-4)


def test_ids_without_mass_add_nothing() -> None:
    values, _ = score_rows(torch.tensor([[0.0, -math.inf]]), make_question([[1]], [0]), first=0, vocab=2)
    assert values[0].tolist() == [-math.inf, 0.0, 0.0, 0.0]


def test_a_shift_of_a_row_changes_nothing() -> None:
    """SGLang hands over logits or log-probabilities, by its settings."""
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    question = make_question([[1, 2, 3]] * 5, [4] * 5, temperature=0.7, top_k=4, best=True)
    values, ids = score_rows(logits, question, first=0, vocab=30)
    shifted, shifted_ids = score_rows(logits.log_softmax(dim=1), question, first=0, vocab=30)
    assert torch.allclose(values, shifted, atol=1e-5)
    assert torch.equal(ids, shifted_ids)


def test_parts_of_a_question_are_the_whole() -> None:
    """Rows beyond those held at once, cut anywhere; SGLang's last row is dropped by it."""
    generator = torch.Generator().manual_seed(1)
    rows = 2 * ROWS + 3
    logits = torch.randn(rows + 1, 20, generator=generator)
    given = torch.randint(0, 20, (rows, 2), generator=generator).tolist()
    question = make_question(given, torch.randint(0, 20, (rows,), generator=generator).tolist(), top_k=5)
    values, ids = score_rows(logits, question, first=0, vocab=20)
    assert ids[:-1, :2].tolist() == given
    for row in (0, 1, ROWS - 1, ROWS, rows - 1):
        alone = make_question([given[row]], [int(question.own[row])], top_k=5)
        assert torch.equal(score_rows(logits[row : row + 1], alone, first=0, vocab=20)[0][0], values[row])
    parts = [score_rows(logits[a:b], question, first=a, vocab=20)[0] for a, b in ((0, 7), (7, 200), (200, rows + 1))]
    assert torch.equal(torch.cat(parts), values)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (2, 3)])
def test_rows_outside_the_question_are_an_error(first: int, count: int) -> None:
    """They would be scored at the ids of other rows."""
    with pytest.raises(RuntimeError, match="score_rows: got rows"):
        score_rows(torch.zeros(count, 4), make_question([[0]] * 3, [0] * 3), first=first, vocab=4)


def test_best_ids_of_equal_logits_are_the_lowest() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    assert best_ids(logits, k=3).tolist() == [[1, 3, 0], [0, 1, 2], [4, 3, 2]]


def test_best_ids_equal_a_sort_also_in_bfloat16() -> None:
    """Ties are common in bfloat16."""
    logits = torch.randn(50, 400, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    wanted = [sorted(range(400), key=lambda token: (-row[token], token))[:30] for row in logits.tolist()]
    assert best_ids(logits, k=30).tolist() == wanted


def test_nan_stays_nan_and_ends_nothing() -> None:
    """An exception would end the server; whoever asked sees the NaN."""
    logits = torch.tensor([[0.0, math.nan, 1.0]])
    values, _ = score_rows(logits, make_question([[0]], [2], top_k=2, best=True), first=0, vocab=3)
    assert values[0, :4].isnan().all()
