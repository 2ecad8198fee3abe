"""Where every number comes from: cells, runs, data, versions, settings, and where this departs from the paper."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime

from reports.departures import departures
from reports.markdown import bullets, code, escape, table
from reports.page import Page
from reports.rows import BaseRow, CellRow
from reports.statistics import format_value
from sdpo_core.spec_base import Spec


def render(page: Page) -> str:
    """Tables of cells, data, base models, environments and settings, then the departures."""
    parts = (
        "## Provenance",
        "### Cells",
        "A fingerprint is the hash of all that determines a cell's result; its folder in the store holds the journal.",
        _cells(page),
        "### Data",
        _data(page),
        "### Base models",
        _bases(page),
        "### Environment",
        _environment(page),
        "### Arms",
        "Where the settings of each arm come from, and where they differ from there.",
        _arms(page),
        "### Settings",
        _settings(page),
        "### Where this departs from the paper (arXiv 2601.20802) and its code",
        bullets(departures(page)),
    )
    return "\n\n".join(parts)


def _cells(page: Page) -> str:
    header = ("Cell", "State", "Fingerprint", "MLflow run", "Started (UTC)", "Seconds", "Commit", "Teacher weights")
    return table(header, rows=[_cell(cell) for cell in page.cells])


def _cell(cell: CellRow) -> tuple[str, ...]:
    done = cell.state == "done"
    started = (
        cell.state if cell.started is None else f"{datetime.fromtimestamp(cell.started, tz=UTC):%Y-%m-%d %H:%M:%S}"
    )
    commit = str(cell.environment.get("commit") or "missing")
    return (
        escape(cell.spec.label),
        cell.state,
        code(cell.fingerprint) if cell.fingerprint else "missing",
        code(cell.run_id) if cell.run_id else "missing",
        started,
        format_value(cell.seconds, unit="s"),
        code(commit[:12]) if done else cell.state,
        _teacher_weights(cell),
    )


def _teacher_weights(cell: CellRow) -> str:
    """What the teacher worker's checksums say of its weights from start to end."""
    if cell.state != "done":
        return cell.state
    if cell.teacher is None:
        return "n/a"
    teacher = cell.workers.get("teacher", {})
    start, end = teacher.get("weights_sha256_start"), teacher.get("weights_sha256_end")
    if start is None or end is None:
        return "missing"
    return "unchanged" if start == end else "moved"


def _data(page: Page) -> str:
    rows = []
    for name in page.datasets:
        facts = page.facts_of(name)
        if facts is None:
            rows.append((escape(name), *("missing",) * 4))
            continue
        rows.append(
            (
                escape(name),
                code(facts.digest),
                f"{facts.rows_read:,}",
                _counts(facts.splits),
                _counts(facts.quarantined),
            )
        )
    return table(("Dataset", "Digest", "Rows read", "Rows by split", "Quarantined by reason"), rows=rows)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{escape(name)} {count:,}" for name, count in counts.items()) or "none"


def _bases(page: Page) -> str:
    rows = [
        (escape(dataset), *_base_cells(base))
        for dataset in page.datasets
        for base in (page.base_of(dataset), *page.teacher_bases_of(dataset))
    ]
    return table(("Dataset", "Model", "Base fingerprint", "Weights digest", "Dev problems probed"), rows=rows)


def _base_cells(base: BaseRow | None) -> tuple[str, ...]:
    if base is None:
        return ("missing",) * 4
    return escape(base.name), code(base.fingerprint), code(base.weights_digest), f"{base.dev_problems:,}"


def _environment(page: Page) -> str:
    """Every value met, with the number of finished cells that ran under it."""
    done = [cell for cell in page.cells if cell.state == "done"]
    names = dict.fromkeys(name for cell in done for name in cell.environment)
    if not names:
        return "No cell is finished."
    rows = [(escape(name), _tally(str(cell.environment.get(name, "missing")) for cell in done)) for name in names]
    return table(("What", "Value (finished cells)"), rows=rows)


def _tally(values: Iterable[str]) -> str:
    return "; ".join(f"{code(value)} ({count})" for value, count in sorted(Counter(values).items()))


def _arms(page: Page) -> str:
    rows = []
    for arm in page.arms:
        declared = page.declared(arm)
        words = ("missing",) * 2 if declared is None else (escape(declared.meaning), escape(declared.source))
        rows.append((escape(arm.name), *words, _fields(page.spec_of(arm).algorithm)))
    return table(("Arm", "What it is", "Settings from", "Values"), rows=rows)


def _settings(page: Page) -> str:
    rows = []
    for dataset in page.datasets:
        spec = next(cell.spec for cell in page.cells if cell.dataset == dataset)
        parts = {"training": spec.training, "optimizer": spec.optimizer, "evaluation": spec.evaluation}
        rows += [(f"{escape(dataset)}: {part}", _fields(value)) for part, value in parts.items()]
        run = f"backend={spec.backend} engine={spec.engine} dtype={spec.dtype} threads={spec.threads_per_worker}"
        rows.append((f"{escape(dataset)}: run", code(run)))
    return table(("What", "Values"), rows=rows)


def _fields(spec: Spec) -> str:
    flat = _flat(spec.model_dump(mode="json"))
    return code(" ".join(f"{name}={'none' if value is None else value}" for name, value in flat))


def _flat(fields: Mapping[str, object], *, path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, path=f"{path}{name}.")
        else:
            yield f"{path}{name}", value
