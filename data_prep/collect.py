"""The first look at the rows: each is read, made canonical and spooled before the next one is read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.entry import DatasetEntry
from data_prep.permute import permuted
from data_prep.readers import SourceRow
from data_prep.shapes.base import Origin, Quarantined, RowRejectedError, comparison_key, parse_json_line
from data_prep.shapes.canonical import names_split
from data_prep.shapes.sciknoweval import split_options
from data_prep.shapes.table import recognise
from data_prep.sources import Source
from data_prep.splits import Outcome
from data_prep.spool import Spool
from sdpo_core.records import Problem

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

_UNKNOWN = "unknown"


def json_line(row: Mapping[str, Any]) -> bytes:
    """One line of a file of ours; ValueError for what JSON in UTF-8 cannot hold."""
    return f"{_encode(row)}\n".encode()


def collect(entry: DatasetEntry, sources: Sequence[Source], *, spool: Spool) -> tuple[int, ...]:
    """Spool what the sources of a data set hold; the number of rows read from each."""
    numbers = {source.label: number for number, source in enumerate(sources)}
    last_row: dict[str, tuple[int, int]] = {}
    for outcome in entry.policy.assign(outcomes(entry, sources)):
        label, number = outcome.source.label, outcome.row.number
        before, count = last_row.get(label, (0, 0))
        last_row[label] = (number, count + (number != before))
        _spool(entry, outcome, source=numbers[label], spool=spool)
    return tuple(last_row.get(source.label, (0, 0))[1] for source in sources)


def outcomes(entry: DatasetEntry, sources: Sequence[Source]) -> Iterator[Outcome]:
    """What becomes of each row, in the order in which the data set wants them."""
    for source in sources:
        if source.rows is not None:
            for row in entry.policy.order(source.rows()):
                yield from _outcomes(entry, row, source=source)


def spool_problem(problem: Problem, *, source: int, shape: str, extra: str, spool: Spool) -> None:
    """A problem as a canonical line."""
    spool.add_problem(problem, json_line(problem.to_json()), source=source, shape=shape, extra=extra)


def _outcomes(entry: DatasetEntry, row: SourceRow, *, source: Source) -> Iterator[Outcome]:
    shape = _UNKNOWN
    is_given = row.split is not None or source.file.split is not None
    try:
        parsed = _parsed(row, is_word=source.file.is_word_list)
        found = recognise(parsed)
        shape = found.name
        is_given = is_given or names_split(parsed)
        for result in found.problems(parsed, _origin(entry, row, source=source)):
            yield Outcome(row=row, source=source, shape=shape, result=_wanted(entry, result), given=is_given)
    except RowRejectedError as rejection:
        yield Outcome(row=row, source=source, shape=shape, result=rejection)
    except RecursionError:
        too_deep = RowRejectedError("bad_json", "the row is nested too deep")
        yield Outcome(row=row, source=source, shape=shape, result=too_deep)


def _parsed(row: SourceRow, *, is_word: bool) -> Mapping[str, Any]:
    if not isinstance(row.content, bytes):
        return row.content
    return {"word": row.content.decode("utf-8", errors="replace")} if is_word else parse_json_line(row.content)


def _origin(entry: DatasetEntry, row: SourceRow, *, source: Source) -> Origin:
    return Origin(
        dataset=entry.name,
        domain=entry.domain,
        source=source.file.source,
        repository=source.repository,
        revision=source.revision,
        path=source.label,
        line=row.number,
        # Without any split the policy makes one.
        split=row.split or source.file.split or "train",
    )


def _wanted(entry: DatasetEntry, result: Problem | RowRejectedError) -> Problem | RowRejectedError:
    if isinstance(result, Problem) and entry.tasks is not None and result.task not in entry.tasks:
        return RowRejectedError("other_task", f"got task {result.task}, expected {', '.join(sorted(entry.tasks))}")
    return result


def _spool(entry: DatasetEntry, outcome: Outcome, *, source: int, spool: Spool) -> None:
    result = outcome.result
    try:
        if isinstance(result, Problem):
            problem = result if entry.permute is None else permuted(result, seed=entry.permute)
            extra = _stem(problem) if entry.marks_stems else ""
            spool_problem(problem, source=source, shape=outcome.shape, extra=extra, spool=spool)
            return
    except (ValueError, RecursionError) as error:
        result = RowRejectedError("bad_json", f"the row holds what no JSON in UTF-8 can: {error}")
    row = Quarantined(
        code=result.code,
        note=result.note,
        path=outcome.source.label,
        line=outcome.row.number,
        split=outcome.row.split or outcome.source.file.split or "train",
        row=outcome.row.text(),
    )
    spool.add_rejected(json_line(row.to_json()), source=source, shape=outcome.shape, code=result.code)


def _stem(problem: Problem) -> str:
    """The question without its options, for comparison."""
    return comparison_key(split_options(problem.prompt[-1].content)[0])
