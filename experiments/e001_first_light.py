"""e001: GRPO against SDPO with two teachers, on a task a tiny model can learn and on one it cannot."""

from sdpo_core.specs import ExperimentSpec

E001 = ExperimentSpec(
    name="e001",
    question=(
        "With a model of a million parameters on a CPU: do GRPO and SDPO (static and EMA teacher) both learn to spell "
        "words backward from rewards and sibling demonstrations, and what does either learn of SciKnowEval physics?"
    ),
    prediction=(
        "Spelling: all three arms gain at least 0.2 accuracy over the base, and end within seed noise of each other. "
        "Physics: no arm beats its best guess; what moves is the answer format and the preference for one letter. "
        "SDPO costs a teacher pass a step, so fewer tokens a second than GRPO."
    ),
    datasets=("spell_backward", "sciknoweval-physics"),
    arms=("grpo", "sdpo-static", "sdpo-ema"),
    seeds=(42, 1234, 2026),
    profile="tiny",
)
