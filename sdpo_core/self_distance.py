"""The numerical floor of a cell's divergence: what it says of equal weights on equal prompts."""

from collections.abc import Sequence

import numpy as np
import torch

from sdpo_core import random_streams
from sdpo_core.algorithms.base import Student
from sdpo_core.backends.base import TeacherFailure, TeacherQuestion, TokenRow
from sdpo_core.errors import CellError
from sdpo_core.objectives.divergence import bucket_divergence
from sdpo_core.records import Problem
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import Teacher
from sdpo_core.text import ChatTokenizer

_NUM_PROBLEMS = 4
# Cells of the measurement for arms whose divergence has no support of its own width.
_DEFAULT_TOP_K = 20


def self_distance(
    spec: CellSpec, *, problems: Sequence[Problem], student: Student, teacher: Teacher | None, text: ChatTokenizer
) -> dict[str, float | None]:
    """Mean divergence between student and teacher before the first step, both under the student's prompt.

    Taken at the student's support with the arm's alpha. None (n/a) for a teacher that starts with other weights. Empty
    for arms without a divergence.
    """
    divergence, life = spec.divergence, spec.teacher
    if divergence is None or life is None or teacher is None:
        return {}
    if life.weights != "base":
        return {"distill/self_distance": None}
    training = spec.training
    requests = [
        RolloutRequest(
            prompt_ids=text.prompt_ids(problem.prompt),
            stream_key=random_streams.stream_key(spec.seed, random_streams.SELF_DISTANCE, index),
        )
        for index, problem in enumerate(problems[:_NUM_PROBLEMS])
    ]
    sampling = Sampling(temperature=training.temperature, max_response_tokens=training.max_response_tokens)
    rollouts = student.generate(requests, sampling=sampling)
    rows = [TokenRow(prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids) for rollout in rollouts]
    width = min(divergence.top_k or _DEFAULT_TOP_K, text.vocab_size)
    scores = student.score(rows, top_k=width)
    questions = [TeacherQuestion(row=row, student_ids=s.support_ids) for row, s in zip(rows, scores, strict=True)]
    answers = teacher.score(questions, support="student", top_k=width)
    tables = []
    for score, answer in zip(scores, answers, strict=True):
        if isinstance(answer, TeacherFailure) or answer.table is None or score.table is None:
            reason = answer.reason if isinstance(answer, TeacherFailure) else "no table"
            raise CellError(f"self-distance: got no scores ({reason}), expected a table each. Look at the workers.")
        tables.append((score.table, answer.table))
    own, other = (torch.from_numpy(np.concatenate(side)) for side in zip(*tables, strict=True))
    return {"distill/self_distance": float(bucket_divergence(own, other, alpha=divergence.alpha).double().mean())}
