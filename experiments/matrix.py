"""From an experiment and a selection to the cells of the matrix, their bases and their fingerprints."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pydantic import ValidationError

from data_prep.manifest import Manifest
from data_prep.table import DATASETS, dataset_entry
from data_prep.user_data import is_named_by_user
from experiments.arms import ARMS
from experiments.profiles import PROFILES
from reports.rows import PlannedCell
from sdpo_core.algorithm_specs import AlgorithmSpec, TeacherSpec
from sdpo_core.backends.table import backend_extras, backend_faults
from sdpo_core.base_specs import AnyBaseSpec, BaseSpec
from sdpo_core.errors import SpecError
from sdpo_core.extras import Extra
from sdpo_core.fingerprint import base_fingerprint, cell_fingerprint
from sdpo_core.journal import Store, read_json
from sdpo_core.layout import LayoutSpec
from sdpo_core.rollout.table import engine_extras, engine_faults
from sdpo_core.specs import CellSpec, ExperimentSpec, ProbeSpec, ProfileSpec, TaskProfile
from sdpo_core.teacher.table import placement_extras


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Part of a matrix; None keeps what the experiment declares."""

    datasets: tuple[str, ...] | None = None
    arms: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    profile: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBase:
    """Base weights that cells start from, and the data sets they are probed on."""

    fingerprint: str
    spec: AnyBaseSpec
    data_digests: Mapping[str, str]
    probes: tuple[ProbeSpec, ...]


def select(experiment: ExperimentSpec, selection: Selection) -> ExperimentSpec:
    """The experiment narrowed to `selection`.

    A selected data set that the experiment does not declare passes here; `cells_of` refuses it, once it is known
    whether it has training rows at all.

    Raises:
        SpecError: every name that is unknown, given twice, or not part of the experiment, in one message.
    """
    faults = [
        *_faults("data set", experiment.datasets, known=_known(experiment.datasets)),
        *_faults("data set", selection.datasets or (), known=_known(selection.datasets or ())),
        *_faults("arm", experiment.arms, known=ARMS),
        *_faults("arm", selection.arms or (), known=ARMS, declared=experiment.arms),
        *_faults("seed", experiment.seeds),
        *_faults("seed", selection.seeds or (), declared=experiment.seeds),
        *_faults("profile", (experiment.profile,), known=PROFILES),
        *_faults("profile", () if selection.profile is None else (selection.profile,), known=PROFILES),
    ]
    named = {"data set": experiment.datasets, "arm": experiment.arms, "seed": experiment.seeds}
    faults += [f"got no {kind}, expected at least one" for kind, names in named.items() if not names]
    if faults:
        listed = "; ".join(dict.fromkeys(faults))
        raise SpecError(f"{experiment.name}: {listed}. Correct the selection or the declaration.")
    return experiment.model_copy(
        update={
            "datasets": selection.datasets or experiment.datasets,
            "arms": selection.arms or experiment.arms,
            "seeds": selection.seeds or experiment.seeds,
            "profile": experiment.profile if selection.profile is None else selection.profile,
        }
    )


def datasets_to_prepare(selected: ExperimentSpec) -> tuple[str, ...]:
    """The data sets of the cells and of their bases' warm-ups."""
    profile = PROFILES[selected.profile]
    tasks = {dataset_entry(name).task for name in selected.datasets}
    bases = [base for task in sorted(profile.tasks.keys() & tasks) for base in _bases(profile.tasks[task])]
    return tuple(dict.fromkeys((*selected.datasets, *(name for base in bases for name in base.datasets))))


def cells_of(selected: ExperimentSpec, *, declared: ExperimentSpec) -> tuple[CellSpec, ...]:
    """Every cell of `selected`, data set by data set, seed by seed, arm by arm.

    Raises:
        SpecError: a profile whose parts do not fit; a data set that `declared` does not name, or whose task the profile
            has no numbers for; an arm that does not fit those numbers.
    """
    profile = PROFILES[selected.profile]
    check_profile(profile)
    faults = list(_faults("data set", selected.datasets, declared=declared.datasets))
    faults += [
        f"got data set {name!r} of task {dataset_entry(name).task!r}, expected a task of profile {profile.name!r} "
        f"({', '.join(profile.tasks)})"
        for name in selected.datasets
        if dataset_entry(name).task not in profile.tasks
    ]
    if faults:
        raise SpecError(f"{selected.name}: {'; '.join(faults)}. Choose other data sets or another profile.")
    cells = []
    for dataset, seed, arm in product(selected.datasets, selected.seeds, selected.arms):
        try:
            cells.append(_cell(dataset, arm=arm, seed=seed, profile=profile))
        except SpecError as error:
            faults.append(str(error))
    if faults:
        listed = "; ".join(dict.fromkeys(faults))
        raise SpecError(f"{selected.name}: {listed}. Choose other arms or another profile.")
    return tuple(cells)


def check_profile(profile: ProfileSpec) -> None:
    """Raise SpecError with all that backend, engine and bases of the profile cannot do, installed or not."""
    layouts = _layouts(profile)
    faults = [
        *backend_faults(profile.backend, layouts=layouts, dtype=profile.dtype),
        *engine_faults(profile.engine, backend=profile.backend),
    ]
    made = {base.name for task in profile.tasks.values() for base in _bases(task) if isinstance(base, BaseSpec)}
    if made and profile.dtype != "float32":
        faults.append(
            f"got dtype {profile.dtype!r} for {', '.join(sorted(made))}, expected float32, as a warm-up makes them: "
            "rounded, they are other weights than their digest says"
        )
    if faults:
        raise SpecError(f"profile {profile.name}: {'; '.join(faults)}. Correct it in experiments/profiles.py.")


def extras_of(profile: ProfileSpec) -> tuple[Extra, ...]:
    """What the profile's backend, engine and teacher need beside the lock, installed or not."""
    return (
        *backend_extras(profile.backend, layouts=_layouts(profile)),
        *engine_extras(profile.engine),
        *placement_extras(profile.teacher_placement),
    )


def plan_bases(cells: Sequence[CellSpec], *, manifests: Mapping[str, Manifest]) -> tuple[PlannedBase, ...]:
    """The distinct bases of `cells`, teachers' included, each with a probe for every data set its cells train on."""
    bases: dict[str, PlannedBase] = {}
    for cell in cells:
        probe = ProbeSpec(
            dataset=cell.dataset,
            evaluation=cell.evaluation,
            max_response_tokens=cell.training.max_response_tokens,
            feedback_level=cell.training.feedback_level,
        )
        for spec in _bases(cell):
            digests = {name: manifests[name].digest for name in spec.datasets}
            fingerprint = base_fingerprint(spec, data_digests=digests)
            known = bases[fingerprint].probes if fingerprint in bases else ()
            bases[fingerprint] = PlannedBase(
                fingerprint=fingerprint,
                spec=spec,
                data_digests=digests,
                probes=known if probe in known else (*known, probe),
            )
    return tuple(bases.values())


def plan_cells(
    cells: Sequence[CellSpec], *, manifests: Mapping[str, Manifest], store: Store
) -> tuple[PlannedCell, ...]:
    """Cells with their fingerprints; those for which base weights do not exist yet have none."""
    return tuple(_planned(cell, manifests=manifests, store=store) for cell in cells)


def _planned(cell: CellSpec, *, manifests: Mapping[str, Manifest], store: Store) -> PlannedCell:
    fingerprints, digests = [], []
    for base in _bases(cell):
        key = base_fingerprint(base, data_digests={name: manifests[name].digest for name in base.datasets})
        record = store.bases / key / "base.json"
        fingerprints.append(key)
        digests.append(str(read_json(record)["weights_digest"]) if record.exists() else None)
    base_digest, teacher_digest = digests[0], digests[1] if len(digests) > 1 else None
    data_digest = manifests[cell.dataset].digest
    fingerprint = None
    if base_digest is not None and None not in digests:
        fingerprint = cell_fingerprint(
            cell, data_digest=data_digest, base_digest=base_digest, teacher_digest=teacher_digest
        )
    return PlannedCell(
        spec=cell,
        fingerprint=fingerprint,
        data_digest=data_digest,
        base_digest=base_digest,
        base_fingerprint=fingerprints[0],
        teacher_digest=teacher_digest,
        teacher_fingerprint=fingerprints[1] if len(fingerprints) > 1 else None,
    )


def _layouts(profile: ProfileSpec) -> tuple[LayoutSpec, LayoutSpec]:
    """The student's and that of its teacher and its anchor."""
    return profile.layout, profile.scorer_layout or profile.layout


def _bases(holder: CellSpec | TaskProfile) -> tuple[AnyBaseSpec, ...]:
    """The student's base and, where there is one, the teacher's."""
    return (holder.base,) if holder.teacher_base is None else (holder.base, holder.teacher_base)


def _cell(dataset: str, *, arm: str, seed: int, profile: ProfileSpec) -> CellSpec:
    """One cell; a SpecError of half a sentence where the arm does not fit the profile's numbers."""
    entry = dataset_entry(dataset)
    task = str(entry.task)
    numbers, algorithm = profile.tasks[task], ARMS[arm].algorithm
    teacher = _teacher(algorithm)
    wants_model = teacher is not None and teacher.weights == "profile"
    if wants_model and numbers.teacher_base is None:
        raise SpecError(
            f"got arm {arm!r}, whose teacher is a model of the profile, expected profile {profile.name!r} to name one "
            f"for task {task!r} (teacher_base)"
        )
    layout, scorer_layout = _layouts(profile)
    try:
        return CellSpec(
            # Of a user's file the name that stands for its content: where it lies is no part of what a cell is.
            dataset=entry.name,
            task=task,
            arm=arm,
            profile=profile.name,
            seed=seed,
            algorithm=algorithm,
            base=numbers.base,
            teacher_base=numbers.teacher_base if wants_model else None,
            optimizer=numbers.optimizer,
            training=numbers.training,
            evaluation=numbers.evaluation,
            backend=profile.backend,
            engine=profile.engine,
            dtype=profile.dtype,
            threads_per_worker=profile.threads_per_worker,
            layout=layout,
            scorer_layout=scorer_layout,
            sglang=profile.sglang,
            teacher_placement="trainer" if teacher is None else profile.teacher_placement,
        )
    except ValidationError as error:
        reasons = ", ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors())
        raise SpecError(f"got arm {arm!r} on {dataset!r} under profile {profile.name!r}: {reasons}") from None


def _known(names: Sequence[str]) -> tuple[str, ...]:
    """The data sets of the table, and those that name where their rows come from."""
    return (*DATASETS, *filter(is_named_by_user, names))


def _teacher(algorithm: AlgorithmSpec) -> TeacherSpec | None:
    """The teacher of an arm, or of its distillation term."""
    teacher: TeacherSpec | None = getattr(getattr(algorithm, "opd", None) or algorithm, "teacher", None)
    return teacher


def _faults(
    kind: str,
    names: Sequence[str | int],
    *,
    known: Collection[object] | None = None,
    declared: Collection[object] | None = None,
) -> Iterator[str]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"got {kind} {name!r} {names.count(name)} times, expected it once"
        if known is not None and name not in known:
            yield f"got {kind} {name!r}, expected one of {', '.join(map(str, known))}"
        elif declared is not None and name not in declared:
            yield f"got {kind} {name!r}, expected one the experiment declares ({', '.join(map(str, declared))})"
