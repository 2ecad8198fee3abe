"""The rest of TRL's SDPO trainer beside ours: sampled token, policy loss, blend, weights, tail, advantages, commits.

Tolerances: EXACT of `test_trl.py` where both sides are in float64; others carry their reason.
"""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.sdpo.loss_utils import add_tail_bucket, apply_importance_sampling_clipping
from trl.experimental.sdpo.teacher_sync import SyncTeacherModelCallback

from sdpo_core.algorithm_specs import BlendSpec, DivergenceSpec, GrpoSpec, Reduction, SdpoSpec, TeacherSpec
from sdpo_core.algorithms.objective import PolicyTerm, SampledKlTerm, SequenceSurrogate, TermSum
from sdpo_core.algorithms.sdpo import sdpo
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.objectives.advantages import STD_FLOOR, group_advantages
from sdpo_core.objectives.kl_terms import score_function_loss
from sdpo_core.objectives.policy_loss import importance_weight
from tests.parity import ours
from tests.parity.cases import gap, make_case, slope_gap
from tests.parity.peer import make_trainer, peer_loss
from tests.sdpo_core.objectives.tensors import table_of_logits

EXACT = 1e-11
POLICY: dict[str, Any] = {"distillation_weight": 0.0, "epsilon": 0.2, "epsilon_high": 0.28}


def test_score_function_loss_is_the_peers_sampled_token(folder: Path) -> None:
    """The peer's default mode."""
    case = make_case(4)
    theirs = peer_loss(case, {}, folder=folder, temperature=0.8)
    batch = ours.batch_of(case, ours.read(case, temperature=0.8))
    loss = score_function_loss(batch.logp, batch.logp.detach() - ours.teacher_own_logp(case, temperature=0.8))
    assert gap((batch.distill_weight * loss).sum(), case, theirs.loss) <= EXACT


@pytest.mark.parametrize("is_off_policy", [False, True])
def test_half_the_squared_log_ratio_steps_as_the_peers_sampled_token(folder: Path, is_off_policy: bool) -> None:
    """Estimator k2 in the loss: another value, the same gradient."""
    case = make_case(5, is_off_policy=is_off_policy)
    theirs = peer_loss(case, {}, folder=folder, temperature=0.8)
    batch = ours.batch_of(case, ours.read(case, temperature=0.8))
    batch = replace(batch, teacher_own_logp=ours.teacher_own_logp(case, temperature=0.8))
    own = TermSum(terms=(SampledKlTerm(coefficient=1.0, is_anchor=False),)).token_losses(batch).loss.sum()
    assert slope_gap(own, case, theirs.loss) <= EXACT


def test_log_ratio_as_advantage_steps_as_the_peers_sampled_token(folder: Path) -> None:
    """Estimator k1 in the advantage, on policy: another value, the same gradient."""
    case = make_case(13)
    theirs = peer_loss(case, {}, folder=folder, temperature=0.8)
    batch = ours.batch_of(case, ours.read(case, temperature=0.8))
    advantage = ours.teacher_own_logp(case, temperature=0.8) - batch.old_logp
    batch = replace(batch, advantage=advantage, weight=batch.distill_weight)
    own = TermSum(terms=(PolicyTerm(surrogate=ours.CLIPPED, rollout_cap=None),)).token_losses(batch).loss.sum()
    assert slope_gap(own, case, theirs.loss) <= EXACT


@pytest.mark.parametrize("is_off_policy", [False, True])
@pytest.mark.parametrize(
    ("loss_type", "reduction"), [("grpo", "sequence_mean"), ("bnpo", "token_mean"), ("dapo", "token_mean")]
)
def test_policy_loss_is_the_peers(folder: Path, loss_type: str, reduction: Reduction, is_off_policy: bool) -> None:
    case = make_case(10, is_off_policy=is_off_policy)
    theirs = peer_loss(case, {**POLICY, "loss_type": loss_type}, folder=folder, temperature=0.8)
    own = ours.policy_loss(case, ours.CLIPPED, temperature=0.8, reduction=reduction)
    assert gap(own, case, theirs.loss) <= EXACT


def test_sequence_policy_loss_is_the_peers_sequence_level(folder: Path) -> None:
    case = make_case(11, is_off_policy=True)
    settings = {**POLICY, "importance_sampling_level": "sequence", "loss_type": "grpo"}
    theirs = peer_loss(case, settings, folder=folder, temperature=0.8)
    surrogate = SequenceSurrogate(clip_low=0.2, clip_high=0.28)
    own = ours.policy_loss(case, surrogate, temperature=0.8, reduction="sequence_mean")
    assert gap(own, case, theirs.loss) <= EXACT


def test_blend_weighs_the_other_side_than_the_peer(folder: Path) -> None:
    """A blend's weight is the policy loss's, the peer's the distillation's."""
    case = make_case(12)
    settings = {**POLICY, "distillation_mode": "topk_logits", "distillation_topk": 4, "distillation_add_tail": True}
    settings |= {"distillation_weight": 0.7, "distillation_alpha": 0.5, "loss_type": "grpo"}
    theirs = peer_loss(case, settings, folder=folder, temperature=1.0)
    divergence = DivergenceSpec(alpha=0.5, top_k=4)
    spec = SdpoSpec(
        teacher=TeacherSpec(schedule="static"),
        divergence=divergence,
        blend=BlendSpec(weight=0.3, policy=GrpoSpec(dual_clip=None)),
    )
    batch = ours.batch_of(case, ours.read(case, temperature=1.0, divergence=divergence))
    assert gap(sdpo(spec)._objective().token_losses(batch).loss.sum(), case, theirs.loss) <= EXACT


def test_importance_weight_is_the_peers_at_every_gap() -> None:
    gaps = torch.tensor([-50.0, -20.0, -19.0, -1.0, 0.0, 0.69, 0.7, 5.0, 30.0], dtype=torch.float64)
    old = torch.full_like(gaps, -60.0)
    theirs = apply_importance_sampling_clipping(torch.ones_like(gaps), old + gaps, old, 2.0)
    assert importance_weight(old + gaps, old, cap=2.0).tolist() == pytest.approx(theirs.tolist(), rel=EXACT)


@pytest.mark.parametrize("tail", [1e-3, 1e-6, 1e-9])
def test_peer_holds_the_tail_above_1e_7(tail: float) -> None:
    """Four equal ids and one other; below 1e-7 the peer's tail is a constant, ours keeps value and gradient."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, math.log(4 * tail / (1 - tail))]], dtype=torch.float64)
    logits.requires_grad_()
    own = table_of_logits(logits, torch.tensor([[0, 1, 2, 3]]), temperature=1.0)[0, -1]
    theirs = add_tail_bucket(logits.log_softmax(dim=1)[:, :4])[0, -1]
    slopes = [torch.autograd.grad(value, logits, retain_graph=True)[0][0, -1].item() for value in (own, theirs)]
    assert own.item() == pytest.approx(math.log(tail), rel=1e-13)
    assert slopes[0] == pytest.approx(1 - tail, rel=1e-13)
    # log(1 - mass) in float64 is off by 1e-16 / tail.
    assert theirs.item() == pytest.approx(math.log(max(tail, 1e-7)), rel=1e-8)
    assert slopes[1] == pytest.approx(1 - tail if tail > 1e-7 else 0.0, rel=1e-8)


@pytest.mark.parametrize(("scale", "normalise_std"), [("group", True), ("none", False)])
def test_advantages_differ_by_what_is_added_to_the_deviation(folder: Path, scale: str, normalise_std: bool) -> None:
    """The peer adds 1e-4, also to the 1 that it divides by without normalisation."""
    scores = [1.0, 0.0, 0.25, 1.0]
    trainer = make_trainer(folder, scale_rewards=scale, num_generations=4, max_completion_length=1)
    trainer.reward_funcs = [lambda **_: scores]
    trainer.model.train()
    theirs = trainer._prepare_training_batch([{"prompt": "a"}] * 4)["advantages"].double()
    table = torch.tensor([scores], dtype=torch.float64)
    deviation = float(table.std()) if normalise_std else 1.0
    floor = STD_FLOOR if normalise_std else 0.0
    own = group_advantages(table, normalise_std=normalise_std)[0] * (deviation + floor) / (deviation + 1e-4)
    # The peer works in float32; the 1e-4 alone moves the advantages by 4e-5 or more.
    assert own.tolist() == pytest.approx(theirs.tolist(), abs=3e-7)


def test_ema_commit_is_the_peers(folder: Path) -> None:
    """The rate is the share of the new weights on both sides."""
    trainer = make_trainer(folder, teacher_update_rate=0.05)
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, SyncTeacherModelCallback)]
    teacher = HfModel(folder, dtype=torch.float32, device=torch.device("cpu"), valid_vocab=256)
    initial = teacher.weights()
    generator = torch.Generator().manual_seed(14)
    for step in range(1, 6):
        for parameter in trainer.model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        callback.on_step_end(trainer.args, SimpleNamespace(global_step=step), None, model=trainer.model)
        teacher.blend(dict(trainer.model.named_parameters()), rate=0.05)
    # Weights of up to 1.3: each of five commits rounds by up to two ulps of 1.2e-7 on either side.
    assert _farthest(teacher.weights(), dict(trainer.teacher_model.named_parameters())) <= 2e-6
    assert _farthest(teacher.weights(), initial) > 0.1


def _farthest(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).detach().abs().max()) for name in weights)
