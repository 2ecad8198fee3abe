"""The records a results page is made of, and how they are read from the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports.statistics import Value
from sdpo_core.algorithm_specs import CheckpointWeights, FolderWeights
from sdpo_core.base_specs import AnyBaseSpec, PlacedBaseSpec
from sdpo_core.errors import DataError
from sdpo_core.journal import CellState, CellStatus, MetricRecord, Store, read_json
from sdpo_core.metrics import METRICS, Trait
from sdpo_core.specs import CellSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCell:
    """A declared cell and where the store would hold it; no fingerprint while weights that it starts from are not made.

    `base_*`: the student's weights, `teacher_*`: those of `spec.teacher_base`, None without one.
    """

    spec: CellSpec
    fingerprint: str | None
    data_digest: str | None
    base_digest: str | None
    base_fingerprint: str | None
    teacher_digest: str | None
    teacher_fingerprint: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFacts:
    """What a page says of a data set.

    `splits`: rows a split; `baselines`: accuracy of a guess by name, then split; `quarantined`: rows by reason code.
    """

    name: str
    splits: Mapping[str, int]
    baselines: Mapping[str, Mapping[str, float]]
    digest: str
    quarantined: Mapping[str, int]
    rows_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow:
    """Test accuracy on some of the problems, last step: those whose `kind` (task, domain, ...) is `value`."""

    kind: str
    value: str
    problems: int
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRow:
    """One cell as the page sees it. `metrics` is empty unless the cell is done; times are in Unix seconds.

    `workers`: worker to its process id and weight checksums; `environment`: what the cell ran on.
    """

    dataset: str
    arm: str
    seed: int
    state: CellState
    note: str
    fingerprint: str | None
    data_digest: str | None
    base_fingerprint: str | None
    algorithm: str
    teacher: str | None
    spec: CellSpec
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    parts: tuple[PartRow, ...] = ()
    curves: tuple[MetricRecord, ...] = ()
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    run_id: str | None = None

    @property
    def traits(self) -> frozenset[Trait]:
        """What the arm promises to measure, read off its declaration."""
        return self.spec.traits

    @property
    def seconds(self) -> Value:
        """Wall seconds of the training that finished the cell."""
        if self.state != "done":
            return self.state
        return self.ended - self.started if self.started is not None and self.ended is not None else "missing"

    def value(self, name: str) -> Value:
        """The run's number of a metric, or the reason why there is none."""
        if self.state != "done":
            return self.state
        number = self.metrics.get(name)
        if number is not None:
            return float(number)
        is_lost = name not in self.metrics and METRICS[name].trait in self.traits
        return "missing" if is_lost else "n/a"

    def series(self, name: str) -> tuple[tuple[int, float | None], ...]:
        """(step, value) of a metric through the run."""
        return tuple((record.step, record.metrics[name]) for record in self.curves if name in record.metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRow:
    """A base model probed on one data set; accuracies are avg@k, None where the probe does not apply.

    `is_teacher`: no student starts from it, teachers of some arms do. `seconds` of its warm-up; None without one.
    """

    dataset: str
    name: str
    is_teacher: bool
    fingerprint: str
    weights_digest: str
    parameters: int
    seconds: float | None
    dev_problems: int
    dev_accuracy: float
    demonstration_accuracy: float
    feedback_accuracy: float | None
    test_problems: int
    test_accuracy: float
    test_format_rate: float


def teacher_text(spec: CellSpec) -> str | None:
    """How the page names the teacher: `static`, `EMA 0.05`, `static, from tiny-spell-teacher`; None without one.

    Weights other than the student's base are named.
    """
    teacher = spec.teacher
    if teacher is None:
        return None
    schedule = {"ema": "EMA", "trust_region": "trust region"}.get(teacher.schedule, teacher.schedule)
    life = schedule if teacher.rate is None else f"{schedule} {teacher.rate:g}"
    match teacher.weights:
        case FolderWeights(name=name):
            return f"{life}, from models/{name}"
        case CheckpointWeights(cell=cell, step=step):
            return f"{life}, from cell {cell} ({f'step {step}' if isinstance(step, int) else step})"
    return life if spec.teacher_base is None else f"{life}, from {spec.teacher_base.name}"


def cell_status(store: Store, planned: PlannedCell) -> CellStatus:
    """State of a planned cell; one whose base could not be made has failed with it."""
    if planned.fingerprint is not None and planned.data_digest is not None and planned.base_digest is not None:
        return store.status(
            planned.spec,
            data_digest=planned.data_digest,
            base_digest=planned.base_digest,
            teacher_digest=planned.teacher_digest,
        )
    for fingerprint in filter(None, (planned.base_fingerprint, planned.teacher_fingerprint)):
        error = store.bases / fingerprint / "error.json"
        if error.exists():
            return CellStatus(state="failed", note=str(read_json(error)["error"]))
    is_student = planned.base_digest is None
    whose, base = (
        ("its base model", planned.spec.base) if is_student else ("its teacher's base model", planned.spec.teacher_base)
    )
    if isinstance(base, PlacedBaseSpec) and not (store.models / base.folder).is_dir():
        return CellStatus(state="missing", note=f"{whose} is to be placed in the store as models/{base.folder}")
    return CellStatus(state="missing", note=f"{whose} is not made yet")


def load_cells(store: Store, planned: Sequence[PlannedCell]) -> tuple[CellRow, ...]:
    """Read every planned cell, in order; what is not there becomes a row that says why."""
    return tuple(_load_cell(store, cell) for cell in planned)


def load_bases(store: Store, planned: Sequence[PlannedCell]) -> tuple[BaseRow, ...]:
    """Read the probed bases of every data set among the planned cells, the student's first.

    One that is not probed yet has no row.
    """
    students = dict.fromkeys((cell.spec.dataset, cell.base_fingerprint, cell.spec.base) for cell in planned)
    teachers = dict.fromkeys((cell.spec.dataset, cell.teacher_fingerprint, cell.spec.teacher_base) for cell in planned)
    rows = (
        _load_base(store, dataset=dataset, fingerprint=fingerprint, spec=spec, is_teacher=is_teacher)
        for wanted, is_teacher in ((students, False), (teachers, True))
        for dataset, fingerprint, spec in wanted
        if fingerprint is not None and spec is not None
    )
    return tuple(row for row in rows if row is not None)


def _load_cell(store: Store, planned: PlannedCell) -> CellRow:
    status = cell_status(store, planned)
    if planned.fingerprint is None:
        return _row(planned, state=status.state, note=status.note)
    journal = store.journal(planned.fingerprint)
    if status.state != "done":
        return _row(planned, state=status.state, note=status.note, curves=journal.read_metrics())
    result = read_json(journal.result_path)
    tracking = read_json(journal.tracking_path) if journal.tracking_path.exists() else {}
    try:
        return _row(
            planned,
            state="done",
            note=status.note,
            curves=journal.read_metrics(),
            metrics=result["metrics"],
            parts=tuple(PartRow(**part) for part in result["parts"]["test"]),
            workers=result["workers"],
            environment=result["environment"],
            started=result["started"],
            ended=result["ended"],
            run_id=tracking.get("run_id"),
        )
    except KeyError as error:
        raise DataError(
            f"{journal.result_path}: got a result without {error}, expected a complete one. "
            f"Delete {journal.folder} to train {planned.spec.label} afresh."
        ) from None


def _row(
    planned: PlannedCell,
    *,
    state: CellState,
    note: str,
    metrics: Mapping[str, float | None] | None = None,
    parts: tuple[PartRow, ...] = (),
    curves: tuple[MetricRecord, ...] = (),
    workers: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, Any] | None = None,
    started: float | None = None,
    ended: float | None = None,
    run_id: str | None = None,
) -> CellRow:
    spec = planned.spec
    return CellRow(
        dataset=spec.dataset,
        arm=spec.arm,
        seed=spec.seed,
        state=state,
        note=note,
        fingerprint=planned.fingerprint,
        data_digest=planned.data_digest,
        base_fingerprint=planned.base_fingerprint,
        algorithm=spec.algorithm.name,
        teacher=teacher_text(spec),
        spec=spec,
        metrics=metrics or {},
        parts=parts,
        curves=curves,
        workers=workers or {},
        environment=environment or {},
        started=started,
        ended=ended,
        run_id=run_id,
    )


def _load_base(store: Store, *, dataset: str, fingerprint: str, spec: AnyBaseSpec, is_teacher: bool) -> BaseRow | None:
    folder = store.bases / fingerprint
    probe_path = folder / f"probe-{dataset}.json"
    if not probe_path.exists():
        return None
    base, probe = read_json(folder / "base.json"), read_json(probe_path)
    try:
        return BaseRow(
            dataset=dataset,
            name=spec.name,
            is_teacher=is_teacher,
            fingerprint=fingerprint,
            weights_digest=base["weights_digest"],
            parameters=base["parameters"],
            seconds=base["seconds"],
            dev_problems=probe["dev_problems"],
            dev_accuracy=probe["dev_accuracy"],
            demonstration_accuracy=probe["demonstration_accuracy"],
            feedback_accuracy=probe["feedback_accuracy"],
            test_problems=probe["test_problems"],
            test_accuracy=probe["test_accuracy"],
            test_format_rate=probe["test_format_rate"],
        )
    except KeyError as error:
        raise DataError(
            f"{probe_path}: got a base or a probe without {error}, expected a complete one. Delete {folder}."
        ) from None
