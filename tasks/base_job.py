"""Entry point of a base model's job: warm up or take in the weights if they are not there, then the missing probes.

    python -m tasks.base_job --home HOME --fingerprint FP [--gpus N]

Reads `bases/<FP>/spec.json`; `base.json`, written last, means that the weights exist.
"""

import argparse
import fcntl
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data_prep.warmups.base import Shares
from data_prep.warmups.table import warmup, warmup_examples
from sdpo_core import random_streams
from sdpo_core.base_specs import AnyBaseSpec, BaseSpec, PlacedBaseSpec
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import Store, read_json, write_json
from sdpo_core.model_folder import placed_model
from sdpo_core.probe import probe
from sdpo_core.records import Problem, WarmupExample
from sdpo_core.rollout.local import engine_of_folder
from sdpo_core.specs import ProbeSpec
from sdpo_core.text import ChatTokenizer
from sdpo_core.warmup import warm_up
from tasks.cell_data import grade_at, split
from tasks.failure import unexpected, write_failure

_log = logging.getLogger(__name__)
_PROBE_TOKENS = 16384
_SPEC: TypeAdapter[AnyBaseSpec] = TypeAdapter(AnyBaseSpec)


def main(arguments: list[str]) -> int:
    """Make and probe a base; 0 when all is there, 1 with one line on what failed."""
    parser = argparse.ArgumentParser(prog="tasks.base_job")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--gpus", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    store = Store(options.home)
    folder = store.bases / options.fingerprint
    declared = read_json(folder / "spec.json")
    spec = _SPEC.validate_python(declared["spec"])
    error_path = folder / "error.json"
    error_path.unlink(missing_ok=True)
    try:
        # Two matrices may want the same base: the second waits here and finds it made.
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "base.json").exists():
                _make(store, spec, folder=folder, fingerprint=options.fingerprint)
            device = "cuda" if options.gpus else "cpu"
            for declared_probe in declared["probes"]:
                _probe(store, ProbeSpec.model_validate(declared_probe), folder=folder, device=device)
    except (CellError, DataError, SpecError) as error:
        write_failure(error_path, str(error), label=f"base {spec.name}")
        return 1
    except Exception as error:
        write_failure(error_path, unexpected(error), label=f"base {spec.name}")
        raise
    return 0


def _make(store: Store, spec: AnyBaseSpec, *, folder: Path, fingerprint: str) -> None:
    match spec:
        case PlacedBaseSpec():
            made = _take_in(store, spec, folder=folder)
        case BaseSpec():
            made = _warm_up(store, spec, folder=folder)
    write_json(folder / "base.json", {"fingerprint": fingerprint, **made})


def _take_in(store: Store, spec: PlacedBaseSpec, *, folder: Path) -> dict[str, Any]:
    """Check the model that the user placed, and let the base's folder point to it: it may be large."""
    place = store.models / spec.folder
    _log.info("base %s: reading %s", spec.name, place)
    facts = placed_model(place, spec)
    _remove(folder / "model")
    # Relative, so that the store can be moved.
    (folder / "model").symlink_to(os.path.relpath(place, folder), target_is_directory=True)
    return {
        "weights_digest": facts.weights_sha256,
        "parameters": facts.parameters,
        "vocab_size": facts.vocab_size,
        "seconds": None,
        "losses": [],
    }


def _warm_up(store: Store, spec: BaseSpec, *, folder: Path) -> dict[str, Any]:
    problems = tuple(problem for name in spec.datasets for problem in _warmup_problems(store, name))
    tasks = sorted({problem.task for problem in problems})
    if len(tasks) != 1:
        raise SpecError(f"base {spec.name}: got tasks {tasks}, expected one. Warm up on data sets of one task.")
    shares = Shares(plain=spec.warmup.plain_share, demonstration=spec.warmup.demonstration_share)

    def examples(purpose: str) -> Iterator[WarmupExample]:
        generator = random_streams.stream(spec.warmup.seed, random_streams.WARMUP, purpose)
        return warmup_examples(tasks[0], problems, shares=shares, rng=generator)

    aside = folder / "model.partial"
    _remove(aside)
    _log.info("base %s: warm-up of %d steps on %d problems", spec.name, spec.warmup.steps, len(problems))
    outcome = warm_up(spec, examples=examples, folder=aside, threads=_threads())
    _remove(folder / "model")
    aside.rename(folder / "model")
    return {
        "weights_digest": outcome.weights_sha256,
        "parameters": outcome.parameters,
        "vocab_size": outcome.vocab_size,
        "seconds": outcome.seconds,
        "losses": [round(loss, 6) for loss in outcome.losses],
    }


def _remove(folder: Path) -> None:
    """Remove what an earlier attempt left; of a placed model only the link."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _warmup_problems(store: Store, dataset: str) -> tuple[Problem, ...]:
    """The split set apart for the warm-up, or the training rows where there is none."""
    has_own = (store.data / dataset / "warmup.jsonl").exists()
    return split(store, dataset, "warmup" if has_own else "train")


def _probe(store: Store, spec: ProbeSpec, *, folder: Path, device: str) -> None:
    record = folder / f"probe-{spec.dataset}.json"
    declared = spec.model_dump(mode="json")
    if record.exists() and read_json(record)["probe"] == declared:
        return
    text = ChatTokenizer.load(folder / "model")
    dev = split(store, spec.dataset, "dev")
    task = warmup(dev[0].task)
    outcome = probe(
        spec,
        dev=dev,
        test=split(store, spec.dataset, "test"),
        engine=engine_of_folder(
            folder / "model", text=text, max_tokens=_PROBE_TOKENS, threads=_threads(), device=device
        ),
        text=text,
        grade=grade_at(spec.feedback_level),
        right=task.right,
        wrong=lambda problem, key: task.wrong(problem, np.random.Generator(np.random.Philox(key=key))),
    )
    write_json(record, {"probe": declared, **asdict(outcome)})
    _log.info(
        "base on %s: dev accuracy %.3f plain, %.3f with a demonstration",
        spec.dataset,
        outcome.dev_accuracy,
        outcome.demonstration_accuracy,
    )


def _threads() -> int:
    """One, unless the job was given more: results must not depend on how busy the machine is."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
