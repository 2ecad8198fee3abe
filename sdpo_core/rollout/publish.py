"""The student's weights on their way to a rollout engine, with a canary that shows they have arrived.

The canary is a few responses that the trainer itself has scored: an engine that holds other weights, or reads them by
the wrong names, gives them other log-probabilities. A teacher's weights are refused: it never samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from jaxtyping import Float
from torch import Tensor

from sdpo_core.backends.base import Policy, RowScores, ScoringModel, TokenRow
from sdpo_core.errors import CellError, SpecError
from sdpo_core.specs import Dtype

# Of the canary, in nats. In float32 the gap is that of sums in another order; bfloat16 keeps 8 bits of logits of about
# 10.
TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.25}
RESPONSE_TOKENS = 8
_RESPONSES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Weights by Hugging Face name, how often they had changed, and the trainer's scores of the canary under them."""

    version: int
    weights: Mapping[str, Tensor]
    canary: tuple[TokenRow, ...]
    scores: tuple[RowScores, ...]


def publish(policy: Policy | ScoringModel, *, canary: tuple[TokenRow, ...]) -> Publication:
    """The policy's weights as they are now; on several processes all of them call it.

    Raises:
        SpecError: the weights are a teacher's.
    """
    if not isinstance(policy, Policy):
        raise SpecError(
            f"publish: got a {type(policy).__name__}, expected the student's policy. A teacher's weights go to no "
            "rollout engine."
        )
    return Publication(
        version=policy.weights_version(),
        weights=policy.weights(),
        canary=canary,
        scores=policy.score(canary, top_k=0),
    )


def canary_rows(prompts: Sequence[tuple[int, ...]], *, vocab: int) -> tuple[TokenRow, ...]:
    """Responses of ids from all over the vocabulary, to the first of `prompts`, again where there is one alone."""
    spread = np.linspace(0, vocab - 1, _RESPONSES * RESPONSE_TOKENS).astype(int).reshape(_RESPONSES, -1)
    return tuple(
        TokenRow(prompt_ids=prompt, response_ids=tuple(ids.tolist()))
        for prompt, ids in zip(cycle(dict.fromkeys(prompts)), spread, strict=False)
    )


def check_canary(
    publication: Publication, found: Sequence[Float[np.ndarray, " token"]], *, tolerance: float, where: str
) -> float:
    """The largest gap between the engine's log-probabilities of the canary and the trainer's, in nats.

    Raises:
        CellError: it is above `tolerance`, or no number.
    """
    pairs = zip(found, publication.scores, strict=True)
    gaps = np.concatenate([np.abs(one - score.logps) for one, score in pairs])
    gap = float(gaps.max())
    if not gap <= tolerance:
        raise CellError(
            f"{where}: got log-probabilities that differ from the trainer's by {gap:.3g} nats after version "
            f"{publication.version} of the weights was published, expected at most {tolerance:g}. The engine holds "
            "other weights; look at its log, and run the experiment again from the last checkpoint."
        )
    return gap
