"""Arms: an algorithm with settings, under a name that reports and fingerprints carry.

`source`: where the settings come from, and where they differ from there.
"""

from sdpo_core.algorithm_specs import (
    AnchorSpec,
    BlendSpec,
    DemonstrationSpec,
    DivergenceSpec,
    GrpoSpec,
    GspoSpec,
    OpdSpec,
    OpsdSpec,
    PpoSpec,
    ReinforcePlusPlusBaselineSpec,
    ReinforcePlusPlusSpec,
    RlooSpec,
    SapoSpec,
    SdpoSpec,
    TeacherSpec,
)
from sdpo_core.specs import ArmSpec

_SDPO = "SDPO (arXiv 2601.20802)"
_EMA = TeacherSpec(schedule="ema", rate=0.05)
# Another model, warmed up until it knows the task, which sees what the student sees.
_STRONGER = TeacherSpec(schedule="static", weights="profile")

_SELF_DISTILLATION = (
    ArmSpec(
        name="sdpo-static",
        meaning="SDPO with a teacher that keeps the base weights",
        source=f"{_SDPO}, its frozen teacher; ours: top 20 as in its runs with feedback, token mean",
        algorithm=SdpoSpec(teacher=TeacherSpec(schedule="static")),
    ),
    ArmSpec(
        name="sdpo-ema",
        meaning="SDPO with a teacher that follows the student by 5 % a step",
        source=f"{_SDPO}, rate of its runs without feedback; ours: top 20 as in its runs with feedback, token mean",
        algorithm=SdpoSpec(teacher=_EMA),
    ),
    ArmSpec(
        name="sdpo-live",
        meaning="SDPO with the student itself as its teacher",
        source=f"{_SDPO}, the unregularised teacher of its ablation, where it diverges; else as sdpo-ema",
        algorithm=SdpoSpec(teacher=TeacherSpec(schedule="live")),
    ),
    ArmSpec(
        name="sdpo-trust-region",
        meaning="SDPO with a teacher between base and student: 5 % of the student's logits",
        source=f"{_SDPO}, its code's default rate (the paper's ablation: 0.01); else as sdpo-ema",
        algorithm=SdpoSpec(teacher=TeacherSpec(schedule="trust_region", rate=0.05)),
    ),
    ArmSpec(
        name="sdpo-paper",
        meaning="SDPO with the settings of the published runs without feedback",
        source=(
            f"{_SDPO} and its published scripts; the threshold 0.5 equals 1 for their scores of 0 and 1 alone: partial "
            "scores let half right answers demonstrate"
        ),
        algorithm=SdpoSpec(
            teacher=_EMA,
            divergence=DivergenceSpec(alpha=0.5, support="student", top_k=100, truncation="tail"),
            success_threshold=0.5,
            demonstration=DemonstrationSpec(rule="first", exclude_self=True, strip_thinking=True),
            include_feedback=False,
            importance_clip=2.0,
            rollout_cap=2.0,
            reduction="sequence_mean_of_all",
        ),
    ),
    ArmSpec(
        name="grpo-sdpo",
        meaning="nine parts of GRPO's loss and one of SDPO's",
        source=f"{_SDPO}, its mixture, which weighs advantages 0.9 to 0.1; ours weighs losses; parts as grpo, sdpo-ema",
        algorithm=SdpoSpec(teacher=_EMA, blend=BlendSpec(weight=0.9)),
    ),
    ArmSpec(
        name="opsd",
        meaning="self-distillation from a frozen teacher that reads the true answer, over the whole vocabulary",
        source=(
            "OPSD (arXiv 2601.18734) and its code: JSD 0.5, cells clipped at 0.05; ours: the answer where there is no "
            "worked solution, no prompt of its own for reasoning"
        ),
        algorithm=OpsdSpec(
            teacher=TeacherSpec(schedule="static"),
            divergence=DivergenceSpec(alpha=0.5, support="full", top_k=None, entry_clip=0.05),
        ),
    ),
)

_POLICY_GRADIENT = (
    ArmSpec(
        name="grpo",
        meaning="GRPO, on-policy, advantage = score minus group mean",
        source=f"the baseline of {_SDPO} as it runs it on-policy; ours: token mean, no correction for the engine",
        algorithm=GrpoSpec(),
    ),
    ArmSpec(
        name="grpo-paper",
        meaning="GRPO with the settings of the published baseline: four optimizer steps a step",
        source=f"the baseline of {_SDPO} and its published scripts, but for the profile's learning rate",
        algorithm=GrpoSpec(minibatches=4, rollout_cap=2.0, reduction="sequence_mean_of_all"),
    ),
    ArmSpec(
        name="grpo-std",
        meaning="GRPO with the advantage divided by the group's standard deviation",
        source="DeepSeekMath (arXiv 2402.03300), its advantage; else as grpo",
        algorithm=GrpoSpec(normalise_std=True),
    ),
    ArmSpec(
        name="grpo-kl",
        meaning="GRPO with a reverse KL to the base weights",
        source=(
            "DeepSeekMath (arXiv 2402.03300), coefficient 0.04; ours: k2 in the loss, since the gradient of its k3 "
            "there is that of the forward KL; else as grpo"
        ),
        algorithm=GrpoSpec(anchor=AnchorSpec(coefficient=0.04, estimator="k2", placement="loss")),
    ),
    ArmSpec(
        name="gspo",
        meaning="GSPO: one ratio a sequence, clipped, four optimizer steps a step",
        source="GSPO (arXiv 2507.18071), clip 3e-4 and 4e-4, four mini-batches",
        algorithm=GspoSpec(minibatches=4),
    ),
    ArmSpec(
        name="sapo",
        meaning="SAPO: a sigmoid gate on each token's ratio, four optimizer steps a step",
        source="SAPO (arXiv 2511.20347), temperatures 1 and 1.05; mini-batches as gspo",
        algorithm=SapoSpec(minibatches=4),
    ),
    ArmSpec(
        name="rloo",
        meaning="REINFORCE with the other rollouts' mean score as its baseline",
        source="RLOO (arXiv 2402.14740), one optimizer step, so that its clip never binds; ours: no KL to the base",
        algorithm=RlooSpec(),
    ),
    ArmSpec(
        name="reinforce-pp",
        meaning="REINFORCE++: scores whitened over the step, no group baseline",
        source="REINFORCE++ (arXiv 2501.03262); ours: no KL in the reward",
        algorithm=ReinforcePlusPlusSpec(),
    ),
    ArmSpec(
        name="reinforce-pp-baseline",
        meaning="REINFORCE++ with the group mean taken off before the whitening",
        source="REINFORCE++ (arXiv 2501.03262), its variant for groups; ours: no KL",
        algorithm=ReinforcePlusPlusBaselineSpec(),
    ),
    ArmSpec(
        name="ppo",
        meaning="PPO with a value head on the policy's own states, four optimizer steps a step",
        source=(
            "PPO (arXiv 1707.06347), clip 0.2; advantages of arXiv 1506.02438, decay 0.95; ours: no discount, values "
            "from the policy's own states, one pass over a step's rollouts"
        ),
        algorithm=PpoSpec(minibatches=4),
    ),
)

_DISTILLATION = (
    ArmSpec(
        name="opd",
        meaning="distillation from a stronger model on the student's own responses, no reward",
        source=(
            "on-policy distillation as slime has it: log-ratio of the sampled tokens in the advantage, coefficient 1; "
            "ours: GRPO's token-level surrogate, task reward left out"
        ),
        algorithm=GrpoSpec(opd=OpdSpec(only=True, teacher=_STRONGER)),
    ),
    ArmSpec(
        name="opd-topk",
        meaning="as opd, with the reverse KL over the teacher's top 16 tokens and a tail in the loss",
        source="GKD (arXiv 2306.13649) with its mixture at the reverse KL; support and tail as in Relax, K = 16",
        algorithm=GrpoSpec(
            opd=OpdSpec(
                only=True,
                teacher=_STRONGER,
                estimator="divergence",
                placement="loss",
                divergence=DivergenceSpec(alpha=1.0, support="teacher", top_k=16),
            )
        ),
    ),
)

ARMS: dict[str, ArmSpec] = {arm.name: arm for arm in (*_POLICY_GRADIENT, *_SELF_DISTILLATION, *_DISTILLATION)}
