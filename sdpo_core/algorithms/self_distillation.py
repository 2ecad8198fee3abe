"""What SDPO and OPSD share: a context for the teacher, its scores of the same response, a divergence that trains.

Per rollout: a teacher context, the teacher's prompt, scores of the same response ids at the declared cells; per token:
the divergence of the two distributions. Rollouts without context are handled by the named policy: `error` stops the
cell, `drop` leaves them out of numerator and denominator, `poll` draws other problems for groups without any.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sdpo_core.algorithm_specs import BlendSpec, ContextPolicy, OpsdSpec, SdpoSpec
from sdpo_core.algorithms.base import Batch, StepTools, TeacherNote, minibatches, row_weights, token_row
from sdpo_core.algorithms.distillation import Answers, ask, follow, student_width, update_metrics
from sdpo_core.algorithms.grpo import clipped
from sdpo_core.algorithms.objective import DivergenceTerm, PolicyTerm, Term, TermSum, summed
from sdpo_core.algorithms.policy_gradient import score_table, with_teacher
from sdpo_core.backends.base import RowScores, TokenRow, TrainRow, UpdateStats
from sdpo_core.errors import CellError
from sdpo_core.objectives.advantages import group_advantages
from sdpo_core.records import Group, Problem
from sdpo_core.teacher.context import TeacherContext
from sdpo_core.teacher.request import TeacherPrompt, question, teacher_prompt

# The context of each rollout of a group; None where there is none.
Contexts = Callable[[Group, StepTools], Sequence[TeacherContext | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A rollout that has a teacher prompt; `index` is its place among the step's rollouts."""

    index: int
    group: int
    member: int
    context: TeacherContext
    prompt: TeacherPrompt


class SelfDistillation:
    """Distillation from a teacher that sees more; the reward decides at most who may demonstrate."""

    def __init__(
        self,
        spec: SdpoSpec | OpsdSpec,
        *,
        contexts: Contexts,
        no_context: ContextPolicy,
        check: Callable[[Sequence[Problem]], None],
        blend: BlendSpec | None = None,
    ) -> None:
        self._spec = spec
        self._contexts = contexts
        self._no_context = no_context
        self._check = check
        self._blend = blend

    def check_problems(self, problems: Sequence[Problem]) -> None:
        self._check(problems)

    def accepts(self, group: Group, *, tools: StepTools) -> bool:
        return self._no_context != "poll" or bool(self._candidates([group], tools=tools))

    def build(self, groups: Sequence[Group], *, num_rejected: int, tools: StepTools) -> Batch:
        rows = [token_row(member) for group in groups for member in group.members]
        with tools.phases.phase("teacher"):
            candidates = self._candidates(groups, tools=tools)
        scores = self._student_scores(rows, candidates, tools=tools)
        answers = self._ask(rows, candidates, scores, tools=tools)
        trained = self._rows(groups, rows, candidates, scores, answers)
        return Batch(
            minibatches=minibatches(trained, spec=self._spec),
            objective=self._objective(),
            metrics={
                **answers.metrics,
                **_context_metrics(groups, candidates, answers=answers, num_rejected=num_rejected),
            },
            notes={
                (c.group, c.member): TeacherNote(teacher_prompt=c.prompt.text, demonstrator=c.context.demonstrator)
                for c in candidates
            },
        )

    def after_update(self, updates: Sequence[UpdateStats], *, tools: StepTools) -> Mapping[str, float | None]:
        metrics = update_metrics(summed([update.sums for update in updates]), tools=tools)
        return metrics | follow(was_updated=bool(updates), tools=tools)

    def _candidates(self, groups: Sequence[Group], *, tools: StepTools) -> list[_Candidate]:
        candidates = []
        limit = tools.spec.training.max_teacher_prompt_tokens
        index = -1
        for g, group in enumerate(groups):
            for m, context in enumerate(self._contexts(group, tools)):
                index += 1
                if context is None:
                    self._refuse_if_error(group, member=m, why="no teacher context")
                    continue
                prompt = teacher_prompt(group.problem, context, text=tools.text, limit=limit)
                if prompt is None:
                    self._refuse_if_error(group, member=m, why=f"a problem that leaves no room in {limit} tokens")
                    continue
                candidates.append(_Candidate(index=index, group=g, member=m, context=context, prompt=prompt))
        return candidates

    def _refuse_if_error(self, group: Group, *, member: int, why: str) -> None:
        if self._no_context == "error":
            raise CellError(
                f"{self._spec.name}: got {why} for rollout {member} of {group.problem.id}, expected a teacher context "
                "under policy 'error'. Choose no_context 'drop' or 'poll' in the arm, or raise "
                "max_teacher_prompt_tokens."
            )

    def _student_scores(
        self, rows: Sequence[TokenRow], candidates: Sequence[_Candidate], *, tools: StepTools
    ) -> dict[int, RowScores]:
        """What the policy says before the first update, of the rollouts whose ids or old probabilities are needed."""
        width = student_width(self._spec.divergence)
        if self._spec.minibatches > 1 and self._blend is not None:
            wanted = list(range(len(rows)))
        elif width or self._spec.minibatches > 1:
            wanted = [candidate.index for candidate in candidates]
        else:
            return {}
        with tools.phases.phase("teacher"):
            return dict(zip(wanted, tools.student.score([rows[i] for i in wanted], top_k=width), strict=True))

    def _ask(
        self,
        rows: Sequence[TokenRow],
        candidates: Sequence[_Candidate],
        scores: Mapping[int, RowScores],
        *,
        tools: StepTools,
    ) -> Answers:
        has_ids = student_width(self._spec.divergence) > 0
        questions = [
            question(
                candidate.prompt,
                rows[candidate.index],
                text=tools.text,
                student_ids=scores[candidate.index].support_ids if has_ids else None,
            )
            for candidate in candidates
        ]
        return ask(questions, divergence=self._spec.divergence, tools=tools)

    def _rows(
        self,
        groups: Sequence[Group],
        rows: Sequence[TokenRow],
        candidates: Sequence[_Candidate],
        scores: Mapping[int, RowScores],
        answers: Answers,
    ) -> list[TrainRow]:
        """All rollouts of the step; those without teacher scores carry the policy's term at most."""
        taught = {c.index: found for c, found in zip(candidates, answers.scores, strict=True) if found is not None}
        lengths = [len(row.response_ids) for row in rows]
        distill = row_weights(lengths, [index in taught for index in range(len(rows))], spec=self._spec)
        members = [member for group in groups for member in group.members]
        policy, advantages = [0.0] * len(rows), None
        if self._blend is not None:
            policy = row_weights(lengths, [True] * len(rows), spec=self._spec)
            normalise = self._blend.policy.normalise_std
            advantages = group_advantages(score_table(groups), normalise_std=normalise).flatten().tolist()
        trained = []
        for index, row in enumerate(rows):
            own = np.array(members[index].rollout.sampling_logps, dtype=np.float32)
            plain = TrainRow(
                row=row,
                weight=policy[index],
                distill_weight=distill[index],
                sampling_logps=own,
                advantages=None if advantages is None else np.full(lengths[index], advantages[index], np.float32),
                old_logps=scores[index].logps if self._spec.minibatches > 1 and index in scores else None,
            )
            trained.append(with_teacher(plain, taught.get(index)))
        return trained

    def _objective(self) -> TermSum:
        spec, blend = self._spec, self._blend
        terms: list[Term] = [
            DivergenceTerm(
                spec=spec.divergence,
                importance_clip=spec.importance_clip,
                rollout_cap=spec.rollout_cap,
                coefficient=1.0 if blend is None else 1.0 - blend.weight,
            )
        ]
        if blend is not None:
            terms.append(
                PolicyTerm(surrogate=clipped(blend.policy), rollout_cap=spec.rollout_cap, coefficient=blend.weight)
            )
        return TermSum(terms=tuple(terms))


def _context_metrics(
    groups: Sequence[Group], candidates: Sequence[_Candidate], *, answers: Answers, num_rejected: int
) -> dict[str, float | None]:
    scored = sum(scores is not None for scores in answers.scores)
    rollouts = sum(len(group.members) for group in groups)
    demos = sum(candidate.context.demonstration is not None for candidate in candidates)
    trained_groups = {candidate.group for candidate in candidates}
    return {
        "feedback/effective_fraction": scored / rollouts,
        "feedback/from_demo_fraction": demos / rollouts,
        "feedback/no_context_fraction": 1 - len(candidates) / rollouts,
        "feedback/cut_fraction": sum(candidate.prompt.is_cut for candidate in candidates) / rollouts,
        "feedback/skipped_prompts": float(num_rejected + len(groups) - len(trained_groups)),
    }
