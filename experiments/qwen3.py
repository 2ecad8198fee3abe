"""The profile of Qwen3-4B on two GPUs, with the numbers of the SDPO paper's runs without feedback."""

from sdpo_core.base_specs import PlacedBaseSpec, ShapeSpec
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import EvaluationSpec, OptimizerSpec, ProfileSpec, SglangSpec, TaskProfile, TrainingSpec

# Its public config. The head has more rows than the tokenizer has ids.
_QWEN3_4B = PlacedBaseSpec(
    name="qwen3-4b",
    folder="Qwen3-4B",
    shape=ShapeSpec(
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=9728,
        max_positions=40960,
    ),
    vocab_size=151936,
)

# arXiv 2601.20802 and its published scripts, with Qwen3-8B on four GPUs. Where they differ or say nothing:
#   steps: 5 hours there were about 215 (8 H20, arXiv 2604.02288), the scripts name 30 epochs and stop by the clock;
#   evaluations every 5 steps there, without checkpoints; one of ours holds weights and optimizer, some 50 GB;
#   temperature 0.6 of evaluations is theirs, their top-p 0.95 is not: every engine here samples whole distributions;
#   a micro-batch is one sequence there, and here what fits the longest one (its scripts' model length).
_PAPER = TaskProfile(
    base=_QWEN3_4B,
    optimizer=OptimizerSpec(
        learning_rate=1e-5, beta1=0.9, beta2=0.999, weight_decay=0.01, max_grad_norm=1.0, lr_warmup_steps=10
    ),
    training=TrainingSpec(
        steps=200,
        problems_per_step=32,
        rollouts_per_problem=8,
        temperature=1.0,
        max_prompt_tokens=2048,
        max_response_tokens=8192,
        max_teacher_prompt_tokens=10240,
        evaluate_every=20,
        checkpoint_every=20,
        microbatch_tokens=18944,
    ),
    evaluation=EvaluationSpec(samples_per_problem=16, temperature=0.6, dev_problems=None, test_problems=None),
)

# One a GPU, each with a whole copy of the model. None of it was measured:
#   a server takes 8 GB for weights, and 147 kB a token (36 layers x 8 heads x 128 numbers x 2 bytes, keys and values):
#   58 GB for 393,216 tokens, 38 sequences of the longest kind or the 128 of its share of a step at 3,072 tokens each;
#   where responses are longer SGLang lets some wait;
#   of the trainer a GPU holds about 50 GB: half of 18 bytes a parameter for the student and its optimizer, and of 6 for
#   a teacher. Both fit into the 141 GB of an H200; asleep, the servers leave their share to activations;
#   not deterministic: kernels that do not depend on the batch cost speed, and the trainer's sums on a GPU need not be
#   taken in one order either, so no cell would be exact.
_SERVERS = SglangSpec(replicas=2, deterministic=False, max_total_tokens=393_216, concurrency=128, sleep=True)

QWEN3_4B_2GPU = ProfileSpec(
    name="qwen3-4b-2gpu",
    meaning="Qwen3-4B on Megatron-core, cut over two GPUs, rollouts by SGLang; never run yet (docs/unverified.md)",
    tasks={"mcq": _PAPER, "tool_call": _PAPER},
    backend="megatron",
    engine="sglang",
    dtype="bfloat16",
    layout=LayoutSpec(
        tensor=2,
        sequence=True,
        distributed_optimizer=True,
        recompute=True,
        packed=True,
        kernels="transformer_engine",
    ),
    scorer_layout=LayoutSpec(tensor=2, sequence=True, packed=True, kernels="transformer_engine"),
    sglang=_SERVERS,
    cpus_per_cell=4,
    gpus_per_cell=2,
)
