"""The bugs: where each would stand in our code, and the tests that must notice it.

Sources by short name: the issue or pull request it was reported in, or the property it breaks ("contract N" of
docs/contracts.md). `find` is a piece of the file as it is, `replace` the same piece with the bug.
"""

from dataclasses import dataclass

CORE = "sdpo_core"
OBJECTIVES = f"{CORE}/objectives"
TESTS = "tests/sdpo_core"
SINGLE = (f"{TESTS}/objectives/test_fused.py",)
PARALLEL = (f"{TESTS}/objectives/test_vocab_parallel.py",)
CONTEXT_PARALLEL = (f"{TESTS}/objectives/test_context_parallel.py",)
DIVERGENCES = (f"{TESTS}/objectives/test_divergence.py", f"{TESTS}/objectives/test_support_divergence.py")
SPECS = (f"{TESTS}/test_specs.py",)
ARMS = (f"{TESTS}/algorithms",)
MODELS = tuple(f"{TESTS}/backends/test_{name}.py" for name in ("hf_model", "hf", "scorer"))
MEGATRON = f"{CORE}/backends/megatron"
STEPS = f"{TESTS}/backends/megatron/test_training.py::test_steps_and_checkpoints"
LAYOUTS = f"{TESTS}/backends/megatron/test_objectives.py::test_every_objective_finds_the_numbers_of_one_process"
REQUESTS = (f"{TESTS}/teacher/test_request.py", f"{TESTS}/teacher/test_context.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One bug."""

    name: str
    source: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="normaliser of one shard only (gradient 1/TP)",
        source="HJSang/slime 1, commit a8e67bf; contract 13",
        file=f"{OBJECTIVES}/chunks.py",
        find="total = all_sum(packed, group=group)",
        replace="total = packed",
        tests=PARALLEL,
    ),
    Mutant(
        name="hidden gradient reduced twice (TP times too large)",
        source="NVIDIA-NeMo/Automodel 3776; contract 12",
        file=f"{OBJECTIVES}/vocab_parallel.py",
        find="return all_sum(gradient, group=ctx.group), None",
        replace="return all_sum(all_sum(gradient, group=ctx.group), group=ctx.group), None",
        tests=PARALLEL,
    ),
    Mutant(
        name="hidden gradient not reduced over the shards",
        source="THUDM/slime 2051; contract 13",
        file=f"{OBJECTIVES}/vocab_parallel.py",
        find="return all_sum(gradient, group=ctx.group), None",
        replace="return gradient, None",
        tests=PARALLEL,
    ),
    Mutant(
        name="padded columns of the vocabulary in the normaliser",
        source="Liger-Kernel distillation base; contract 5",
        file=f"{OBJECTIVES}/head.py",
        find="return max(0, min(len(self.weight), self.vocab - self.first))",
        replace="return len(self.weight)",
        tests=(*SINGLE, *PARALLEL),
    ),
    Mutant(
        name="log-ratio of the sampled token differentiated as a loss",
        source="redai-studio/Relax, AReaL joint mode; contract 10",
        file=f"{CORE}/algorithm_specs.py",
        find='    ("k1", "loss"): "the gradient of a log-ratio of sampled tokens is 0 in expectation",\n',
        replace="",
        tests=SPECS,
    ),
    Mutant(
        name="a divergence of whole distributions as an advantage",
        source="miles 2362; contract 10",
        file=f"{CORE}/algorithm_specs.py",
        find='    ("divergence", "advantage"): "',
        replace='    ("divergence", "nowhere"): "',
        tests=SPECS,
    ),
    Mutant(
        name="k3 as a loss for the reverse KL",
        source="huggingface/trl 6503, THUDM/slime 1004; contract 10",
        file=f"{CORE}/algorithm_specs.py",
        find='    ("k3", "loss"): "it descends the forward KL",\n',
        replace="",
        tests=SPECS,
    ),
    Mutant(
        name="teacher's ids as the support of SDPO",
        source="contract 33",
        file=f"{CORE}/algorithm_specs.py",
        find='if self.divergence.support in ("teacher", "union"):',
        replace="if False:",
        tests=SPECS,
    ),
    Mutant(
        name="alpha with the labels of the other convention",
        source="redai-studio/Relax; contract 9",
        file=f"{OBJECTIVES}/divergence.py",
        find="    if alpha == 0.0:\n        return q * (q_log - p_log) + (p - q)\n    if alpha == 1.0:",
        replace="    if alpha == 1.0:\n        return q * (q_log - p_log) + (p - q)\n    if alpha == 0.0:",
        tests=DIVERGENCES,
    ),
    Mutant(
        name="mixture with swapped weights",
        source="huggingface/trl 3043",
        file=f"{OBJECTIVES}/divergence.py",
        find="from_p = torch.log1p(alpha * torch.expm1(gap))",
        replace="from_p = torch.log1p((1.0 - alpha) * torch.expm1(gap))",
        tests=DIVERGENCES,
    ),
    Mutant(
        name="plain sum of p log(p/q) on a cut support",
        source="redai-studio/Relax, verl 5041; contract 8",
        file=f"{OBJECTIVES}/divergence.py",
        find="return p * (p_log - q_log) + (q - p)",
        replace="return p * (p_log - q_log)",
        tests=DIVERGENCES,
    ),
    Mutant(
        name="union with padding loses its tail",
        source="redai-studio/Relax; contract 8",
        file=f"{OBJECTIVES}/divergence.py",
        find='if truncation != "tail":',
        replace='if truncation != "tail" or bool((student_logp == -torch.inf).any()):',
        tests=DIVERGENCES,
    ),
    Mutant(
        name="padding of a ragged row through the log-sum-exp (NaN gradient)",
        source="redai-studio/Relax; contract 14",
        file=f"{OBJECTIVES}/divergence.py",
        find="    return logp.masked_fill(is_void, 0.0).log_softmax(dim=1).masked_fill(is_empty, -torch.inf)",
        replace="    return logp - logp.logsumexp(dim=1, keepdim=True)",
        tests=DIVERGENCES,
    ),
    Mutant(
        name="clip of each entry after the sum",
        source="THUDM/slime 2074",
        file=f"{OBJECTIVES}/divergence.py",
        find="        terms = terms.clamp(max=entry_clip)\n    return terms.sum(dim=1).to(student_logp.dtype)",
        replace="        return terms.sum(dim=1).clamp(max=entry_clip).to(student_logp.dtype)\n"
        "    return terms.sum(dim=1).to(student_logp.dtype)",
        tests=DIVERGENCES,
    ),
    Mutant(
        name="tail as 1 minus the mass of the support",
        source="natolambert/rlhf-book (bf16 tail)",
        file=f"{OBJECTIVES}/chunks.py",
        find="    cells = cells - normaliser[:, None]\n",
        replace="    cells = cells - normaliser[:, None]\n"
        "    mass = cells[:, :-1].exp().sum(dim=1, keepdim=True).clamp(max=1 - 1e-7)\n"
        "    cells = torch.cat([cells[:, :-1], torch.log1p(-mass)], dim=1)\n",
        tests=SINGLE,
    ),
    Mutant(
        name="of equal logits another than the lowest id",
        source="contract 24",
        file=f"{OBJECTIVES}/support.py",
        find="    ids = ids.sort(dim=1).values\n",
        replace="    ids = ids.sort(dim=1, descending=True).values\n",
        tests=(f"{TESTS}/objectives/test_support.py", *SINGLE, *PARALLEL),
    ),
    Mutant(
        name="GSPO averages the advantages of a sequence",
        source="slime, Relax; contract 15",
        file=f"{OBJECTIVES}/sequence_policy.py",
        find="gain = advantage.detach()",
        replace="gain = advantage.detach().mean().expand_as(advantage)",
        tests=(f"{TESTS}/objectives/test_sequence_policy.py",),
    ),
    Mutant(
        name="advantages whitened after the teacher's term was added",
        source="SkyRL 2256; contract 16",
        file=f"{CORE}/algorithms/policy_gradient.py",
        find="            advantages = advantages - _penalty(opd, gaps, lengths)\n",
        replace="            advantages = advantages - _penalty(opd, gaps, lengths)\n"
        "            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)\n",
        tests=ARMS,
    ),
    Mutant(
        name="sign-dependent gate by the distillation-modified advantage",
        source="miles 1127; contract 17",
        file=f"{CORE}/algorithms/objective.py",
        find='sign_of=_present(batch.task_advantage, name="task_advantage"),',
        replace="sign_of=advantage,",
        tests=ARMS,
    ),
    Mutant(
        name="rollouts without context stay in the denominator",
        source="huggingface/trl 6439; contract 18",
        file=f"{OBJECTIVES}/reduction.py",
        find="carried = [length if is_active else 0 for length, is_active in zip(lengths, active, strict=True)]",
        replace="carried = [length for length, is_active in zip(lengths, active, strict=True)]",
        tests=(f"{TESTS}/objectives/test_reduction.py", *ARMS),
    ),
    Mutant(
        name="denominators of a micro-batch",
        source="huggingface/trl 6006, modelscope/ms-swift 10117; contract 19",
        file=f"{CORE}/backends/policy.py",
        find="            return losses.loss.sum()\n",
        replace="            return losses.loss.sum() / len(rows)\n",
        tests=(f"{TESTS}/backends/test_hf.py",),
    ),
    Mutant(
        name="EMA rate taken for the share of the old weights",
        source="huggingface/trl 4935; contract 32",
        file=f"{CORE}/backends/hf_model.py",
        find="parameter.lerp_(weights[name].to(parameter), rate)",
        replace="parameter.lerp_(weights[name].to(parameter), 1.0 - rate)",
        tests=(f"{TESTS}/teacher/test_schedule.py",),
    ),
    Mutant(
        name="EMA teacher is not in the checkpoint",
        source="lasgroup/SDPO, huggingface/trl 1.16",
        file=f"{CORE}/cell.py",
        find='return {name: worker for name, worker in self.named().items() if name != "anchor"}',
        replace='return {name: worker for name, worker in self.named().items() if name == "student"}',
        tests=(f"{TESTS}/test_cell_resume.py",),
    ),
    Mutant(
        name="teacher commits although nothing was trained",
        source="redai-studio/Relax; contract 21",
        file=f"{CORE}/algorithms/distillation.py",
        find="committed = was_updated and tools.teacher.follow(tools.student)",
        replace="committed = tools.teacher.follow(tools.student)",
        tests=ARMS,
    ),
    Mutant(
        name="teacher at temperature 1",
        source="THUDM/slime 2085, verl 5592; contract 6",
        file=f"{CORE}/backends/scorer.py",
        find="heads = [part.model.projection_head(temperature=self._temperature) for part in self._parts]",
        replace="heads = [part.model.projection_head(temperature=1.0) for part in self._parts]",
        tests=(*MODELS, f"{TESTS}/teacher/test_schedule.py", *ARMS),
    ),
    Mutant(
        name="scores one position late",
        source="areal-project/AReaL 1728; contract 1",
        file=f"{CORE}/backends/hf_model.py",
        find="inputs[index, 1 : lengths[index]] = torch.tensor(row.response_ids[:-1], dtype=torch.long)",
        replace="inputs[index, : lengths[index]] = torch.tensor(row.response_ids, dtype=torch.long)",
        tests=MODELS,
    ),
    Mutant(
        name="importance weight left out of the divergence",
        source="linkedin/Liger-Kernel 1082",
        file=f"{CORE}/algorithms/objective.py",
        find="return TokenLosses(loss=weight * current * divergence, sums=sums)",
        replace="return TokenLosses(loss=weight * divergence, sums=sums)",
        tests=ARMS,
    ),
    Mutant(
        name="gradient through the importance weight",
        source="miles 1966; contract 11",
        file=f"{OBJECTIVES}/policy_loss.py",
        find="return log_ratio(logp.detach(), old_logp).exp().clamp(max=cap)",
        replace="return log_ratio(logp, old_logp).exp().clamp(max=cap)",
        tests=(f"{TESTS}/objectives/test_policy_loss.py",),
    ),
    Mutant(
        name="a failed teacher read as agreement",
        source="THUDM/slime 2032, Relax; contract 27",
        file=f"{CORE}/algorithms/distillation.py",
        find="    if fraction > life.max_failed_fraction:",
        replace="    if False:",
        tests=ARMS,
    ),
    Mutant(
        name="teacher prompt cut from the right",
        source="huggingface/trl 5862, Relax; contract 4",
        file=f"{CORE}/teacher/request.py",
        find="    if context is None:\n        return None\n",
        replace="    if context is None:\n        return None\n"
        "    return TeacherPrompt(text=prompt.text, ids=prompt.ids[:limit], is_cut=True)\n",
        tests=REQUESTS,
    ),
    Mutant(
        name="prompts of unlike headers accepted",
        source="siyan-zhao/OPSD 3, 10, 16; contract 4",
        file=f"{CORE}/teacher/request.py",
        find="if not header or end != header:",
        replace="if False:",
        tests=REQUESTS,
    ),
    Mutant(
        name="a success demonstrates to itself",
        source="natolambert/rlhf-book",
        file=f"{CORE}/teacher/context.py",
        find="siblings = [i for i in demonstrations if i != index or not spec.demonstration.exclude_self]",
        replace="siblings = list(demonstrations)",
        tests=REQUESTS,
    ),
    Mutant(
        name="reward over the accepted groups only",
        source="natolambert/rlhf-book",
        file=f"{CORE}/trainer.py",
        find="**_reward_metrics(polled),",
        replace="**_reward_metrics(accepted),",
        tests=(f"{TESTS}/test_trainer.py",),
    ),
    Mutant(
        name="rows of the zigzag layout mirrored at the wrong chunk",
        source="THUDM/slime 1076, 1135; contract 24",
        file=f"{OBJECTIVES}/context_parallel.py",
        find="return min(chunk, 2 * self.size - 1 - chunk)",
        replace="return chunk % self.size",
        tests=CONTEXT_PARALLEL,
    ),
    Mutant(
        name="rank 0 owns the last response row",
        source="slime (terminal reward); contract 25",
        file=f"{OBJECTIVES}/context_parallel.py",
        find="    return layout.owner(first + response_length - 1)\n",
        replace="    return 0\n",
        tests=CONTEXT_PARALLEL,
    ),
    Mutant(
        name="no gradient for a sampled padding token",
        source="torch.nn.Embedding(padding_idx)",
        file=f"{CORE}/backends/hf_model.py",
        find="self.model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]",
        replace="pass",
        tests=(f"{TESTS}/backends/test_hf_model.py",),
    ),
    Mutant(
        name="Megatron: norms decay, for wd_mult is nobody's",
        source="megatron-core without its scheduler",
        file=f"{MEGATRON}/optimizer.py",
        find='self._spec.weight_decay * group["wd_mult"]',
        replace="self._spec.weight_decay",
        tests=(f"{STEPS}[tp2]",),
    ),
    Mutant(
        name="Megatron: one step count for all parameters",
        source="megatron-core's distributed optimizer without Apex",
        file=f"{MEGATRON}/optimizer.py",
        find="value.clone() if entry == _COUNT",
        replace='self.__dict__.setdefault("_shared", value) if entry == "step"',
        tests=(f"{STEPS}[dp2-shared]",),
    ),
    Mutant(
        name="Megatron: response rows one position late",
        source="a label shift after the context split; contract 24",
        file=f"{MEGATRON}/model.py",
        find="prompt_length=len(row.prompt_ids),",
        replace="prompt_length=len(row.prompt_ids) - 1,",
        tests=(f"{LAYOUTS}[cp2]",),
    ),
    Mutant(
        name="Megatron: every context rank reports the whole row",
        source="THUDM/slime 1076; contract 20",
        file=f"{MEGATRON}/model.py",
        find="return bool(self.groups.context.rank() == 0)",
        replace="return True",
        tests=(f"{LAYOUTS}[cp2]",),
    ),
    Mutant(
        name="Megatron: the value head's gradient summed over tensor ranks",
        source="megatron-core's gather; contract 12",
        file=f"{MEGATRON}/model.py",
        find="same = gather(states, tensor_parallel_output_grad=False)",
        replace="same = gather(states, tensor_parallel_output_grad=True)",
        tests=(f"{LAYOUTS}[tp2-sp]",),
    ),
)
