"""The flow `sdpo-matrix`: prepare -> base models -> cells -> collect -> report."""

import logging
import os
import time
from pathlib import Path
from typing import Annotated, Any, cast

from prefect import State, flow
from prefect.futures import PrefectFuture, wait
from prefect.states import Completed, Failed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from pydantic import WithJsonSchema

from data_prep.table import DATASETS
from experiments.arms import ARMS
from experiments.matrix import Selection
from experiments.profiles import PROFILES
from experiments.table import EXPERIMENTS
from flows.machine import require_machine
from flows.matrix import Matrix, datasets_of, matrix_of, select_from
from flows.progress import Progress
from flows.services import RayHead, mlflow_uri, ray_head
from reports.rows import load_bases
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import CellStatus
from tasks.base_model import base_model
from tasks.collect import collect, send_cells
from tasks.prepare import prepare
from tasks.ray_jobs import RayJobs
from tasks.report import report
from tasks.train import train

# Schemas from the tables: Prefect's form offers the names and refuses any other before a run exists. In Python,
# `select_from` checks them with words of its own.
_EXPERIMENT_PATTERN = rf"^({'|'.join(EXPERIMENTS)}|.*\.py)$"
ExperimentName = Annotated[str, WithJsonSchema({"type": "string", "pattern": _EXPERIMENT_PATTERN})]
# A name of the table, or one that says where the rows are.
_DATASETS: list[dict[str, Any]] = [{"enum": list(DATASETS)}, {"pattern": "^(file|hub):"}]
DatasetName = Annotated[str, WithJsonSchema({"type": "string", "anyOf": _DATASETS})]
ArmName = Annotated[str, WithJsonSchema({"type": "string", "enum": list(ARMS)})]
ProfileName = Annotated[str, WithJsonSchema({"type": "string", "enum": list(PROFILES)})]

# Name of the final state when nothing could be started; the command line ends with another exit code then.
REFUSED = "Refused"
_WATCHERS = cast("TaskRunner[PrefectFuture[Any]]", ThreadPoolTaskRunner(max_workers=256))
_TICK_SECONDS = 1.0
_SEND_SECONDS = 20.0

_log = logging.getLogger(__name__)


@flow(name="sdpo-matrix", task_runner=_WATCHERS, log_prints=False)
def sdpo_matrix(
    experiment: ExperimentName,
    datasets: list[DatasetName] | None = None,
    arms: list[ArmName] | None = None,
    seeds: list[int] | None = None,
    profile: ProfileName | None = None,
) -> State[str]:
    """Train the missing cells of an experiment and write its results page.

    Args:
        experiment: A name of the table, or the path of a file that declares one.
        datasets: Data sets to train on; all that the experiment declares if empty.
        arms: Arms to train; all declared ones if empty.
        seeds: Seeds to train; all declared ones if empty.
        profile: Another profile than the declared one.
    """
    # Progress shows on the console of `sdpo run` and on the flow run's page, wherever the flow is started.
    for name in ("flows", "tasks"):
        logging.getLogger(name).setLevel(logging.INFO)
    home = Path(os.environ.get("SDPO_HOME", ".sdpo")).absolute()
    selection = Selection(
        datasets=tuple(datasets) if datasets else None,
        arms=tuple(arms) if arms else None,
        seeds=tuple(seeds) if seeds else None,
        profile=profile,
    )
    try:
        declared, selected = select_from(experiment, selection)
        require_machine(PROFILES[selected.profile])
        names = datasets_of(declared, selected)
        futures = [prepare.submit(name, home=home) for name in names]
        manifests = {name: future.result() for name, future in zip(names, futures, strict=True)}
        matrix = matrix_of(declared, selected, manifests=manifests, home=home)
        with ray_head(home) as ray:
            _train_missing(matrix, ray=ray, home=home)
        return _conclude(matrix, home=home, profile_is_declared=selection.profile is None)
    except SpecError as error:
        return Failed(name=REFUSED, message=str(error))
    except (CellError, DataError) as error:
        return Failed(message=str(error))


def _train_missing(matrix: Matrix, *, ray: RayHead, home: Path) -> None:
    """Bases first, then every cell that is not done, as many at once as the machine holds."""
    if all(matrix.status(cell).state == "done" for cell in matrix.planned()):
        _log.info("all %d cells are done already", len(matrix.cells))
        return
    endpoint = ray.endpoint()
    jobs = RayJobs(endpoint.address, token_path=endpoint.token_path)
    try:
        _make_bases(matrix, jobs=jobs, home=home)
        _train_cells(matrix, jobs=jobs, home=home)
    except BaseException:
        # Also when Prefect cancels the flow: the watchers below see their jobs end and stop waiting.
        jobs.stop_all()
        raise


def _make_bases(matrix: Matrix, *, jobs: RayJobs, home: Path) -> None:
    """Make what is not there. A base that fails leaves its cells failed and the others as they are."""
    matrix.write_specs()
    bases = matrix.bases_to_make()
    if not bases:
        return
    threads, gpus = matrix.profile.threads_per_worker, min(1, matrix.profile.gpus_per_cell)
    futures = [
        base_model.submit(
            base.spec.name, fingerprint=base.fingerprint, home=home, jobs=jobs, threads=threads, gpus=gpus
        )
        for base in bases
    ]
    _log.info("base models: %s", ", ".join(base.spec.name for base in bases))
    # Polled in the main thread, where a cancellation arrives.
    while _any_pending(futures):
        pass
    for future in futures:
        if not future.state.is_completed():
            _log.error("%s", future.state.message)
    for base in load_bases(matrix.store, matrix.planned()):
        _log.info(
            "base %s on %s: dev accuracy %.3f plain, %.3f with a demonstration",
            base.name,
            base.dataset,
            base.dev_accuracy,
            base.demonstration_accuracy,
        )


def _train_cells(matrix: Matrix, *, jobs: RayJobs, home: Path) -> None:
    matrix.write_specs()
    cells = [cell for cell in matrix.planned() if cell.fingerprint is not None and matrix.status(cell).state != "done"]
    profile = matrix.profile
    futures = [
        train.submit(
            cell.spec.label,
            fingerprint=str(cell.fingerprint),
            home=home,
            jobs=jobs,
            threads=profile.threads_per_worker,
            cpus=profile.cpus_per_cell,
            gpus=profile.gpus_per_cell,
        )
        for cell in cells
    ]
    progress = Progress(matrix)
    fingerprints = [str(cell.fingerprint) for cell in cells]
    uri = mlflow_uri(home)
    next_send = time.monotonic() + _SEND_SECONDS
    while _any_pending(futures):
        progress.tick()
        if time.monotonic() >= next_send:
            send_cells(fingerprints, home=home, tracking_uri=uri, experiment=matrix.declared.name, final=False)
            next_send = time.monotonic() + _SEND_SECONDS
    progress.tick()
    for future in futures:
        if not future.state.is_completed():
            _log.error("%s", future.state.message)


def _any_pending(futures: list[Any]) -> bool:
    """Wait a moment for all of them. Not through their `state`, which asks the server each time."""
    return bool(wait(futures, timeout=_TICK_SECONDS).not_done)


def _conclude(matrix: Matrix, *, home: Path, profile_is_declared: bool) -> State[str]:
    """Collect and report whatever is finished, then say whether all of it is."""
    planned = matrix.planned()
    uri = mlflow_uri(home)
    fingerprints = [cell.fingerprint for cell in planned if cell.fingerprint is not None]
    collect(fingerprints, home=home, tracking_uri=uri, experiment=matrix.declared.name)
    page = report(
        matrix.declared,
        planned=matrix.page_cells(),
        datasets=matrix.facts(),
        arms=matrix.arms(),
        home=home,
        folder=matrix.folder(Path("results"), profile_is_declared=profile_is_declared),
        tracking_uri=uri,
    )
    open_cells = [
        _why_open(cell.spec.label, status) for cell in planned if (status := matrix.status(cell)).state != "done"
    ]
    if open_cells:
        reasons = " | ".join(open_cells)
        return Failed(message=f"{len(open_cells)} of {len(planned)} cells are not done: {reasons} Page: {page}")
    return Completed(message=f"{len(planned)} cells done; {page}", data=str(page))


def _why_open(label: str, status: CellStatus) -> str:
    # A failure's note opens with the label already.
    note = status.note.removeprefix(f"{label}: ")
    return f"{label} {status.state}: {note}" if note else f"{label} {status.state}."
