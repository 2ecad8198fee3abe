"""Task: finished records to the results page, beside it in MLflow and in Prefect."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from reports.document import write_report
from reports.export import cells_json
from reports.rows import CellRow, DatasetFacts, PlannedCell, load_bases, load_cells
from sdpo_core.journal import Store
from sdpo_core.specs import ArmSpec, ExperimentSpec
from tasks.collect import send_summary
from tasks.tracking import chart_url, compare_url

_log = logging.getLogger(__name__)

_TABLE_METRICS = (
    "test/accuracy",
    "test_at_best_dev/accuracy",
    "distill/divergence",
    "distill/kl_reverse",
    "distill/kl_forward",
    "distill/teacher_coverage",
    "feedback/effective_fraction",
    "cost/tokens_per_second",
    "cost/peak_memory_bytes/student",
    "cost/peak_memory_bytes/teacher",
)


@task(name="report", task_run_name="report {experiment.name}", cache_policy=NO_CACHE)
def report(
    experiment: ExperimentSpec,
    *,
    planned: Sequence[PlannedCell],
    datasets: Sequence[DatasetFacts],
    arms: Sequence[ArmSpec],
    home: Path,
    folder: Path,
    tracking_uri: str,
) -> Path:
    """The page on disk, as a summary run in MLflow, and as an artifact of the flow run."""
    store = Store(home)
    cells = load_cells(store, planned)
    page = write_report(experiment, cells, load_bases(store, planned), datasets, arms=arms, folder=folder)
    summary = send_summary(
        _table(cells),
        files=sorted(path for path in folder.rglob("*") if path.is_file()),
        tracking_uri=tracking_uri,
        experiment=experiment.name,
        profile=experiment.profile,
    )
    if summary is not None:
        runs = [cell.run_id for cell in cells if cell.run_id is not None]
        for what, url in (
            ("charts", chart_url(tracking_uri, experiment_id=summary.experiment_id)),
            ("compare", compare_url(tracking_uri, experiment_id=summary.experiment_id, run_ids=runs)),
        ):
            if url is not None:
                _log.info("MLflow %s: %s", what, url)
    key = f"results-{experiment.name}".lower().replace("_", "-")
    create_markdown_artifact(key=key, markdown=page.read_text(encoding="utf-8"), description=str(page))
    return page


def _table(cells: Sequence[CellRow]) -> Mapping[str, Sequence[str | float | None]]:
    """One row a cell."""
    rows = cells_json(cells)
    columns = {name: [row[name] for row in rows] for name in ("dataset", "arm", "seed", "state", "fingerprint")}
    return {**columns, **{name: [row["metrics"].get(name) for row in rows] for name in _TABLE_METRICS}}
