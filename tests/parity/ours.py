"""Our losses of a `Case`, by the objectives that the algorithms train on."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdpo_core.algorithm_specs import DivergenceSpec, OptimizationSpec, Reduction
from sdpo_core.algorithms.base import row_weights
from sdpo_core.algorithms.objective import ClippedSurrogate, DivergenceTerm, PolicyTerm, Surrogate, TermSum
from sdpo_core.backends.base import TokenBatch
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates
from tests.parity.peer import Case

# The peer's rule: of all sequences, those without a teacher context included.
PEER_MEAN: Reduction = "sequence_mean_of_all"
CLIPPED = ClippedSurrogate(clip_low=0.2, clip_high=0.28)


def weights_of(case: Case, active: Sequence[bool], *, reduction: Reduction) -> Tensor:
    """Weight of every response token, in order."""
    weights = row_weights(case.lengths, active, spec=OptimizationSpec(reduction=reduction))
    return torch.tensor(weights, dtype=case.student.dtype).repeat_interleave(torch.tensor(case.lengths))


def read(case: Case, *, temperature: float, divergence: DivergenceSpec | None = None) -> Tables:
    """The tables of every response token; token t is predicted by the position before it."""
    own_ids = case.response_ids[case.mask]
    width = case.response_ids.shape[1]
    student, teacher = (states[:, -width - 1 : -1][case.mask] for states in (case.student, case.teacher))
    heads = [Head(weight=w, temperature=temperature, vocab=len(w)) for w in (case.head, case.teacher_head)]
    request = TableRequest(own_ids=own_ids, entropy=True)
    if divergence is not None:
        full = FullDivergence(alpha=divergence.alpha) if divergence.support == "full" else None
        other = TeacherStates(hidden=teacher, head=heads[1])
        request = TableRequest(own_ids=own_ids, entropy=True, top_k=divergence.top_k or 0, teacher=other, full=full)
    return tables(student, heads[0], request)


def batch_of(
    case: Case, found: Tables, *, reduction: Reduction = PEER_MEAN, policy_reduction: Reduction = PEER_MEAN
) -> TokenBatch:
    """What an objective sees: every sequence has a policy term, the active ones a distillation term."""
    lengths = torch.tensor(case.lengths)
    assert found.entropy is not None
    return TokenBatch(
        logp=found.logp,
        old_logp=found.logp.detach() if case.old_logps is None else case.old_logps[case.mask],
        entropy=found.entropy.detach(),
        weight=weights_of(case, [True] * len(lengths), reduction=policy_reduction),
        distill_weight=weights_of(case, case.active, reduction=reduction),
        sequence=torch.arange(len(lengths)).repeat_interleave(lengths),
        advantage=torch.tensor(case.advantages, dtype=case.student.dtype).repeat_interleave(lengths),
        student_logp=found.support_logp,
        teacher_logp=found.teacher_logp,
        divergence=found.divergence,
    )


def distillation_loss(
    case: Case, spec: DivergenceSpec, *, temperature: float, reduction: Reduction = PEER_MEAN, cap: float = 2.0
) -> Tensor:
    """SDPO's objective."""
    batch = batch_of(case, read(case, temperature=temperature, divergence=spec), reduction=reduction)
    term = DivergenceTerm(spec=spec, importance_clip=cap, rollout_cap=None)
    return TermSum(terms=(term,)).token_losses(batch).loss.sum()


def policy_loss(case: Case, surrogate: Surrogate, *, temperature: float, reduction: Reduction) -> Tensor:
    """The objective of GRPO (`CLIPPED`) and GSPO."""
    batch = batch_of(case, read(case, temperature=temperature), policy_reduction=reduction)
    term = PolicyTerm(surrogate=surrogate, rollout_cap=None)
    return TermSum(terms=(term,)).token_losses(batch).loss.sum()


def teacher_own_logp(case: Case, *, temperature: float) -> Tensor:
    """The teacher's log-probability of every response token."""
    reversed_case = replace(case, student=case.teacher, head=case.teacher_head)
    return read(reversed_case, temperature=temperature).logp
