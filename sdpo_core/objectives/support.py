"""The support: the ids a divergence is taken over, and the table of their and the tail's log-probabilities.

A table row holds K + 1 cells: the K ids, then the tail (all other tokens). Its masses sum to 1, so a divergence of two
rows on the same ids is a true divergence. Source: notation.md, "Support".

Rows are independent, but a NaN in a row's hidden state reaches the head's gradient: select the response rows before the
call instead of masking its result.
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


def bucket_logps(
    hidden: Float[Tensor, "token hidden"],
    head: Float[Tensor, "vocab hidden"],
    ids: Int[Tensor, "token k"],
    *,
    temperature: float,
    valid_vocab: int | None = None,
) -> Float[Tensor, "token k+1"]:
    """Log-probabilities of the given ids and, in the last column, of the tail; differentiable in `hidden` and `head`.

    The projection itself runs in float32 (float64 for float64 inputs): bfloat16 logits carry an error of up to 0.4 % of
    their size, which is larger than a tail of 1e-3.

    Args:
        hidden: [token, hidden] final hidden states, one row for each predicted token.
        head: [vocab, hidden] rows of the output projection.
        ids: [token, k] distinct ids below `valid_vocab`, in any order.
        temperature: divides the logits; the student and the teacher must share it.
        valid_vocab: rows of `head` from here on are padding and leave every normaliser. None: all rows are valid.

    Returns:
        [token, k+1] natural logarithms, full-vocabulary. Without a token outside `ids` the tail is -inf, with
        gradient 0.

    Raises:
        SpecError: temperature or valid_vocab out of range.
        DataError: an id out of range or twice in a row.
    """
    width = _valid_width(head.shape[0], valid_vocab=valid_vocab)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ head[:width].to(dtype).T
    return bucket_logps_of_logits(logits, ids, temperature=temperature)


def bucket_logps_of_logits(
    logits: Float[Tensor, "token vocab"],
    ids: Int[Tensor, "token k"],
    *,
    temperature: float,
    valid_vocab: int | None = None,
) -> Float[Tensor, "token k+1"]:
    """`bucket_logps` from logits. What bfloat16 logits have lost by rounding stays lost."""
    if not 0.0 < temperature < float("inf"):
        raise SpecError(f"bucket_logps: got temperature {temperature}, expected a positive number.")
    width = _valid_width(logits.shape[1], valid_vocab=valid_vocab)
    _check_ids(ids, width=width)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scaled = logits[:, :width].to(dtype) / temperature
    # The tail's log-sum-exp is rounded at the size of the logits: a common offset of 1e4 would cost it 1e-4.
    scaled = scaled - scaled.detach().amax(dim=1, keepdim=True)
    # Normalised over the cells, so that a row's masses sum to 1 within the rounding of K + 1 terms, not of the
    # vocabulary; log(1 - mass) instead would lose every tail below float32's 6e-8.
    cells = torch.cat([scaled.gather(1, ids), _tail_logit(scaled, ids)], dim=1)
    return cells.log_softmax(dim=1)


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


def _tail_logit(scaled: Float[Tensor, "token vocab"], ids: Int[Tensor, "token k"]) -> Float[Tensor, "token 1"]:
    """Log-sum-exp over what is not in `ids`; -inf with gradient 0 where nothing is left."""
    outside = scaled.scatter(1, ids, -torch.inf)
    # log-sum-exp of nothing has a NaN gradient: such rows get a filler first and lose it afterwards.
    is_empty = (outside.detach() == -torch.inf).all(dim=1, keepdim=True)
    tail = outside.masked_fill(is_empty, 0.0).logsumexp(dim=1, keepdim=True)
    return tail.masked_fill(is_empty, -torch.inf)


def _valid_width(columns: int, *, valid_vocab: int | None) -> int:
    width = columns if valid_vocab is None else valid_vocab
    if not 1 <= width <= columns:
        raise SpecError(
            f"bucket_logps: got valid_vocab {width}, expected 1 to {columns} (the head's rows). "
            "Pass the unpadded size of the tokenizer's vocabulary."
        )
    return width


def _check_ids(ids: Int[Tensor, "token k"], *, width: int) -> None:
    if ids.shape[1] < 1:
        raise DataError("bucket_logps: got 0 ids a token, expected at least 1.")
    if ((ids < 0) | (ids >= width)).any():
        raise DataError(
            f"bucket_logps: got ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {width - 1}. "
            "Check that student and teacher share one tokenizer."
        )
    ordered = ids.sort(dim=1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise DataError("bucket_logps: got an id twice in one row, expected distinct ids. Pass ids of top_ids.")
