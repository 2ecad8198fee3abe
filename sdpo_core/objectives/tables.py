"""What is asked of a model's hidden states, and the small per-token tables that answer it.

Source: notation.md, "Fused head".
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.vocab_parallel import all_max


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherStates:
    """A teacher whose hidden states for the same tokens are here, and its head; both are constants."""

    hidden: Float[Tensor, "token teacher_hidden"]
    head: Head


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRequest:
    """What to read from the logits of each token.

    Attributes:
        own_ids: the sampled tokens.
        support_ids: the support; -1 pads a ragged row and makes an empty cell (-inf, gradient 0).
        top_k: how many of the ids this very model ranks highest (of equals the lowest id) are wanted; 0: none. They are
            the support, unless one is given.
        entropy: whether the entropy is wanted.
        teacher: scored at the same support, and what `full` compares with.
        full: a divergence over the whole vocabulary; needs `teacher`.
    """

    own_ids: Int[Tensor, " token"]
    support_ids: Int[Tensor, "token k"] | None = None
    top_k: int = 0
    entropy: bool = False
    teacher: TeacherStates | None = None
    full: FullDivergence | None = None

    @property
    def has_support(self) -> bool:
        return self.support_ids is not None or self.top_k > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Per-token numbers in nats; what was not requested is None.

    Attributes:
        logp: log-probability of the own id.
        support_ids: the support, as given or chosen.
        support_logp: of the support and, last, the tail; masses sum to 1.
        teacher_logp: the teacher's, on the same cells.
        best_ids: the ids ranked highest, where a support was given beside `top_k`.
        entropy: of the whole distribution.
        divergence: over the whole vocabulary.
    """

    logp: Float[Tensor, " token"]
    support_ids: Int[Tensor, "token k"] | None
    support_logp: Float[Tensor, "token cell"] | None
    teacher_logp: Float[Tensor, "token cell"] | None
    best_ids: Int[Tensor, "token best"] | None
    entropy: Float[Tensor, " token"] | None
    divergence: Float[Tensor, " token"] | None


def check_request(request: TableRequest, head: Head, *, tokens: int) -> None:
    """Refuse a request that cannot be met; in a group all processes refuse together.

    Raises:
        SpecError: parts that do not go together.
        DataError: other numbers of rows, an id out of range or twice in a row.
    """
    _check_parts(request, head)
    support, teacher = request.support_ids, request.teacher
    lengths = {
        "own_ids": len(request.own_ids),
        "support_ids": tokens if support is None else len(support),
        "teacher.hidden": tokens if teacher is None else len(teacher.hidden),
    }
    for name, length in lengths.items():
        if length != tokens:
            raise DataError(f"TableRequest.{name}: got {length} rows, expected {tokens}, one a hidden state.")
    own = request.own_ids
    support = own.new_empty(tokens, 0) if support is None else support
    ordered = support.sort(dim=1).values
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    is_outside = [_is_outside(ids, vocab=head.vocab, lowest=low) for ids, low in ((own, 0), (support, -1))]
    faults = torch.stack([*is_outside, is_repeated.any()])
    # Decided on what all processes see: one that raised alone would leave the others waiting.
    is_own, is_support, is_twice = all_max(faults.float(), group=head.group).bool().tolist()
    if is_own or is_support:
        name, lowest = ("own_ids", 0) if is_own else ("support_ids", -1)
        raise DataError(
            f"TableRequest.{name}: got an id outside {lowest} to {head.vocab - 1}, expected valid ids. "
            "Check that student and teacher share one tokenizer."
        )
    if is_twice:
        raise DataError(
            "TableRequest.support_ids: got an id twice in one row, expected distinct ids. Pad short rows with -1."
        )


def _check_parts(request: TableRequest, head: Head) -> None:
    faults = []
    teacher = request.teacher
    if not 0 <= request.top_k <= head.vocab:
        faults.append(f"top_k {request.top_k}, expected 0 to {head.vocab} (the vocabulary)")
    if request.full is not None and teacher is None:
        faults.append("a full divergence without a teacher, expected its hidden states")
    if teacher is not None and not request.has_support and request.full is None:
        faults.append("a teacher without a support or a full divergence, expected something to compare")
    if teacher is not None and (teacher.head.vocab, teacher.head.group) != (head.vocab, head.group):
        faults.append(f"a teacher of {teacher.head.vocab} ids, expected {head.vocab} in the same process group")
    if teacher is not None and request.full is not None and teacher.head.first != head.first:
        faults.append("teacher and student shares of other sizes, expected the same padded vocabulary")
    if faults:
        raise SpecError(f"TableRequest: got {'; got '.join(faults)}.")


def _is_outside(ids: Int[Tensor, "*shape"], *, vocab: int, lowest: int) -> Tensor:
    return ((ids < lowest) | (ids >= vocab)).any()
