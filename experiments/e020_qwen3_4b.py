"""e020: does SDPO beat GRPO with a real model?"""

from sdpo_core.specs import ExperimentSpec

E020 = ExperimentSpec(
    name="e020",
    question="Does SDPO beat GRPO with Qwen3-4B, on four sciences and tool use, after 200 steps?",
    prediction=(
        "On chemistry and biology yes, on physics, materials and tool use no, and not on the mean: so it was after "
        "five hours in the only independent runs with this model (arXiv 2604.02288), where SDPO led early and was "
        "overtaken. Tool use here trains on 83 rows of real APIs in the place of the paper's 4,046, so its numbers "
        "compare arms and nothing else."
    ),
    datasets=(
        "sciknoweval-biology",
        "sciknoweval-chemistry",
        "sciknoweval-materials",
        "sciknoweval-physics",
        "toolalpaca-real",
    ),
    arms=("grpo", "sdpo-paper", "sdpo-static"),
    seeds=(42, 1234, 2026),
    profile="qwen3-4b-2gpu",
)
