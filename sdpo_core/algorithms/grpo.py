"""GRPO: advantage = score minus the group's mean, the same for every token of a response, clipped surrogate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sdpo_core.algorithms.base import Batch, StepTools, deal, token_row
from sdpo_core.backends.base import TokenBatch, TokenLosses, TrainRow, UpdateStats
from sdpo_core.metrics import Trait
from sdpo_core.objectives.advantages import group_advantages
from sdpo_core.objectives.policy_loss import clipped_policy_loss
from sdpo_core.objectives.reduction import token_weights
from sdpo_core.records import Group
from sdpo_core.specs import GrpoSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """Token-level clipped surrogate (docs/notation.md, "Policy loss")."""

    clip_low: float
    clip_high: float
    dual_clip: float | None

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        assert batch.advantage is not None
        loss = clipped_policy_loss(
            batch.logp,
            batch.old_logp,
            batch.advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return TokenLosses(loss=loss, sums={})


class Grpo:
    """Groups whose scores are all equal have advantage zero; they stay in the denominator."""

    traits: frozenset[Trait] = frozenset()

    def __init__(self, spec: GrpoSpec) -> None:
        self._spec = spec

    def accepts(self, group: Group, *, tools: StepTools) -> bool:
        return True

    def build(self, groups: Sequence[Group], *, num_rejected: int, tools: StepTools) -> Batch:
        members = [member for group in groups for member in group.members]
        rows = [token_row(member) for member in members]
        scores = torch.tensor([[member.verdict.score for member in group.members] for group in groups])
        advantages = group_advantages(scores, normalise_std=self._spec.normalise_std).flatten().tolist()
        # One mini-batch is on-policy: the current log-probabilities are the old ones.
        old = tools.student.score(rows, top_k=0) if self._spec.minibatches > 1 else None
        minibatches = []
        for hand in deal(len(rows), self._spec.minibatches):
            lengths = [len(rows[i].response_ids) for i in hand]
            weights = token_weights(lengths, [True] * len(hand), reduction=self._spec.reduction)
            minibatches.append(
                tuple(
                    TrainRow(
                        row=rows[i],
                        weight=weight,
                        advantages=np.full(length, advantages[i], dtype=np.float32),
                        old_logps=None if old is None else old[i].logps,
                    )
                    for i, weight, length in zip(hand, weights, lengths, strict=True)
                )
            )
        objective = PolicyObjective(
            clip_low=self._spec.clip_low, clip_high=self._spec.clip_high, dual_clip=self._spec.dual_clip
        )
        return Batch(minibatches=tuple(minibatches), objective=objective, metrics={})

    def after_update(
        self,
        updates: Sequence[UpdateStats],
        *,
        tools: StepTools,
    ) -> Mapping[str, float | None]:
        return {}
