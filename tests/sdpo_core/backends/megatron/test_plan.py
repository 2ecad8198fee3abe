"""The schedule of a forward: planned from the lengths of the rows it is given, as many micro-batches on every rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="needs the extra 'megatron'")

from sdpo_core.backends.base import TeacherQuestion, TokenRow
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.layout import LayoutSpec
from tests.sdpo_core.backends.megatron.processes import run_in_processes
from tests.sdpo_core.backends.megatron.tiny import VOCAB, qwen3_config, tiny_model

pytestmark = pytest.mark.megatron

BUDGET = 64
# Of the student's rows and of the teacher's, which read the same responses under longer prompts.
PROMPTS = {"student": (4,) * 7, "teacher": (4, 40, 9, 90, 22, 13, 30)}
RESPONSES = (3, 1, 6, 2, 5, 4, 7)


def rows_of(side: str) -> list[TokenRow]:
    return [
        TokenRow(
            prompt_ids=tuple(range(1, prompt + 1)),
            response_ids=tuple((7 * index + place) % VOCAB for place in range(response)),
        )
        for index, (prompt, response) in enumerate(zip(PROMPTS[side], RESPONSES, strict=True))
    ]


def test_contract_23_teacher_is_scheduled_by_its_own_lengths_with_equal_counts(tmp_path: Path) -> None:
    """Two data parallel ranks: no row is left out or scored twice, and both make as many forwards."""
    torch.manual_seed(0)
    tiny_model(qwen3_config()).save_pretrained(tmp_path / "model")
    found = run_in_processes(f"{__name__}:plan_and_score", size=2, folder=tmp_path)
    for side, batches in found["plans"].items():
        lengths = [prompt + response for prompt, response in zip(PROMPTS[side], RESPONSES, strict=True)]
        assert len(batches[0]) == len(batches[1])
        assert sorted(row for rank in batches for batch in rank for row in batch) == list(range(len(lengths)))
        for batch in (batch for rank in batches for batch in rank if len(batch) > 1):
            assert len(batch) * max(lengths[row] for row in batch) <= BUDGET
    student, teacher = ([len(rank) for rank in found["plans"][side]] for side in ("student", "teacher"))
    # 7 student rows of at most 10 tokens fill 2 micro-batches; the teacher's 5 micro-batches come with an empty one.
    assert student == [1, 1]
    assert teacher == [3, 3]
    assert found["is_whole"] == [True, True]


def plan_and_score(folder: Path) -> dict[str, object]:
    """The plans of both ranks, and whether each has the scores of all rows, those of plain forwards."""
    model = MegatronModel(
        folder.parent / "model",
        layout=LayoutSpec(data=2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        valid_vocab=VOCAB,
    )
    own = {side: model.plan(rows_of(side), max_tokens=BUDGET) for side in PROMPTS}
    plans: list[dict[str, list[list[int]]]] = [{}, {}]
    dist.all_gather_object(plans, own)
    scorer = ModelScorer([Part(model=model, share=1.0)], temperature=1.0, max_tokens=BUDGET)
    rows = rows_of("teacher")
    answers = scorer.score([TeacherQuestion(row=row) for row in rows], support=None, top_k=0)
    whole = ModelScorer([Part(model=model, share=1.0)], temperature=1.0, max_tokens=10_000)
    alone = [whole.score([TeacherQuestion(row=row)], support=None, top_k=0)[0] for row in rows]
    is_whole = all(abs(one.logps - other.logps).max() < 1e-5 for one, other in zip(answers, alone, strict=True))
    wholes = [False, False]
    dist.all_gather_object(wholes, is_whole and [len(answer.logps) for answer in answers] == list(RESPONSES))
    return {"plans": {side: [plan[side] for plan in plans] for side in PROMPTS}, "is_whole": wholes}
