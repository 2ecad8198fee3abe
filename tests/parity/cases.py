"""Random micro-batches, and how far two losses of one are apart."""

from dataclasses import replace

import torch
from torch import Tensor

from tests.parity.peer import Case

VOCAB, HIDDEN = 13, 6


def make_case(seed: int, *, is_off_policy: bool = False, dtype: torch.dtype = torch.float64) -> Case:
    """Four sequences, prompts of 3 and 5 positions, responses of 1 to 5 tokens; the third has no teacher context."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        student=draw(4, 3 + 5, HIDDEN).requires_grad_(),
        head=draw(VOCAB, HIDDEN).requires_grad_(),
        teacher=draw(4, 5 + 5, HIDDEN),
        teacher_head=draw(VOCAB, HIDDEN),
        response_ids=torch.randint(VOCAB, (4, 5), generator=generator),
        lengths=(5, 2, 4, 1),
        active=(True, True, False, True),
        # Ratios on both sides of 1 and of the cap of 2.
        old_logps=-2.5 + 1.5 * draw(4, 5) if is_off_policy else None,
        advantages=(1.0, -0.5, 0.75, -1.25),
    )


def rows_of(case: Case, rows: slice) -> Case:
    """A part of the sequences; gradients reach the whole case."""
    return replace(
        case,
        student=case.student[rows],
        teacher=case.teacher[rows],
        response_ids=case.response_ids[rows],
        lengths=case.lengths[rows],
        active=case.active[rows],
        old_logps=None if case.old_logps is None else case.old_logps[rows],
        advantages=case.advantages[rows],
    )


def in_float64(case: Case) -> Case:
    """The same numbers, exactly."""
    student, head = (value.detach().double().requires_grad_() for value in (case.student, case.head))
    teacher, teacher_head = case.teacher.double(), case.teacher_head.double()
    old = None if case.old_logps is None else case.old_logps.double()
    return replace(case, student=student, head=head, teacher=teacher, teacher_head=teacher_head, old_logps=old)


def gradient(loss: Tensor, case: Case) -> Tensor:
    """The gradient with respect to the student's states and head, as one vector."""
    parts = torch.autograd.grad(loss, [case.student, case.head], retain_graph=True)
    return torch.cat([part.flatten() for part in parts]).double()


def slope_gap(loss: Tensor, case: Case, target: Tensor, target_case: Case | None = None) -> float:
    """How far the gradient is from that of `target`, relative to the latter's norm."""
    slope = gradient(target, target_case or case)
    assert float(slope.norm()) > 1e-2
    return float((gradient(loss, case) - slope).norm() / slope.norm())


def gap(loss: Tensor, case: Case, target: Tensor, target_case: Case | None = None) -> float:
    """The larger of `slope_gap` and the difference of the values, on the same scale."""
    scale = float(gradient(target, target_case or case).norm())
    return max(slope_gap(loss, case, target, target_case), abs(loss.item() - target.item()) / scale)
