"""Task: journals to MLflow. Tracking is a projection: when it is down, the matrix goes on and is sent later."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from sdpo_core.errors import DataError
from sdpo_core.journal import Store
from tasks.tracking import TrackedRun, TrackingError, project_cell, project_matrix

_log = logging.getLogger(__name__)


def send_cells(fingerprints: Sequence[str], *, home: Path, tracking_uri: str, experiment: str, final: bool) -> bool:
    """Send what is committed; False, with one line in the log, when tracking is down."""
    store = Store(home)
    for fingerprint in fingerprints:
        journal = store.journal(fingerprint)
        if not journal.metrics_path.exists():
            continue
        try:
            project_cell(journal, tracking_uri=tracking_uri, experiment=experiment, final=final)
        except TrackingError as error:
            _log.warning("tracking: %s", error)
            return False
        except DataError as error:
            # A damaged journal concerns its own cell, whose row on the page says so; the others are sent.
            _log.warning("tracking: %s", error)
    return True


@task(name="collect", cache_policy=NO_CACHE)
def collect(fingerprints: Sequence[str], *, home: Path, tracking_uri: str, experiment: str) -> bool:
    """Send every cell's journal to MLflow for good."""
    return send_cells(fingerprints, home=home, tracking_uri=tracking_uri, experiment=experiment, final=True)


def send_summary(
    table: Mapping[str, Sequence[str | float | None]],
    *,
    files: Sequence[Path],
    tracking_uri: str,
    experiment: str,
    profile: str,
) -> TrackedRun | None:
    """The matrix table and the page as one summary run; None when tracking is down."""
    tags = {"profile": profile}
    try:
        return project_matrix(experiment, tracking_uri=tracking_uri, table=table, files=files, tags=tags)
    except TrackingError as error:
        _log.warning("tracking: %s", error)
        return None
