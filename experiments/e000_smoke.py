"""e000: does the whole pipeline run?"""

from sdpo_core.specs import ExperimentSpec

E000 = ExperimentSpec(
    name="e000",
    question="Does every part of the pipeline run, from real rows to a results page?",
    prediction="Yes. Four steps of a barely warmed-up model teach nothing, so no accuracy here means anything.",
    datasets=("spell_backward", "sciknoweval-physics"),
    arms=("grpo", "sdpo-static", "sdpo-ema"),
    seeds=(42,),
    profile="smoke",
)
