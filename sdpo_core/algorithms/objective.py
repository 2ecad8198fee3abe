"""Objectives as sums of terms: what each algorithm's mini-batches are trained on. Everything here is picklable.

A term turns the small per-token tables of `TokenBatch` into each token's share of the loss. Every term multiplies by
its own weight of the row ("weight" or "distill_weight", denominators inside), so that terms over different rows add up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.algorithm_specs import DivergenceSpec
from sdpo_core.backends.amounts import put_together
from sdpo_core.backends.base import TokenBatch, TokenLosses, WholeVocabulary
from sdpo_core.errors import DataError
from sdpo_core.objectives.divergence import bucket_divergence, support_divergence, tail_share, token_clip_weight
from sdpo_core.objectives.policy_loss import clipped_policy_loss, importance_weight, soft_gate_policy_loss
from sdpo_core.objectives.sequence_policy import sequence_policy_loss
from sdpo_core.objectives.support import coverage
from sdpo_core.objectives.value_loss import value_loss

# Truncation of the weight that makes a KL term of the old policy's samples one of the current policy's.
_CORRECTION_CAP = 2.0


@runtime_checkable
class Term(Protocol):
    """One summand of an objective."""

    @property
    def needs_whole_sequences(self) -> bool: ...

    @property
    def whole_vocabulary(self) -> WholeVocabulary | None: ...

    def losses(self, batch: TokenBatch) -> TokenLosses: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TermSum:
    """The objective of all algorithms: the sum of its terms."""

    terms: tuple[Term, ...]

    @property
    def needs_whole_sequences(self) -> bool:
        return any(term.needs_whole_sequences for term in self.terms)

    @property
    def whole_vocabulary(self) -> WholeVocabulary | None:
        found = [term.whole_vocabulary for term in self.terms if term.whole_vocabulary is not None]
        return found[0] if found else None

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        sums = {"trained_tokens": float(len(batch.logp)), "entropy": float(batch.entropy.sum())}
        if batch.sampling_logp is not None and len(batch.logp):
            gaps = (batch.logp.detach() - batch.sampling_logp).abs()
            sums |= {
                "sampled_tokens": float(len(gaps)),
                "engine_gap": float(gaps.sum()),
                "largest_engine_gap": float(gaps.max()),
            }
        loss = torch.zeros_like(batch.logp)
        for term in self.terms:
            part = term.losses(batch)
            loss = loss + part.loss
            sums |= part.sums
        return TokenLosses(loss=loss, sums=sums)


@runtime_checkable
class Surrogate(Protocol):
    """The policy loss of each token, before weights."""

    @property
    def needs_whole_sequences(self) -> bool: ...

    def token_losses(self, batch: TokenBatch, advantage: Float[Tensor, " token"]) -> Float[Tensor, " token"]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedSurrogate:
    """Token-level clipped surrogate (docs/notation.md, "Policy loss")."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    needs_whole_sequences: bool = False

    def token_losses(self, batch: TokenBatch, advantage: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
        return clipped_policy_loss(
            batch.logp,
            batch.old_logp,
            advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSurrogate:
    """One clipped ratio a sequence, each token with its own advantage."""

    clip_low: float
    clip_high: float
    needs_whole_sequences: bool = True

    def token_losses(self, batch: TokenBatch, advantage: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
        return sequence_policy_loss(
            batch.logp, batch.old_logp, advantage, batch.sequence, clip_low=self.clip_low, clip_high=self.clip_high
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftGate:
    """A sigmoid gate in the place of the clip; its temperature goes by the sign of the task's advantage."""

    temperature_positive: float
    temperature_negative: float
    needs_whole_sequences: bool = False

    def token_losses(self, batch: TokenBatch, advantage: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
        return soft_gate_policy_loss(
            batch.logp,
            batch.old_logp,
            advantage,
            sign_of=_present(batch.task_advantage, name="task_advantage"),
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerm:
    """coefficient x surrogate, corrected for the engine's probabilities where `rollout_cap` says so."""

    surrogate: Surrogate
    rollout_cap: float | None
    coefficient: float = 1.0

    @property
    def needs_whole_sequences(self) -> bool:
        return self.surrogate.needs_whole_sequences

    @property
    def whole_vocabulary(self) -> WholeVocabulary | None:
        return None

    def losses(self, batch: TokenBatch) -> TokenLosses:
        loss = self.surrogate.token_losses(batch, _present(batch.advantage, name="advantage"))
        weight = self.coefficient * batch.weight * _rollout_weight(batch, cap=self.rollout_cap)
        return TokenLosses(loss=weight * loss, sums={})


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledKlTerm:
    """coefficient x half the squared log-ratio of the sampled token: its gradient is that of the reverse KL ("k2").

    Off-policy tokens count by their truncated importance weight, and by the engine's as in `PolicyTerm`. `is_anchor`:
    to the anchor's log-probabilities with the row's policy weight, else to the teacher's with its distillation weight.
    """

    coefficient: float
    is_anchor: bool
    rollout_cap: float | None = None
    needs_whole_sequences: bool = False
    whole_vocabulary: WholeVocabulary | None = None

    def losses(self, batch: TokenBatch) -> TokenLosses:
        reference = batch.anchor_logp if self.is_anchor else batch.teacher_own_logp
        weight = batch.weight if self.is_anchor else batch.distill_weight
        if reference is None:
            return _nothing(batch, weight, name="anchor_logp" if self.is_anchor else "teacher_own_logp")
        squared = 0.5 * (batch.logp - reference.detach()).square()
        current = importance_weight(batch.logp, batch.old_logp, cap=_CORRECTION_CAP)
        weight = self.coefficient * weight * _rollout_weight(batch, cap=self.rollout_cap)
        return TokenLosses(loss=weight * current * squared, sums={})


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTerm:
    """coefficient x the clipped squared error of the value head (docs/notation.md, "Value loss")."""

    coefficient: float
    clip: float | None
    needs_whole_sequences: bool = True
    whole_vocabulary: WholeVocabulary | None = None

    def losses(self, batch: TokenBatch) -> TokenLosses:
        loss = value_loss(
            _present(batch.value, name="value"),
            _present(batch.old_value, name="old_value"),
            _present(batch.returns, name="returns"),
            clip=self.clip,
        )
        return TokenLosses(loss=self.coefficient * batch.weight * loss, sums={"value_loss": float(loss.detach().sum())})


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceTerm:
    """coefficient x divergence to the teacher of each token, over the cells that `spec` names.

    Off-policy tokens count by min(ratio, `importance_clip`), those beyond the token clip by limit / divergence.
    """

    spec: DivergenceSpec
    importance_clip: float
    rollout_cap: float | None
    coefficient: float = 1.0
    needs_whole_sequences: bool = False

    @property
    def whole_vocabulary(self) -> WholeVocabulary | None:
        if self.spec.support != "full":
            return None
        return WholeVocabulary(alpha=self.spec.alpha, entry_clip=self.spec.entry_clip)

    def losses(self, batch: TokenBatch) -> TokenLosses:
        if batch.divergence is None and batch.teacher_logp is None:
            return _nothing(batch, batch.distill_weight, name="teacher_logp")
        divergence, sums = self._divergence(batch)
        clip = torch.ones_like(divergence)
        if self.spec.token_clip is not None:
            clip = token_clip_weight(divergence.detach(), limit=self.spec.token_clip)
        weight = self.coefficient * batch.distill_weight * _rollout_weight(batch, cap=self.rollout_cap) * clip
        current = importance_weight(batch.logp, batch.old_logp, cap=self.importance_clip)
        sums = {
            "tokens": float(len(divergence)),
            "divergence": float(divergence.detach().sum()),
            "clipped_fraction": float((clip < 1).sum()),
            **sums,
        }
        return TokenLosses(loss=weight * current * divergence, sums=sums)

    def _divergence(self, batch: TokenBatch) -> tuple[Float[Tensor, " token"], dict[str, float]]:
        if batch.divergence is not None:
            return batch.divergence, {}
        student = _present(batch.student_logp, name="student_logp")
        teacher = _present(batch.teacher_logp, name="teacher_logp")
        divergence = support_divergence(
            student,
            teacher,
            alpha=self.spec.alpha,
            truncation=self.spec.truncation,
            entry_clip=self.spec.entry_clip,
        )
        fixed = student.detach()
        shares = tail_share(fixed, teacher, alpha=self.spec.alpha)
        return divergence, {
            "kl_reverse": float(bucket_divergence(fixed, teacher, alpha=1.0).sum()),
            "kl_forward": float(bucket_divergence(fixed, teacher, alpha=0.0).sum()),
            "student_coverage": float(coverage(fixed).sum()),
            "teacher_coverage": float(coverage(teacher).sum()),
            "tail": float(shares.tail),
            "cells": float(shares.total),
        }


def _rollout_weight(batch: TokenBatch, *, cap: float | None) -> Float[Tensor, " token"]:
    """min(p_old / p_engine, cap) of each sampled token; 1 where no correction is declared."""
    if cap is None:
        return torch.ones_like(batch.old_logp)
    return importance_weight(batch.old_logp, _present(batch.sampling_logp, name="sampling_logp"), cap=cap)


def _present(value: Tensor | None, *, name: str) -> Tensor:
    if value is None:
        raise DataError(f"objective: got no {name}, expected one a token. The algorithm must put it into its rows.")
    return value


def _nothing(batch: TokenBatch, weight: Float[Tensor, " token"], *, name: str) -> TokenLosses:
    """A term over rows that it says nothing about: allowed only where their weight is 0."""
    if bool((weight != 0).any()):
        _present(None, name=name)
    return TokenLosses(loss=torch.zeros_like(batch.logp), sums={})


def summed(sums: list[Mapping[str, float]]) -> dict[str, float]:
    """Sums of several optimizer steps."""
    total: dict[str, float] = {}
    for part in sums:
        put_together(total, part)
    return total
