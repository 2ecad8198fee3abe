"""What all policy-gradient algorithms share: credit of each token, KL terms beside it, mini-batches.

An algorithm of the family is two choices: how scores become advantages (a `Credit`) and which surrogate they are
trained with. Distillation and the anchor are terms of their own: they enter after the advantages are whitened, so that
their coefficient means the same whatever the rewards are, and each token keeps its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.algorithm_specs import PolicySpec, SampledTermSpec
from sdpo_core.algorithms.base import Batch, StepTools, minibatches, row_weights, token_row
from sdpo_core.algorithms.distillation import (
    Answers,
    ask,
    check_answer,
    follow,
    present,
    sampled_kl,
    student_width,
    update_metrics,
)
from sdpo_core.algorithms.objective import DivergenceTerm, PolicyTerm, SampledKlTerm, Surrogate, Term, TermSum, summed
from sdpo_core.backends.base import (
    RowScores,
    TeacherFailure,
    TeacherQuestion,
    TeacherScores,
    TokenRow,
    TrainRow,
    UpdateStats,
)
from sdpo_core.errors import CellError, DataError
from sdpo_core.objectives.advantages import discounted_returns
from sdpo_core.objectives.kl_terms import kl_estimates
from sdpo_core.records import Group, Problem
from sdpo_core.teacher.request import question, teacher_prompt

# Truncation of the divergence's importance weight in an arm whose surrogate has clips of its own.
_IMPORTANCE_CLIP = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Credited:
    """Advantages [token] of a step's rollouts, flattened in order; `returns` where a value head is trained.

    `task_advantages` is one number a rollout: the sign that sign-dependent surrogates go by.
    """

    advantages: Float[Tensor, " token"]
    task_advantages: Float[Tensor, " rollout"]
    returns: Float[Tensor, " token"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """What a step's rollouts earned: scores, lengths, and the values of the value head where there is one."""

    scores: Float[Tensor, "group rollout"]
    lengths: Sequence[int]
    values: Float[Tensor, " token"] | None = None


Credit = Callable[[Rewards], Credited]


class PolicyGradient:
    """A policy-gradient algorithm. Groups whose scores are all equal stay in the denominator."""

    def __init__(self, spec: PolicySpec, *, credit: Credit, surrogate: Surrogate, terms: tuple[Term, ...] = ()) -> None:
        self._spec = spec
        self._credit = credit
        self._surrogate = surrogate
        self._terms = terms

    def check_problems(self, problems: Sequence[Problem]) -> None:
        return None

    def accepts(self, group: Group, *, tools: StepTools) -> bool:
        return True

    def build(self, groups: Sequence[Group], *, num_rejected: int, tools: StepTools) -> Batch:
        members = [member for group in groups for member in group.members]
        rows = [token_row(member) for member in members]
        lengths = [len(row.response_ids) for row in rows]
        scores = self._student_scores(rows, tools=tools)
        answers = self._teacher_answers(groups, rows, scores, tools=tools)
        anchor = _anchor_logps(rows, tools=tools)
        credited = self._credited(Rewards(scores=score_table(groups), lengths=lengths, values=_values(scores)))
        advantages = self._advantages(credited, lengths, scores=scores, answers=answers, anchor=anchor)
        weights = self._weights(lengths, answers=answers)
        carries_scores = self._spec.opd is not None and self._spec.opd.placement == "loss"
        trained = []
        for i, (own, returns) in enumerate(
            zip(_parts(advantages, lengths), _parts(credited.returns, lengths), strict=True)
        ):
            row = TrainRow(
                row=rows[i],
                weight=weights[i][0],
                distill_weight=weights[i][1],
                advantages=own,
                task_advantage=float(credited.task_advantages[i]),
                sampling_logps=np.array(members[i].rollout.sampling_logps, dtype=np.float32),
                old_logps=scores[i].logps if scores is not None and self._spec.minibatches > 1 else None,
                anchor_logps=None if anchor is None else anchor[i],
                old_values=None if scores is None else scores[i].values,
                returns=returns,
            )
            trained.append(with_teacher(row, answers.scores[i]) if answers is not None and carries_scores else row)
        return Batch(
            minibatches=minibatches(trained, spec=self._spec),
            objective=self._objective(),
            metrics=self._metrics(scores, answers=answers, anchor=anchor),
        )

    def after_update(self, updates: Sequence[UpdateStats], *, tools: StepTools) -> Mapping[str, float | None]:
        metrics = update_metrics(summed([update.sums for update in updates]), tools=tools)
        if tools.anchor is not None:
            metrics["cost/peak_memory_bytes/anchor"] = float(tools.anchor.peak_memory_bytes())
        return metrics | follow(was_updated=bool(updates), tools=tools)

    def _credited(self, rewards: Rewards) -> Credited:
        """What the task gives; nothing, its sign included, where distillation stands alone."""
        credited = self._credit(rewards)
        if self._spec.opd is None or not self._spec.opd.only:
            return credited
        return replace(
            credited,
            advantages=torch.zeros_like(credited.advantages),
            task_advantages=torch.zeros_like(credited.task_advantages),
        )

    def _student_scores(self, rows: Sequence[TokenRow], *, tools: StepTools) -> tuple[RowScores, ...] | None:
        """What the policy says before the first update; None where nobody asks and the policy is the old one itself."""
        is_asked = self._spec.opd is not None or self._spec.anchor is not None or "value" in tools.spec.traits
        if not is_asked and self._spec.minibatches == 1:
            return None
        divergence = None if self._spec.opd is None else self._spec.opd.divergence
        with tools.phases.phase("teacher"):
            return tools.student.score(rows, top_k=student_width(divergence))

    def _teacher_answers(
        self,
        groups: Sequence[Group],
        rows: Sequence[TokenRow],
        scores: Sequence[RowScores] | None,
        *,
        tools: StepTools,
    ) -> Answers | None:
        """The teacher under the plain prompt, whatever else the rollouts carry."""
        opd = self._spec.opd
        if opd is None:
            return None
        assert scores is not None
        limit = tools.spec.training.max_prompt_tokens
        prompts = []
        for group in groups:
            prompt = teacher_prompt(group.problem, None, text=tools.text, limit=limit)
            if prompt is None:
                raise DataError(
                    f"{group.problem.id}: got a prompt of more than {limit} tokens. Raise max_prompt_tokens."
                )
            prompts += [prompt] * len(group.members)
        has_ids = student_width(opd.divergence) > 0
        questions = [
            question(prompt, row, text=tools.text, student_ids=own.support_ids if has_ids else None)
            for prompt, row, own in zip(prompts, rows, scores, strict=True)
        ]
        return ask(questions, divergence=opd.divergence, tools=tools)

    def _advantages(
        self,
        credited: Credited,
        lengths: Sequence[int],
        *,
        scores: Sequence[RowScores] | None,
        answers: Answers | None,
        anchor: Sequence[np.ndarray] | None,
    ) -> Float[Tensor, " token"]:
        """The task's advantages, then the terms whose place is the advantage."""
        opd, spec = self._spec.opd, self._spec
        advantages = credited.advantages
        if opd is not None and opd.placement == "advantage":
            assert scores is not None
            assert answers is not None
            # A rollout the teacher failed on has no term, not the student's own scores in its place.
            gaps = [
                np.zeros_like(s.logps) if t is None else s.logps - t.logps
                for s, t in zip(scores, answers.scores, strict=True)
            ]
            advantages = advantages - _penalty(opd, gaps, lengths)
        if spec.anchor is not None and spec.anchor.placement == "advantage":
            assert scores is not None
            assert anchor is not None
            gaps = [s.logps - a for s, a in zip(scores, anchor, strict=True)]
            advantages = advantages - _penalty(spec.anchor, gaps, lengths)
        return advantages

    def _weights(self, lengths: Sequence[int], *, answers: Answers | None) -> list[tuple[float, float]]:
        """Of each rollout, the weights of the policy's and of the distillation's term."""
        opd = self._spec.opd
        everyone = [True] * len(lengths)
        if opd is None or answers is None:
            return [(weight, 0.0) for weight in row_weights(lengths, everyone, spec=self._spec)]
        answered = [scores is not None for scores in answers.scores]
        # Without a task there is nothing to learn from a rollout that the teacher failed on.
        policy = row_weights(lengths, answered if opd.only else everyone, spec=self._spec)
        if opd.placement == "advantage":
            return [(weight, 0.0) for weight in policy]
        return list(zip(policy, row_weights(lengths, answered, spec=self._spec), strict=True))

    def _objective(self) -> TermSum:
        spec, opd = self._spec, self._spec.opd
        terms: list[Term] = []
        if opd is None or not opd.only or opd.placement == "advantage":
            terms.append(PolicyTerm(surrogate=self._surrogate, rollout_cap=spec.rollout_cap))
        if spec.anchor is not None and spec.anchor.placement == "loss":
            terms.append(
                SampledKlTerm(coefficient=spec.anchor.coefficient, is_anchor=True, rollout_cap=spec.rollout_cap)
            )
        if opd is not None and opd.placement == "loss" and opd.divergence is None:
            terms.append(SampledKlTerm(coefficient=opd.coefficient, is_anchor=False, rollout_cap=spec.rollout_cap))
        if opd is not None and opd.divergence is not None:
            terms.append(
                DivergenceTerm(
                    spec=opd.divergence,
                    importance_clip=_IMPORTANCE_CLIP,
                    rollout_cap=spec.rollout_cap,
                    coefficient=opd.coefficient,
                )
            )
        return TermSum(terms=(*terms, *self._terms))

    def _metrics(
        self,
        scores: Sequence[RowScores] | None,
        *,
        answers: Answers | None,
        anchor: Sequence[np.ndarray] | None,
    ) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        if answers is not None:
            assert scores is not None
            metrics |= answers.metrics
            if self._spec.opd is not None and self._spec.opd.divergence is None:
                metrics["distill/sampled_kl"] = sampled_kl(scores, answers.scores)
                metrics["distill/tokens"] = float(sum(len(s.logps) for s in answers.scores if s is not None))
        if anchor is not None:
            assert scores is not None
            own, base = (torch.from_numpy(np.concatenate(part)) for part in ([s.logps for s in scores], list(anchor)))
            metrics["drift/kl_to_base"] = float(kl_estimates(own, base).k3.double().mean())
        return metrics


def score_table(groups: Sequence[Group]) -> Float[Tensor, "group rollout"]:
    """Scores of a step's rollouts."""
    return torch.tensor([[member.verdict.score for member in group.members] for group in groups], dtype=torch.float32)


def with_teacher(row: TrainRow, scores: TeacherScores | None) -> TrainRow:
    """The row with the teacher's answer; as it is where the teacher failed."""
    if scores is None:
        return row
    return replace(
        row,
        support_ids=scores.support_ids,
        teacher_logps=scores.table,
        teacher_states=scores.states,
        teacher_own_logps=scores.logps,
    )


def _parts(values: Float[Tensor, " token"] | None, lengths: Sequence[int]) -> list[np.ndarray | None]:
    """Each rollout's part of a flat column."""
    if values is None:
        return [None] * len(lengths)
    return list(np.split(values.numpy(), np.cumsum(lengths)[:-1]))


def _penalty(term: SampledTermSpec, gaps: Sequence[np.ndarray], lengths: Sequence[int]) -> Float[Tensor, " token"]:
    """coefficient x (each token's log-ratio and the later ones', discounted)."""
    flat = torch.from_numpy(np.concatenate(gaps))
    return term.coefficient * discounted_returns(flat, lengths, discount=term.discount)


def _values(scores: Sequence[RowScores] | None) -> Float[Tensor, " token"] | None:
    found = [s.values for s in scores or () if s.values is not None]
    return torch.from_numpy(np.concatenate(found)) if found else None


def _anchor_logps(rows: Sequence[TokenRow], *, tools: StepTools) -> list[np.ndarray] | None:
    """Log-probabilities of the sampled tokens under the base."""
    if tools.spec.anchor is None:
        return None
    anchor = present(tools.anchor)
    with tools.phases.phase("teacher"):
        questions = [TeacherQuestion(row=row) for row in rows]
        answers = anchor.score(questions, support=None, top_k=0)
    if len(answers) == len(questions):
        pairs = zip(questions, answers, strict=True)
        answers = tuple(check_answer(asked, answer, support=None, top_k=0) for asked, answer in pairs)
    failed = [answer.reason for answer in answers if isinstance(answer, TeacherFailure)]
    if failed or len(answers) != len(rows):
        raise CellError(
            f"anchor: got {len(answers) - len(failed)} answers to {len(rows)} questions "
            f"({failed[0] if failed else 'no reason given'}), expected one each. Look at its worker's log."
        )
    return [answer.logps for answer in answers if not isinstance(answer, TeacherFailure)]
