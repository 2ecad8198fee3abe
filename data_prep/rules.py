"""Rules that look across rows: repeats, groups that cross into test, contradicting golds, stems on both sides.

They see records only (`data_prep/spool.py`). Order matters: repeats go first, then rows whose group is in test or dev,
then flags on what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_prep.spool import SPLITS

TRAIN, DEV, TEST = (SPLITS.index(name) for name in ("train", "dev", "test"))

# What may become of a row that was read, by number. One that a mixture has no use for is neither kept nor counted.
KEPT, NOT_DRAWN = 0, 1
FATES = ("", "not_drawn", "exact_repeat", "repeated_id", "group_in_test", "group_in_dev")

Records = NDArray[np.void]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """What the rules say of each record, in their order.

    `fate`: a number of `FATES`. `witness`: the row that it was rejected for. `contradicts`: another kept row of its
    group has another gold. `shares_stem`: a test row whose `extra` occurs in train, too, whatever became of it there.
    """

    fate: NDArray[np.uint8]
    witness: NDArray[np.int32]
    contradicts: NDArray[np.bool_]
    shares_stem: NDArray[np.bool_]


def apply_rules(records: Records) -> Verdicts:
    """Keep the first of exact repeats, take training rows whose group is in test or dev out, flag contradictions."""
    count = len(records)
    verdicts = Verdicts(
        fate=np.zeros(count, dtype=np.uint8),
        witness=np.full(count, -1, dtype=np.int32),
        contradicts=np.zeros(count, dtype=np.bool_),
        shares_stem=np.zeros(count, dtype=np.bool_),
    )
    rows = np.flatnonzero(records["code"] == 0)
    if not len(rows):
        return verdicts
    _mark_stems(records, rows, verdicts=verdicts)
    _reject_repeats(records, rows, verdicts=verdicts)
    rows = rows[verdicts.fate[rows] == KEPT]
    groups = _codes(records["group"][rows])
    _reject_crossing(records, rows, groups=groups, verdicts=verdicts)
    is_kept = verdicts.fate[rows] == KEPT
    _mark_contradictions(records, rows[is_kept], groups=groups[is_kept], verdicts=verdicts)
    return verdicts


def thin(records: Records, *, weights: Sequence[float], fate: NDArray[np.uint8]) -> None:
    """Leave training rows out until the sources stand in the proportion of `weights`, as many rows as that allows.

    The rows of a source go in the order of their `extra`, so which ones stay is settled by their hashes.
    """
    is_train = (records["split"] == TRAIN) & (records["code"] == 0) & (fate == KEPT)
    rows = [np.flatnonzero(is_train & (records["source"] == source)) for source in range(len(weights))]
    scale = min(len(found) / weight for found, weight in zip(rows, weights, strict=True))
    for found, weight in zip(rows, weights, strict=True):
        order = np.argsort(records["extra"][found], kind="stable")
        # The tolerance keeps 0.1 * 30 from becoming 2.
        fate[found[order[int(weight * scale + 1e-9) :]]] = NOT_DRAWN


def _mark_stems(records: Records, rows: Indices, *, verdicts: Verdicts) -> None:
    is_test = records["split"][rows] == TEST
    tests = rows[is_test]
    stems = np.unique(records["extra"][rows[~is_test]])
    verdicts.shares_stem[tests] = np.isin(records["extra"][tests], stems)


def _reject_repeats(records: Records, rows: Indices, *, verdicts: Verdicts) -> None:
    """Of rows with the same question, options and gold, or the same id, the first stays.

    Test rows come first: of a row on both sides of the split, training loses its copy. Content is compared within one
    side of the split; across it, the rule on groups decides.
    """
    is_test = records["split"][rows] == TEST
    contents = _codes(records["content"][rows]) * 2 + is_test
    ids = _codes(records["id"][rows])
    is_suspect = (np.bincount(contents)[contents] > 1) | (np.bincount(ids)[ids] > 1)
    first_with_content = np.full(contents.max() + 1, -1, dtype=np.int32)
    first_with_id = np.full(ids.max() + 1, -1, dtype=np.int32)
    suspects = np.flatnonzero(is_suspect)
    for place in np.concatenate((suspects[is_test[suspects]], suspects[~is_test[suspects]])):
        row, content, id_ = rows[place], contents[place], ids[place]
        for fate, first in (("exact_repeat", first_with_content[content]), ("repeated_id", first_with_id[id_])):
            if first >= 0:
                verdicts.fate[row], verdicts.witness[row] = FATES.index(fate), first
                break
        else:
            first_with_content[content] = first_with_id[id_] = row


def _reject_crossing(records: Records, rows: Indices, *, groups: NDArray[np.int32], verdicts: Verdicts) -> None:
    """A group that stands in test leaves every other split; one that stands in dev leaves training."""
    splits = records["split"][rows]
    for fate, split in (("group_in_test", TEST), ("group_in_dev", DEV)):
        witness = np.full(groups.max() + 1, -1, dtype=np.int32)
        witness[groups[splits == split]] = rows[splits == split]
        found = witness[groups]
        crosses = (found >= 0) & (splits != split) & (splits != TEST) & (verdicts.fate[rows] == KEPT)
        verdicts.fate[rows[crosses]] = FATES.index(fate)
        verdicts.witness[rows[crosses]] = found[crosses]


def _mark_contradictions(records: Records, rows: Indices, *, groups: NDArray[np.int32], verdicts: Verdicts) -> None:
    golds = records["gold"][rows]
    lowest = np.full(groups.max(initial=0) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    highest = np.zeros_like(lowest)
    np.minimum.at(lowest, groups, golds)
    np.maximum.at(highest, groups, golds)
    verdicts.contradicts[rows] = lowest[groups] != highest[groups]


def _codes(hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Small numbers for hashes: equal ones for equal ones."""
    return np.unique(hashes, return_inverse=True)[1].astype(np.int32)
