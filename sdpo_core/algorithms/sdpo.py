"""SDPO: the context-conditioned teacher re-scores each response at the student's support; a divergence trains.

Per rollout: route a teacher context, render the teacher prompt, score the same response ids at the student's top-K
ids; per token: divergence of the two (K + 1)-cell tables. Rollouts without context are handled by the named policy:
`error` stops the cell, `drop` leaves them out of numerator and denominator, `poll` draws other problems in the place
of groups without any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdpo_core import random_streams
from sdpo_core.algorithms.base import Batch, StepTools, TeacherNote, deal, token_row
from sdpo_core.backends.base import RowScores, TokenBatch, TokenLosses, TokenRow, TrainRow, UpdateStats
from sdpo_core.errors import CellError, DataError
from sdpo_core.metrics import Trait
from sdpo_core.objectives.divergence import bucket_divergence, tail_share
from sdpo_core.objectives.policy_loss import importance_weight
from sdpo_core.objectives.reduction import token_weights
from sdpo_core.objectives.support import coverage
from sdpo_core.records import Group
from sdpo_core.specs import SdpoSpec
from sdpo_core.teacher.base import Teacher
from sdpo_core.teacher.context import TeacherContext, route, teacher_messages
from sdpo_core.teacher.schedule import commit_rate

# Sums over tokens that become means: metric name to the sum's name in `TokenLosses`.
_TOKEN_MEANS = {
    "distill/divergence": "divergence",
    "distill/kl_reverse": "kl_reverse",
    "distill/kl_forward": "kl_forward",
    "distill/student_coverage": "student_coverage",
    "distill/teacher_coverage": "teacher_coverage",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceObjective:
    """Importance-weighted divergence to the teacher on support and tail (docs/notation.md, "Divergence")."""

    alpha: float
    importance_clip: float

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        student, teacher = batch.student_logp, batch.teacher_logp
        assert student is not None
        assert teacher is not None
        divergence = bucket_divergence(student, teacher, alpha=self.alpha)
        weight = importance_weight(batch.logp, batch.old_logp, cap=self.importance_clip)
        fixed = student.detach()
        shares = tail_share(fixed, teacher, alpha=self.alpha)
        sums = {
            "tokens": float(len(divergence)),
            "divergence": float(divergence.detach().sum()),
            "kl_reverse": float(bucket_divergence(fixed, teacher, alpha=1.0).sum()),
            "kl_forward": float(bucket_divergence(fixed, teacher, alpha=0.0).sum()),
            "student_coverage": float(coverage(fixed).sum()),
            "teacher_coverage": float(coverage(teacher).sum()),
            "tail": float(shares.tail),
            "cells": float(shares.total),
        }
        return TokenLosses(loss=weight * divergence, sums=sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A rollout that has a teacher prompt."""

    group: int
    member: int
    context: TeacherContext
    prompt: str
    student_row: TokenRow
    teacher_row: TokenRow


class Sdpo:
    """Self-distillation with a teacher of its own weights; the reward only decides who may demonstrate."""

    def __init__(self, spec: SdpoSpec) -> None:
        self._spec = spec
        self.traits: frozenset[Trait] = frozenset(
            {"distill"} if commit_rate(spec.teacher) is None else {"distill", "ema"}
        )

    def accepts(self, group: Group, *, tools: StepTools) -> bool:
        if self._spec.no_context != "poll":
            return True
        return bool(self._candidates([group], tools=tools))

    def build(self, groups: Sequence[Group], *, num_rejected: int, tools: StepTools) -> Batch:
        with tools.phases.phase("teacher"):
            candidates = self._candidates(groups, tools=tools)
            scores = tools.student.score([c.student_row for c in candidates], top_k=self._spec.top_k)
        before_teacher = tools.phases.now()
        with tools.phases.phase("teacher"):
            tables = _teacher_tables(candidates, scores, teacher=tools.teacher)
        teacher_seconds = tools.phases.now() - before_teacher
        rollouts = sum(len(group.members) for group in groups)
        trained_groups = {candidate.group for candidate in candidates}
        demos = sum(candidate.context.demonstration is not None for candidate in candidates)
        metrics = {
            "feedback/effective_fraction": len(candidates) / rollouts,
            "feedback/from_demo_fraction": demos / rollouts,
            "feedback/no_context_fraction": 1 - len(candidates) / rollouts,
            "feedback/skipped_prompts": float(num_rejected + len(groups) - len(trained_groups)),
            "cost/teacher_forwards": float(len(candidates)),
            "cost/teacher_seconds": teacher_seconds,
        }
        return Batch(
            minibatches=self._minibatches(candidates, scores, tables),
            objective=DivergenceObjective(alpha=self._spec.alpha, importance_clip=self._spec.importance_clip),
            metrics=metrics,
            notes={
                (c.group, c.member): TeacherNote(teacher_prompt=c.prompt, demonstrator=c.context.demonstrator)
                for c in candidates
            },
        )

    def after_update(self, updates: Sequence[UpdateStats], *, tools: StepTools) -> Mapping[str, float | None]:
        sums: dict[str, float] = {}
        for update in updates:
            for name, value in update.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        tokens = sums.get("tokens", 0.0)
        metrics: dict[str, float | None] = {"distill/tokens": tokens}
        for metric, name in _TOKEN_MEANS.items():
            metrics[metric] = sums[name] / tokens if tokens else None
        metrics["distill/tail_share"] = sums["tail"] / sums["cells"] if sums.get("cells") else None
        metrics["cost/peak_memory_bytes/teacher"] = float(_present(tools.teacher).peak_memory_bytes())
        if "ema" in self.traits:
            start = tools.phases.now()
            with tools.phases.phase("teacher"):
                # A step without an optimizer step has nothing to follow.
                committed = bool(updates) and _present(tools.teacher).follow(tools.student)
            metrics["cost/ema_updates"] = float(committed)
            metrics["cost/ema_seconds"] = tools.phases.now() - start
        return metrics

    def _contexts(self, group: Group, *, tools: StepTools) -> tuple[TeacherContext | None, ...]:
        return route(
            group.members,
            spec=self._spec,
            generator=lambda member: random_streams.stream(
                tools.spec.seed, random_streams.DEMONSTRATION, tools.step, group.position, member
            ),
        )

    def _candidates(self, groups: Sequence[Group], *, tools: StepTools) -> list[_Candidate]:
        candidates = []
        limit = tools.spec.training.max_teacher_prompt_tokens
        for g, group in enumerate(groups):
            for m, context in enumerate(self._contexts(group, tools=tools)):
                if context is None:
                    self._refuse_if_error(group, member=m, why="neither a successful sibling nor feedback")
                    continue
                prompt = tools.text.render(teacher_messages(group.problem, context))
                prompt_ids = tools.text.rendered_ids(prompt)
                if len(prompt_ids) > limit:
                    # Cutting would lose the frame or the demonstration; the rollout counts as without context.
                    self._refuse_if_error(
                        group, member=m, why=f"a teacher prompt of {len(prompt_ids)} > {limit} tokens"
                    )
                    continue
                student_row = token_row(group.members[m])
                candidates.append(
                    _Candidate(
                        group=g,
                        member=m,
                        context=context,
                        prompt=prompt,
                        student_row=student_row,
                        teacher_row=TokenRow(prompt_ids=prompt_ids, response_ids=student_row.response_ids),
                    )
                )
        return candidates

    def _refuse_if_error(self, group: Group, *, member: int, why: str) -> None:
        if self._spec.no_context == "error":
            raise CellError(
                f"sdpo: got {why} for rollout {member} of {group.problem.id}, expected a teacher context under policy "
                "'error'. Choose no_context 'drop' or 'poll' in the arm, or raise max_teacher_prompt_tokens."
            )

    def _minibatches(
        self, candidates: Sequence[_Candidate], scores: Sequence[RowScores], tables: Sequence[np.ndarray]
    ) -> tuple[tuple[TrainRow, ...], ...]:
        minibatches = []
        for hand in deal(len(candidates), self._spec.minibatches):
            lengths = [len(candidates[i].student_row.response_ids) for i in hand]
            weights = token_weights(lengths, [True] * len(hand), reduction=self._spec.reduction)
            minibatches.append(
                tuple(
                    TrainRow(
                        row=candidates[i].student_row,
                        weight=weight,
                        old_logps=scores[i].logps if self._spec.minibatches > 1 else None,
                        support_ids=scores[i].support_ids,
                        teacher_logps=tables[i],
                    )
                    for i, weight in zip(hand, weights, strict=True)
                )
            )
        return tuple(minibatches)


def _teacher_tables(
    candidates: Sequence[_Candidate], scores: Sequence[RowScores], *, teacher: Teacher | None
) -> tuple[np.ndarray, ...]:
    """The teacher's tables, checked row by row: a payload of another shape or with NaN is an error, never a zero."""
    tables = _present(teacher).tables([c.teacher_row for c in candidates], [s.support_ids for s in scores])
    if len(tables) != len(candidates):
        raise DataError(
            f"sdpo: got {len(tables)} tables for {len(candidates)} rows, expected one a row. Look at the teacher's log."
        )
    for candidate, score, table in zip(candidates, scores, tables, strict=True):
        tokens, k = score.support_ids.shape
        if tokens != len(candidate.student_row.response_ids) or table.shape != (tokens, k + 1):
            raise DataError(
                f"sdpo: got a teacher table of shape {table.shape} for {tokens} tokens and k = {k}, expected "
                f"({tokens}, {k + 1}). The teacher must score the same response ids."
            )
        if np.isnan(table).any():
            raise DataError(
                "sdpo: got NaN in the teacher's table, expected log-probabilities. Look at the teacher's weights."
            )
    return tables


def _present(teacher: Teacher | None) -> Teacher:
    if teacher is None:
        raise DataError("sdpo: got no teacher, expected one. Start the cell's teacher worker.")
    return teacher
