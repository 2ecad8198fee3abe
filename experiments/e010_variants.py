"""e010: every variant of GRPO, SDPO and distillation from a stronger model, on the task that a tiny model can learn."""

from sdpo_core.specs import ExperimentSpec

E010 = ExperimentSpec(
    name="e010",
    question=(
        "With a model of 0.8 million parameters that spells half of its words backward: which of the policy-gradient "
        "variants, of SDPO's teachers and settings, and of the ways to distil from a stronger model end above grpo and "
        "sdpo-ema at one learning rate and 120 steps, and by more than their seeds spread?"
    ),
    prediction=(
        "One optimizer step a step, so that every ratio is 1: grpo, rloo and reinforce-pp-baseline end within seed "
        "noise of each other; grpo-std a little above, since its steps are larger where a group nearly agrees; "
        "reinforce-pp below, without a group baseline; grpo-kl at or below grpo.\n"
        "Four optimizer steps at the same rate: grpo-paper and sapo learn faster than grpo, and one of them ends "
        "unstable; gspo gains little after its first mini-batch, since one step of this rate leaves its clip of 3e-4; "
        "ppo ends lowest of the policy gradients, since its value head starts from nothing.\n"
        "SDPO: static, EMA and trust region end within seed noise of each other, sdpo-live below or apart; sdpo-paper "
        "below sdpo-ema, since half right words may demonstrate and a group without a success gets nothing; grpo-sdpo "
        "between grpo and sdpo-ema. opsd ends above sdpo-ema: its teacher reads the answer itself.\n"
        "opd and opd-topk end highest, near their teacher (0.96 on dev), and opd-topk gets there first.\n"
        "Every teacher costs tokens a second; the whole vocabulary costs no more than a support, at 266 ids."
    ),
    datasets=("spell_backward",),
    arms=(
        "grpo",
        "sdpo-ema",
        "grpo-paper",
        "grpo-std",
        "grpo-kl",
        "gspo",
        "sapo",
        "rloo",
        "reinforce-pp",
        "reinforce-pp-baseline",
        "ppo",
        "sdpo-static",
        "sdpo-live",
        "sdpo-trust-region",
        "sdpo-paper",
        "grpo-sdpo",
        "opsd",
        "opd",
        "opd-topk",
    ),
    seeds=(42, 1234, 2026),
    profile="tiny",
)
