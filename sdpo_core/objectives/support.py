"""The support: the ids a divergence is taken over, and how much mass they hold.

A table row holds K + 1 cells: the K ids, then the tail (all other tokens). Its masses sum to 1, so a divergence of two
rows on the same ids is a true divergence. Tables come from `fused.tables`. Source: notation.md, "Support".
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.errors import DataError, SpecError


def top_ids(logits: Float[Tensor, "token vocab"], *, k: int) -> Int[Tensor, "token k"]:
    """The k ids with the largest logits, largest first; of equal logits the lowest id comes first.

    Equal logits are common in bfloat16, and `torch.topk` leaves their order open. Pass only the valid columns where the
    vocabulary is padded.

    Raises:
        SpecError: k is not in 1..vocab.
        DataError: a logit is NaN.
    """
    vocab = logits.shape[1]
    if not 1 <= k <= vocab:
        raise SpecError(f"top_ids: got k {k}, expected 1 to {vocab} (the vocabulary). Lower top_k.")
    ids = ranked_ids(logits.detach(), k=k)
    # NaN counts as the largest, so one anywhere in a row is among its best.
    if torch.isnan(logits.detach().gather(1, ids)).any():
        raise DataError("top_ids: got a NaN logit, expected numbers. Look for the step where the weights diverged.")
    return ids


def ranked_ids(logits: Float[Tensor, "token vocab"], *, k: int) -> Int[Tensor, "token k"]:
    """`top_ids` without its checks: a NaN counts as the largest."""
    best = torch.topk(logits, k, dim=1)
    threshold = best.values[:, -1:]
    is_cut = (logits == threshold).sum(dim=1) > (best.values == threshold).sum(dim=1)
    ids = best.indices
    if is_cut.any():
        ids[is_cut] = _ids_down_to(threshold[is_cut], logits[is_cut], k=k)
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def coverage(table: Float[Tensor, "token cell"]) -> Float[Tensor, " token"]:
    """Probability mass inside the support, in [0, 1], without gradient: 1 - tail. Exactly 1 where the tail is empty."""
    return -torch.expm1(table.detach()[:, -1])


def _ids_down_to(
    threshold: Float[Tensor, "token 1"], logits: Float[Tensor, "token vocab"], *, k: int
) -> Int[Tensor, "token k"]:
    """The ids above the threshold, filled up to k with the lowest of the ids at it."""
    above, level = logits > threshold, logits == threshold
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (level & (level.cumsum(dim=1, dtype=torch.int32) <= room))
    return chosen.nonzero()[:, 1].reshape(-1, k)
