"""One experiment as the flow and the command line see it: prepared, selected, planned. Imports no orchestrator."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_prep.manifest import Manifest, require_train
from data_prep.prepare import prepare_dataset
from experiments.arms import ARMS
from experiments.matrix import (
    PlannedBase,
    Selection,
    cells_of,
    datasets_to_prepare,
    plan_bases,
    plan_cells,
    select,
)
from experiments.profiles import PROFILES
from experiments.table import experiment
from reports.rows import DatasetFacts, PlannedCell, cell_status
from sdpo_core.journal import CellStatus, Store, read_json, write_json
from sdpo_core.specs import ArmSpec, CellSpec, ExperimentSpec, ProfileSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """`declared` is the experiment as written (with the profile in force), `cells` what is selected of it.

    `declared_cells`: every declared cell. A page shows the whole experiment, with what is missing as missing.
    """

    declared: ExperimentSpec
    declared_cells: tuple[CellSpec, ...]
    cells: tuple[CellSpec, ...]
    manifests: Mapping[str, Manifest]
    store: Store

    @property
    def profile(self) -> ProfileSpec:
        return PROFILES[self.declared.profile]

    def bases(self) -> tuple[PlannedBase, ...]:
        """The bases of the selected cells, their teachers' included."""
        return plan_bases(self.cells, manifests=self.manifests)

    def bases_to_make(self) -> tuple[PlannedBase, ...]:
        """The bases whose weights, or one of whose probes, are not in the store."""
        return tuple(base for base in self.bases() if not self._is_made(base))

    def planned(self) -> tuple[PlannedCell, ...]:
        """The selected cells with their fingerprints, as far as their bases exist."""
        return plan_cells(self.cells, manifests=self.manifests, store=self.store)

    def page_cells(self) -> tuple[PlannedCell, ...]:
        """The declared cells with their fingerprints, as far as their bases exist."""
        return plan_cells(self.declared_cells, manifests=self.manifests, store=self.store)

    def arms(self) -> tuple[ArmSpec, ...]:
        """The declared arms: what each is, and where its settings come from."""
        return tuple(ARMS[name] for name in self.declared.arms)

    def facts(self) -> tuple[DatasetFacts, ...]:
        """What the page says of each declared data set."""
        return tuple(_facts(self.manifests[name]) for name in self.declared.datasets)

    def status(self, planned: PlannedCell) -> CellStatus:
        """State of a cell."""
        return cell_status(self.store, planned)

    def folder(self, root: Path, *, profile_is_declared: bool) -> Path:
        """Where the page goes: under another name when the profile is not the declared one."""
        name = self.declared.name if profile_is_declared else f"{self.declared.name}-{self.declared.profile}"
        return root / name

    def write_specs(self) -> None:
        """Put what the jobs read into the store: specs of the bases, and of the cells whose bases exist."""
        for base in self.bases():
            write_json(
                self.store.bases / base.fingerprint / "spec.json",
                {
                    "fingerprint": base.fingerprint,
                    "spec": base.spec.model_dump(mode="json"),
                    "data_digests": dict(base.data_digests),
                    "probes": [probe.model_dump(mode="json") for probe in base.probes],
                },
            )
        for cell in self.planned():
            if cell.fingerprint is not None and cell.data_digest and cell.base_digest and cell.base_fingerprint:
                self.store.journal(cell.fingerprint).write_spec(
                    cell.spec,
                    fingerprint=cell.fingerprint,
                    data_digest=cell.data_digest,
                    base_digest=cell.base_digest,
                    base_fingerprint=cell.base_fingerprint,
                    teacher_digest=cell.teacher_digest,
                    teacher_fingerprint=cell.teacher_fingerprint,
                )

    def _is_made(self, base: PlannedBase) -> bool:
        folder = self.store.bases / base.fingerprint
        probes = {folder / f"probe-{probe.dataset}.json": probe.model_dump(mode="json") for probe in base.probes}
        return (folder / "base.json").exists() and all(
            path.exists() and read_json(path).get("probe") == declared for path, declared in probes.items()
        )


def select_from(name: str, selection: Selection) -> tuple[ExperimentSpec, ExperimentSpec]:
    """The experiment as declared (with the profile in force), and as selected."""
    declared = experiment(name)
    selected = select(declared, selection)
    return declared.model_copy(update={"profile": selected.profile}), selected


def datasets_of(declared: ExperimentSpec, selected: ExperimentSpec) -> tuple[str, ...]:
    """Every data set that a run of the selection reads or its page speaks of."""
    return tuple(dict.fromkeys((*datasets_to_prepare(selected), *datasets_to_prepare(declared))))


def matrix_of(
    declared: ExperimentSpec, selected: ExperimentSpec, *, manifests: Mapping[str, Manifest], home: Path
) -> Matrix:
    """The matrix of prepared data sets.

    Raises:
        SpecError: a data set without training rows, or one the experiment or the profile does not have.
    """
    for name in selected.datasets:
        require_train(manifests[name])
    # Cells and pages speak of a user's file by the name that stands for its content.
    names = tuple(manifests[name].name for name in declared.datasets)
    return Matrix(
        declared=declared.model_copy(update={"datasets": names}),
        # The whole declaration, also where less is selected: the page at the end needs all of it.
        declared_cells=cells_of(declared, declared=declared),
        cells=cells_of(selected, declared=declared),
        manifests={manifest.name: manifest for manifest in manifests.values()},
        store=Store(home),
    )


def load_matrix(name: str, selection: Selection, *, home: Path) -> Matrix:
    """Select, prepare and plan at once, for commands that run no flow."""
    declared, selected = select_from(name, selection)
    manifests = {dataset: prepare_dataset(dataset, home=home) for dataset in datasets_of(declared, selected)}
    return matrix_of(declared, selected, manifests=manifests, home=home)


def _facts(manifest: Manifest) -> DatasetFacts:
    baselines = {
        name: {split: score for split, score in scores.items() if score is not None}
        for name, scores in manifest.baselines.items()
    }
    return DatasetFacts(
        name=manifest.name,
        splits=manifest.splits,
        baselines={name: scores for name, scores in baselines.items() if scores},
        digest=manifest.digest,
        quarantined=manifest.quarantined,
        rows_read=manifest.rows_read,
    )
