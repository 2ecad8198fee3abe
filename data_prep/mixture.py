"""Mixtures: data sets made of others. Training rows stand in the proportion of the weights, dev and test are all there.

No row comes twice: the part that is scarcest for its weight settles how many rows there are. Which rows of the others
stay, and the order of all, is settled by hashes of the mixture's name and the rows' ids.
"""

import json
from pathlib import Path

from data_prep.collect import spool_problem
from data_prep.entry import DatasetEntry
from data_prep.permute import permuted
from data_prep.spool import Spool
from sdpo_core.records import Problem

_SPLITS = ("train", "dev", "test")


def collect_parts(entry: DatasetEntry, *, home: Path, spool: Spool) -> None:
    """Spool the rows of the prepared parts; each keeps its id and the name of its data set."""
    for number, part in enumerate(entry.parts):
        for split in _SPLITS:
            path = home / "data" / part.entry.name / f"{split}.jsonl"
            with path.open(encoding="utf-8") as lines:
                for line_number, line in enumerate(lines, start=1):
                    problem = Problem.from_json(json.loads(line), where=f"{path}:{line_number}")
                    if entry.permute is not None:
                        problem = permuted(problem, seed=entry.permute)
                    shape = str(problem.source["shape"])
                    draw = f"{entry.name}:{problem.id}"
                    spool_problem(problem, source=number, shape=shape, extra=draw, spool=spool)
