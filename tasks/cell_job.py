"""Entry point of a cell's Ray job: wires data and grading into `sdpo_core.cell`.

    python -m tasks.cell_job --home HOME --fingerprint FP [--gpus N]

Exit codes: 0 the cell is done (also when it was before), 1 it failed and `error.json` says why.
"""

import argparse
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from sdpo_core.actors.ray_workers import connect, ray_workers
from sdpo_core.backends.base import WeightsAt
from sdpo_core.cell import Cell, require_splits
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import Journal, Store, read_json
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer
from tasks.cell_data import cell_data, environment, grade_at
from tasks.failure import unexpected, write_failure
from tasks.teacher_weights import base_model, check_weights, teacher_weights

_log = logging.getLogger(__name__)
_POLL_SECONDS = 2.0


def main(arguments: list[str]) -> int:
    """Train the cell, or wait for whoever trains it now."""
    parser = argparse.ArgumentParser(prog="tasks.cell_job")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--gpus", type=int, default=0)
    options = parser.parse_args(arguments)
    store = Store(options.home)
    journal = store.journal(options.fingerprint)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        handlers=[logging.StreamHandler(sys.stdout), logging.FileHandler(journal.folder / "log.txt")],
    )
    while not journal.result_path.exists():
        holder = {"pid": os.getpid(), "job": os.environ.get("RAY_JOB_SUBMISSION_ID"), "since": time.time()}
        with journal.lease(holder) as is_mine:
            if is_mine:
                return _train(store, journal, fingerprint=options.fingerprint, gpus=options.gpus)
        _log.info("another driver trains this cell; waiting")
        time.sleep(_POLL_SECONDS)
    return 0


def _train(store: Store, journal: Journal, *, fingerprint: str, gpus: int) -> int:
    """Train under the lease; a failure leaves one line in `error.json` and everything else as it was."""
    if journal.result_path.exists():
        return 0
    journal.error_path.unlink(missing_ok=True)
    label, log = f"cell {fingerprint}", f" Log: {journal.folder / 'log.txt'}"
    try:
        spec = journal.read_spec()
        label = spec.label
        _run(store, journal, spec=spec, fingerprint=fingerprint, gpus=gpus)
    except (CellError, DataError, SpecError) as error:
        write_failure(journal.error_path, str(error), label=label, advice=log)
    except Exception as error:
        write_failure(journal.error_path, unexpected(error), label=label, advice=log)
        _log.exception("unexpected failure")
        raise
    else:
        return 0
    return 1


def _run(store: Store, journal: Journal, *, spec: CellSpec, fingerprint: str, gpus: int) -> None:
    data = cell_data(store, spec.dataset)
    require_splits(data)
    declared = read_json(journal.spec_path)
    base = WeightsAt(folder=base_model(store, str(declared["base_fingerprint"])), sha256=str(declared["base_digest"]))
    teacher = teacher_weights(store, spec=spec, declared=declared)
    text = ChatTokenizer.load(base.folder, thinking=spec.training.thinking)
    connect()
    # Ray replaces the handler at connecting; the work since the last checkpoint is lost, as with a kill.
    signal.signal(signal.SIGTERM, _exit)
    scratch = journal.folder / "servers"
    with ray_workers(spec, folder=base.folder, gpus=gpus, teacher=teacher, scratch=scratch) as workers:
        check_weights(workers.student.facts(), whose="student", at=base)
        if workers.teacher is not None and teacher is not None:
            check_weights(workers.teacher.facts(), whose="teacher", at=teacher)
        Cell(
            spec,
            fingerprint=fingerprint,
            journal=journal,
            data=data,
            workers=workers,
            text=text,
            grade=grade_at(spec.training.feedback_level),
            clock=time.monotonic,
            wall_time=time.time,
            environment=environment(spec, gpus=gpus),
        ).run()


def _exit(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
