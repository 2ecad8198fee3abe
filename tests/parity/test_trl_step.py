"""The gradient of one SDPO step on a whole model beside that of TRL's trainer: same weights, prompts and responses.

Beyond the losses this holds prompts padded left against prompts run once and shared, the wire between student and
teacher, and micro-batches. The teacher has weights of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import pad

from sdpo_core.algorithm_specs import DivergenceSpec, OptimizationSpec, SdpoSpec, TeacherSpec
from sdpo_core.algorithms.base import row_weights
from sdpo_core.algorithms.policy_gradient import with_teacher
from sdpo_core.algorithms.sdpo import sdpo
from sdpo_core.backends.base import TeacherQuestion, TokenRow, TrainRow
from sdpo_core.backends.hf import hf_policy
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.specs import OptimizerSpec
from sdpo_core.text import ChatTokenizer
from tests.parity.peer import make_folder, make_trainer

TEMPERATURE, K = 0.7, 5
# Prompt and response lengths; rows 0, 3 and 4 share a prompt, row 2 has no teacher context.
PROMPTS, RESPONSES = (9, 4, 12, 9, 9, 6), (3, 6, 2, 1, 5, 4)
ACTIVE = (True, True, False, True, True, True)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    make_folder(path, seed=2)
    return path


def make_rows(*, context: int) -> list[TokenRow]:
    """The responses after prompts that are longer by `context` tokens."""
    return [
        TokenRow(
            prompt_ids=tuple(40 + (7 * index + prompt) % 50 for index in range(prompt + context)),
            response_ids=tuple(40 + (5 * index + 11 * number) % 60 for index in range(response)),
        )
        for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]


def padded(parts: Sequence[Sequence[int]], *, side: str, value: int | None = None) -> Tensor:
    """Ids, or the mask of their places without `value`, as the peer pads them."""
    rows = [torch.tensor(part) if value is not None else torch.ones(len(part), dtype=torch.long) for part in parts]
    return pad(rows, padding_value=value or 0, padding_side=side)


def peer_gradient(folder: Path, teacher_folder: Path, *, alpha: float) -> dict[str, Tensor]:
    """The gradient of the peer's loss with respect to every weight."""
    trainer = make_trainer(
        folder,
        temperature=TEMPERATURE,
        distillation_mode="topk_logits",
        distillation_topk=K,
        distillation_add_tail=True,
        distillation_alpha=alpha,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.teacher_model = AutoModelForCausalLM.from_pretrained(teacher_folder)
    rows, taught = make_rows(context=0), make_rows(context=7)
    filler = ChatTokenizer.load(folder).pad_id
    prompts, contexts = [row.prompt_ids for row in rows], [row.prompt_ids for row in taught]
    responses = [row.response_ids for row in rows]
    ids, mask = padded(responses, side="right", value=filler), padded(responses, side="right")
    loss = trainer.compute_loss(
        trainer.model,
        {
            "prompt_ids": padded(prompts, side="left", value=filler),
            "prompt_mask": padded(prompts, side="left"),
            "completion_ids": ids,
            "completion_mask": mask,
            "teacher_input_ids": torch.cat([padded(contexts, side="left", value=filler), ids], dim=1),
            "teacher_attention_mask": torch.cat([padded(contexts, side="left"), mask], dim=1),
            "self_distillation_mask": torch.tensor(ACTIVE, dtype=torch.float32),
        },
    )
    loss.backward()
    return {name: parameter.grad for name, parameter in trainer.model.named_parameters()}


def our_gradient(folder: Path, teacher_folder: Path, *, alpha: float, temperature: float) -> dict[str, Tensor]:
    """The gradient of one update."""
    device, vocab = torch.device("cpu"), ChatTokenizer.load(folder).vocab_size
    student, teacher = (
        HfModel(place, dtype=torch.float32, device=device, valid_vocab=vocab) for place in (folder, teacher_folder)
    )
    # A norm that clips nothing: the gradients stay where they are after the update.
    optimizer = OptimizerSpec(learning_rate=1e-3, max_grad_norm=1e9)
    policy = hf_policy(student, optimizer, temperature=temperature, max_tokens=50)
    scorer = ModelScorer([Part(model=teacher, share=1.0)], temperature=temperature, max_tokens=50)
    spec = SdpoSpec(teacher=TeacherSpec(schedule="static"), divergence=DivergenceSpec(alpha=alpha, top_k=K))
    rows = make_rows(context=0)
    scores = policy.score(rows, top_k=K)
    questions = [
        TeacherQuestion(row=row, student_ids=score.support_ids)
        for row, score in zip(make_rows(context=7), scores, strict=True)
    ]
    answers = scorer.score(questions, support="student", top_k=K)
    weights = row_weights(RESPONSES, ACTIVE, spec=OptimizationSpec(reduction="sequence_mean_of_all"))
    trained = [
        with_teacher(TrainRow(row=row, distill_weight=weight), answer)
        for row, weight, answer in zip(rows, weights, answers, strict=True)
        if weight
    ]
    policy.update(trained, sdpo(spec)._objective(), learning_rate=1e-3)
    return {name: parameter.grad for name, parameter in student.model.named_parameters() if parameter.grad is not None}


def apart(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest distance of a weight's gradients, relative to the norm of the whole gradient."""
    assert own.keys() == theirs.keys()
    norm = torch.stack([value.norm() for value in theirs.values()]).norm()
    assert norm > 1e-2
    return max(float((own[name] - theirs[name]).norm() / norm) for name in own)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_step_has_the_peers_gradient(folder: Path, teacher_folder: Path, alpha: float) -> None:
    theirs = peer_gradient(folder, teacher_folder, alpha=alpha)
    own = our_gradient(folder, teacher_folder, alpha=alpha, temperature=TEMPERATURE)
    # float32 on both sides, through two layers; 6e-7 is usual.
    assert apart(own, theirs) <= 1e-5


def test_step_at_another_temperature_has_not(folder: Path, teacher_folder: Path) -> None:
    theirs = peer_gradient(folder, teacher_folder, alpha=0.5)
    assert apart(our_gradient(folder, teacher_folder, alpha=0.5, temperature=1.0), theirs) > 1e-2
