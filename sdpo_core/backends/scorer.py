"""A model, or a mixture of two in their logits, that scores given responses without gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import Projection, TeacherQuestion, TeacherScores, TokenRow, WorkerFacts
from sdpo_core.backends.memory import peak_memory_bytes
from sdpo_core.backends.policy import NUMBERS, gather
from sdpo_core.backends.row_model import RowModel
from sdpo_core.backends.rows import own_ids, split_rows, token_numbers
from sdpo_core.errors import SpecError
from sdpo_core.objectives.divergence import topk_overlap
from sdpo_core.objectives.fused import score_tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A model of the mixture and the share its logits have."""

    model: RowModel
    share: float


class ModelScorer:
    """Scores responses with logits = sum over parts of share x logits; commits go to the last part.

    A sum of projections is one projection: of the parts' states side by side, each times its share, by their rows side
    by side. So a mixture costs two forward passes and no second way to take a table.
    """

    def __init__(self, parts: Sequence[Part], *, temperature: float, max_tokens: int) -> None:
        self._parts = tuple(parts)
        self._temperature = temperature
        self._max_tokens = max_tokens
        capped = [part.model.soft_cap for part in parts if part.model.soft_cap is not None]
        if len(parts) > 1 and capped:
            raise SpecError(
                f"scorer: got a mixture of models whose logits are capped at {capped[0]}, expected plain logits. "
                "Choose another schedule than 'trust_region' for this model."
            )

    @property
    def _followed(self) -> RowModel:
        return self._parts[-1].model

    # Not inference_mode: megatron-core keeps buffers from one call for the next, which may be one of training.
    @torch.no_grad()
    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores, ...]:
        """Scores of each response under its prompt, float32, at the sampling temperature."""
        if not questions:
            return ()
        rows = [question.row for question in questions]
        student = _student_ids(questions, support=support) if support in ("student", "union") else None
        head = self._head()
        parts: list[dict[str, Tensor]] = []
        for batch in self._followed.plan(rows, max_tokens=self._max_tokens):
            chosen = [rows[index] for index in batch]
            states, tokens = self._states(chosen)
            numbers = token_numbers(rows, batch, device=states.device)[tokens]
            asked = None if student is None else student.to(states.device)[numbers]
            own = own_ids(chosen, device=states.device)[tokens]
            columns = _columns(states, head, own=own, student=asked, support=support, top_k=top_k)
            parts.append({**columns, NUMBERS: numbers})
        whole = gather(self._followed, parts, rows=rows)
        return tuple(TeacherScores(**fields) for fields in split_rows(whole, rows))

    def _states(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        """States of the parts side by side, and which tokens they are of: all parts lie alike."""
        held = [part.model.held_states(rows) for part in self._parts]
        shares = [part.share for part in self._parts]
        if len(held) == 1:
            return shares[0] * held[0].hidden, held[0].tokens
        # In half precision each product would be rounded once more.
        dtype = torch.promote_types(held[0].hidden.dtype, torch.float32)
        states = torch.cat([share * part.hidden.to(dtype) for share, part in zip(shares, held, strict=True)], dim=1)
        return states, held[-1].tokens

    def _head(self) -> Head:
        heads = [part.model.projection_head(temperature=self._temperature) for part in self._parts]
        if len(heads) == 1:
            return heads[0]
        return Head(
            weight=torch.cat([head.weight for head in heads], dim=1),
            bias=self._mixed_bias([head.bias for head in heads]),
            temperature=self._temperature,
            vocab=heads[0].vocab,
            logit_scale=heads[0].logit_scale,
            group=heads[0].group,
        )

    def _mixed_bias(self, biases: Sequence[Tensor | None]) -> Tensor | None:
        found = [part.share * bias for part, bias in zip(self._parts, biases, strict=True) if bias is not None]
        return torch.stack(found).sum(dim=0) if found else None

    def projection(self) -> Projection:
        whole = [part.model.whole_projection() for part in self._parts]
        return Projection(
            weight=torch.cat([part.weight for part in whole], dim=1),
            bias=self._mixed_bias([part.bias for part in whole]),
            logit_scale=whole[0].logit_scale,
            soft_cap=whole[0].soft_cap,
            vocab=whole[0].vocab,
            version=self.projection_version(),
        )

    def projection_version(self) -> int:
        return self._followed.weights_version

    def weights(self) -> dict[str, Tensor]:
        return self._followed.weights()

    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None:
        self._followed.blend(weights, rate=rate)

    def save(self, folder: Path) -> None:
        self._followed.save_weights(folder)

    def load(self, folder: Path) -> None:
        self._followed.load_weights(folder)

    def facts(self) -> WorkerFacts:
        return self._followed.facts()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self._followed.device)


def _columns(
    states: Tensor, head: Head, *, own: Tensor, student: Tensor | None, support: Support | None, top_k: int
) -> dict[str, Tensor]:
    """The fields of `TeacherScores` for the tokens of `states`; `student`: its ids at each of them."""
    # Its own best ids are needed for themselves ("teacher", "union") or for the overlap ("student").
    request = TableRequest(
        own_ids=own,
        support_ids=student if support == "student" else None,
        top_k=0 if support in (None, "full") else top_k,
        entropy=True,
    )
    found = score_tables(states, head, request)
    assert found.entropy is not None
    columns = {"logps": found.logp, "entropies": found.entropy}
    if support == "full":
        return {**columns, "states": states}
    if support is None:
        return columns
    best = found.support_ids if found.best_ids is None else found.best_ids
    assert best is not None
    if support == "union":
        assert student is not None
        # The union is known only now: a second look at the logits.
        found = score_tables(states, head, TableRequest(own_ids=own, support_ids=union_ids(student, best)))
    assert found.support_ids is not None
    assert found.support_logp is not None
    columns |= {"support_ids": found.support_ids, "table": found.support_logp}
    return columns if student is None else {**columns, "overlap": topk_overlap(student, best)}


def _student_ids(questions: Sequence[TeacherQuestion], *, support: Support | None) -> Int[Tensor, "token k"]:
    """The student's ids of all tokens, which each question must bring."""
    asked = [question.student_ids for question in questions]
    missing = sum(ids is None for ids in asked)
    if missing:
        raise SpecError(
            f"scorer: got {missing} questions without the student's ids for support {support!r}, expected them "
            "in each. Ask the student first."
        )
    return torch.from_numpy(np.concatenate([ids for ids in asked if ids is not None]))


def union_ids(student: Int[Tensor, "token k"], teacher: Int[Tensor, "token k"]) -> Int[Tensor, "token union"]:
    """The ids of both sides, each once, ascending; 2k wide, rows with fewer end in -1."""
    both = torch.cat([student, teacher], dim=1).sort(dim=1).values
    is_again = torch.zeros_like(both, dtype=torch.bool)
    is_again[:, 1:] = both[:, 1:] == both[:, :-1]
    # Doubles go behind every id.
    last = torch.iinfo(both.dtype).max
    kept = both.masked_fill(is_again, last).sort(dim=1).values
    return kept.masked_fill(kept == last, -1)
