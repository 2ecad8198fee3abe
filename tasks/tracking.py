"""Projection of journals to MLflow: one flat run a cell, one summary run a matrix. The only mlflow import.

The journal is the truth. Only lines under a committed checkpoint are sent, with the journal's own times, and MLflow
stores an equal (name, step, time, value) once: sending again changes nothing, and an outage only delays.
"""

import fcntl
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Experiment, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from requests.exceptions import RequestException

from sdpo_core.journal import CellState, Journal, MetricRecord, read_json, write_json

# MLflow's own limits of one log_batch call.
METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
TAG_CHARACTERS = 5000
SAMPLE_LINES = 200
ANSWER_SECONDS = 3


class TrackingError(Exception):
    """MLflow did not take a projection: try again later, nothing is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """An MLflow run; `url` is None when there is no server to look at it."""

    run_id: str
    experiment_id: str
    url: str | None


def project_cell(journal: Journal, *, tracking_uri: str, experiment: str, final: bool) -> TrackedRun:
    """Send what is committed and not sent yet, the cell's state, and at its end the result and artifacts.

    Args:
        journal: a cell with a `spec.json`.
        tracking_uri: an MLflow server, or the `sqlite:///` file of one.
        experiment: name of the declared experiment.
        final: nobody will go on with this cell in this run; an interrupted one is then shown as killed.

    Raises:
        TrackingError: within seconds, when the server or the store's file does not take it.
    """
    with _outage(f"MLflow {tracking_uri}, cell {journal.folder.name}"), _one_sender(journal):
        client = _client(tracking_uri)
        experiment_id = _experiment_id(client, experiment=experiment, tracking_uri=tracking_uri)
        records = _committed(journal)
        state = journal.status().state
        tags = _cell_tags(journal, experiment=experiment, state=state, records=records)
        run = _find_cell_run(client, journal=journal, experiment_id=experiment_id, tags=tags)
        sent = _lines_sent(journal, run=run)
        if run is None:
            run = _create_run(client, experiment_id=experiment_id, tags=tags, records=records)
            _log_params(client, run=run, params=flatten(read_json(journal.spec_path)["spec"]))
        if sent < len(records) or run.info.status != _run_status(state, final=final):
            _log_metrics(client, run=run, metrics=_metrics(records[sent:]))
            if state == "done":
                _log_result(client, run=run, journal=journal, records=records)
            _set_tags(client, run=run, tags=tags)
            _set_status(client, run=run, status=_run_status(state, final=final), records=records)
        write_json(
            journal.tracking_path,
            {
                "run_id": run.info.run_id,
                "experiment_id": experiment_id,
                "tracking_uri": tracking_uri,
                "lines_sent": len(records),
            },
        )
        return _tracked(run, tracking_uri=tracking_uri)


def project_matrix(
    experiment: str,
    *,
    tracking_uri: str,
    table: Mapping[str, Sequence[str | float | None]],
    files: Sequence[Path],
    tags: Mapping[str, str],
) -> TrackedRun:
    """One summary run an experiment and set of `tags` (such as the profile), replaced as a whole each time.

    `table` maps a column to its values, one a row; `files` (results.md, CSV, figures) become artifacts.
    """
    with _outage(f"MLflow {tracking_uri}, summary of {experiment}"):
        client = _client(tracking_uri)
        experiment_id = _experiment_id(client, experiment=experiment, tracking_uri=tracking_uri)
        identity = {**tags, "kind": "matrix", "experiment": experiment}
        runs = _search(client, experiment_id=experiment_id, tags=identity)
        name = {"mlflow.runName": f"{experiment} summary"}
        run = runs[0] if runs else client.create_run(experiment_id, tags={**identity, **name})
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        # Not `log_table`: it appends to the table of the last time.
        client.log_dict(run.info.run_id, {"columns": list(table), "data": rows}, "matrix.json")
        client.set_tag(run.info.run_id, "mlflow.loggedArtifacts", '[{"path": "matrix.json", "type": "table"}]')
        for file in files:
            client.log_artifact(run.info.run_id, str(file))
        client.set_terminated(run.info.run_id, status="FINISHED")
        return _tracked(run, tracking_uri=tracking_uri)


def chart_url(tracking_uri: str, *, experiment_id: str) -> str | None:
    """Page with one chart a metric and all cells drawn; None without a server."""
    query = "workflowType=machine_learning&compareRunsMode=CHART"
    return _page(tracking_uri, f"experiments/{experiment_id}/runs?{query}")


def compare_url(tracking_uri: str, *, experiment_id: str, run_ids: Sequence[str]) -> str | None:
    """Page that compares these runs; None without a server."""
    runs = urllib.parse.quote(json.dumps(list(run_ids)))
    experiments = urllib.parse.quote(json.dumps([experiment_id]))
    # MLflow misreads the page's address unless workflowType comes last.
    return _page(tracking_uri, f"compare-runs?runs={runs}&experiments={experiments}&workflowType=machine_learning")


def flatten(value: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Nested JSON as parameters: dotted names; what is not text is written as JSON."""
    flat: dict[str, str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat.update(flatten(item, prefix=f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = item if isinstance(item, str) else json.dumps(item)
    return flat


@contextmanager
def _outage(where: str) -> Iterator[None]:
    try:
        yield
    except (MlflowException, RequestException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise TrackingError(f"{where}: got {reason}, expected to be taken. It is sent again next time.") from None


@contextmanager
def _one_sender(journal: Journal) -> Iterator[None]:
    """Two matrices may project one cell at once; without a lock each would create a run."""
    with (journal.folder / "tracking.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _client(tracking_uri: str) -> MlflowClient:
    """A client whose server or file is known to be there: MLflow itself would try for minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    folder = _sqlite_folder(tracking_uri)
    if folder is None:
        with urllib.request.urlopen(f"{tracking_uri}/health", timeout=ANSWER_SECONDS):
            pass
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no permission to write to {folder}")
    return MlflowClient(tracking_uri=tracking_uri)


def _sqlite_folder(tracking_uri: str) -> Path | None:
    return Path(tracking_uri.removeprefix("sqlite:///")).parent if tracking_uri.startswith("sqlite:///") else None


def _experiment_id(client: MlflowClient, *, experiment: str, tracking_uri: str) -> str:
    name = f"sdpo-matrix/{experiment}"
    found = client.get_experiment_by_name(name)
    if found is None:
        folder = _sqlite_folder(tracking_uri)
        try:
            # A server has its own artifact root; without one, artifacts lie beside the database.
            location = None if folder is None else (folder / "artifacts").absolute().as_uri()
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            # Another run may have been quicker.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return _usable(found)


def _usable(experiment: Experiment) -> str:
    if experiment.lifecycle_stage != "active":
        raise MlflowException(f"experiment {experiment.name} was deleted; restore it or run `mlflow gc`")
    return str(experiment.experiment_id)


def _committed(journal: Journal) -> tuple[MetricRecord, ...]:
    """The lines that no resume will cut off."""
    records = journal.read_metrics()
    if journal.result_path.exists():
        return records
    if not any(journal.checkpoints.glob("step-??????")):
        return ()
    step = journal.committed_step()
    # The last step is committed before the test split is scored: an `end` line without a result is scored again.
    return tuple(record for record in records if record.step <= step and record.moment != "end")


def _milliseconds(record: MetricRecord) -> int:
    return round(record.time * 1000)


def _cell_tags(
    journal: Journal, *, experiment: str, state: CellState, records: Sequence[MetricRecord]
) -> dict[str, str]:
    spec = journal.read_spec()
    stored = read_json(journal.spec_path)
    return {
        "kind": "cell",
        "mlflow.runName": spec.label,
        "experiment": experiment,
        "dataset": spec.dataset,
        "task": spec.task,
        "arm": spec.arm,
        "seed": str(spec.seed),
        "profile": spec.profile,
        **{name: str(stored[name]) for name in ("fingerprint", "data_digest", "base_digest", "numerics_version")},
        "state": state,
        "error": journal.status().note[:TAG_CHARACTERS] if state == "failed" else "",
        # Tells a cell from one of the same fingerprint whose folder was deleted: their lines must not mix.
        "first_line": str(_milliseconds(records[0])) if records else "none",
    }


def _search(client: MlflowClient, *, experiment_id: str, tags: Mapping[str, str]) -> list[Run]:
    condition = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    return list(client.search_runs([experiment_id], filter_string=condition, order_by=["attributes.start_time ASC"]))


def _find_cell_run(
    client: MlflowClient, *, journal: Journal, experiment_id: str, tags: Mapping[str, str]
) -> Run | None:
    identity = {name: tags[name] for name in ("kind", "fingerprint")}
    runs = [
        run
        for run in _search(client, experiment_id=experiment_id, tags=identity)
        if run.data.tags.get("first_line") in ("none", tags["first_line"])
    ]
    known = read_json(journal.tracking_path)["run_id"] if journal.tracking_path.exists() else ""
    return next((run for run in runs if run.info.run_id == known), runs[0] if runs else None)


def _lines_sent(journal: Journal, *, run: Run | None) -> int:
    """Lines this run has for sure; with the run or the note gone, all are sent again."""
    if run is None or not journal.tracking_path.exists():
        return 0
    noted = read_json(journal.tracking_path)
    return int(noted["lines_sent"]) if noted["run_id"] == run.info.run_id else 0


def _create_run(
    client: MlflowClient, *, experiment_id: str, tags: Mapping[str, str], records: Sequence[MetricRecord]
) -> Run:
    return client.create_run(experiment_id, start_time=_milliseconds(records[0]) if records else None, tags=dict(tags))


def _log_params(client: MlflowClient, *, run: Run, params: Mapping[str, str]) -> None:
    remaining = iter(params.items())
    while part := list(islice(remaining, PARAMS_PER_CALL)):
        client.log_batch(run.info.run_id, params=[Param(name, value) for name, value in part])


def _metrics(records: Sequence[MetricRecord]) -> list[Metric]:
    """A mean over nothing is not sent: MLflow has no empty value, and 0 would be a lie."""
    return [
        Metric(name, float(value), _milliseconds(record), record.step)
        for record in records
        for name, value in record.metrics.items()
        if value is not None
    ]


def _log_metrics(client: MlflowClient, *, run: Run, metrics: Sequence[Metric]) -> None:
    for start in range(0, len(metrics), METRICS_PER_CALL):
        client.log_batch(run.info.run_id, metrics=list(metrics[start : start + METRICS_PER_CALL]))


def _log_result(client: MlflowClient, *, run: Run, journal: Journal, records: Sequence[MetricRecord]) -> None:
    """Summaries over the run's steps, under names of their own so that they do not extend a curve."""
    end = {name for record in records if record.moment == "end" for name in record.metrics}
    values = read_json(journal.result_path)["metrics"]
    summaries = {f"summary/{name}": value for name, value in values.items() if name not in end}
    if records:
        last = records[-1]
        record = MetricRecord(step=last.step, moment="end", time=last.time, metrics=summaries)
        _log_metrics(client, run=run, metrics=_metrics([record]))
    for path in (journal.spec_path, journal.result_path):
        client.log_artifact(run.info.run_id, str(path))
    if journal.samples_path.exists():
        with journal.samples_path.open(encoding="utf-8") as lines:
            client.log_text(run.info.run_id, "".join(islice(lines, SAMPLE_LINES)), "samples_head.jsonl")


def _set_tags(client: MlflowClient, *, run: Run, tags: Mapping[str, str]) -> None:
    changed = [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]
    if changed:
        client.log_batch(run.info.run_id, tags=changed)


def _run_status(state: CellState, *, final: bool) -> str:
    match state:
        case "done" | "stale":
            return "FINISHED"
        case "failed":
            return "FAILED"
        case "missing":
            return "KILLED" if final else "RUNNING"
        case "running":
            return "RUNNING"


def _set_status(client: MlflowClient, *, run: Run, status: str, records: Sequence[MetricRecord]) -> None:
    """Last of all: a FINISHED run has everything."""
    if status == "RUNNING":
        client.update_run(run.info.run_id, status=status)
        return
    end = _milliseconds(records[-1]) if records else None
    client.set_terminated(run.info.run_id, status=status, end_time=end)


def _tracked(run: Run, *, tracking_uri: str) -> TrackedRun:
    page = _page(tracking_uri, f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}")
    return TrackedRun(run_id=run.info.run_id, experiment_id=run.info.experiment_id, url=page)


def _page(tracking_uri: str, place: str) -> str | None:
    return f"{tracking_uri.rstrip('/')}/#/{place}" if tracking_uri.startswith("http") else None
