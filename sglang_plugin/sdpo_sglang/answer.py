"""The answer to a question: log-probabilities, tails, entropy and overlap, one row a response token.

Columns, each with the id that it carries on the wire:

    K       the given ids      log-probability at the temperature
    1       TAIL (-1)          log of the mass outside the given ids
    1       the own token      its log-probability
    1       ENTROPY (-2)       entropy in nats
    0 or 1  OVERLAP (-3)       share of the first min(K, top_k) given ids among the top_k best; with top_k > 0 and K > 0
    0 or 1  BEST_TAIL (-4)     log of the mass outside the given ids and the best ones; with `best`
    top_k   the best ids       log-probability, best first, of equal logits the lowest id first; with `best`
"""

import torch
from torch import Tensor

from sdpo_sglang.question import Question

TAIL, ENTROPY, OVERLAP, BEST_TAIL = -1, -2, -3, -4
# Rows at once: bounds the copies of the logits (128 rows of 152k float32 are 78 MB).
ROWS = 128


def score_rows(logits: Tensor, question: Question, *, first: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Values [n, columns] float32 and their ids [n, columns] int64, for the n rows from row `first` of the question on.

    `logits` [n, at least vocab] may be log-probabilities: a shift of a row changes nothing. Only the first `vocab`
    columns count. SGLang also asks for the row after the last one and drops it; it gets the last row's ids.
    """
    num_rows = len(question.own)
    if first < 0 or first + len(logits) > num_rows + 1:
        raise RuntimeError(f"score_rows: got rows {first} to {first + len(logits)}, expected 0 to {num_rows}.")
    values, ids = [], []
    for begin in range(0, len(logits), ROWS):
        part = logits[begin : begin + ROWS, :vocab].float()
        rows = torch.arange(first + begin, first + begin + len(part)).clamp(max=num_rows - 1)
        found = _score(
            part, given=question.ids[rows].to(part.device), own=question.own[rows].to(part.device), question=question
        )
        values.append(found[0])
        ids.append(found[1])
    return torch.cat(values), torch.cat(ids)


def _score(logits: Tensor, *, given: Tensor, own: Tensor, question: Question) -> tuple[Tensor, Tensor]:
    logps = (logits / question.temperature).log_softmax(dim=-1)
    columns = [logps.gather(1, given), _tail(logps, given), logps.gather(1, own[:, None])]
    ids = [given, _label(TAIL, logps), own[:, None], _label(ENTROPY, logps)]
    # A token of mass 0 has log-probability -inf and adds nothing.
    columns.append(-(logps.exp() * logps.clamp(min=torch.finfo(logps.dtype).min)).sum(dim=-1, keepdim=True))
    if question.top_k > 0:
        best = best_ids(logits, k=question.top_k)
        if question.has_overlap:
            kept = given[:, : question.top_k]
            shared = (kept[:, :, None] == best[:, None, :]).any(dim=2)
            columns.append(shared.float().mean(dim=1, keepdim=True))
            ids.append(_label(OVERLAP, logps))
        if question.best:
            columns += [_tail(logps, torch.cat([given, best], dim=1)), logps.gather(1, best)]
            ids += [_label(BEST_TAIL, logps), best]
    return torch.cat(columns, dim=1), torch.cat(ids, dim=1)


def best_ids(logits: Tensor, *, k: int) -> Tensor:
    """The k ids with the largest logits, largest first; of equal logits the lowest id comes first, also at the cut.

    NaN counts as the largest: its row's log-probabilities are NaN too, which whoever asked will see.
    """
    logits = torch.where(logits.isnan(), torch.inf, logits)
    level = torch.topk(logits, k, dim=1).values[:, -1:]
    above, at = logits > level, logits == level
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (at & (at.cumsum(dim=1, dtype=torch.int32) <= room))
    ids = chosen.nonzero()[:, 1].reshape(-1, k)
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _tail(logps: Tensor, ids: Tensor) -> Tensor:
    """Log of the mass outside `ids`; a log-sum-exp over it, since 1 minus the mass inside loses small ones."""
    return logps.scatter(1, ids, float("-inf")).logsumexp(dim=-1, keepdim=True)


def _label(label: int, like: Tensor) -> Tensor:
    return torch.full((len(like), 1), label, device=like.device)
