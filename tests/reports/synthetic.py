"""A store with invented numbers, written through the real journal: what the pages of these tests are made from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reports.page import Page
from reports.rows import BaseRow, CellRow, DatasetFacts, PlannedCell, load_bases, load_cells
from sdpo_core.errors import DataError
from sdpo_core.fingerprint import cell_fingerprint
from sdpo_core.journal import MetricRecord, Store, write_json
from sdpo_core.metrics import METRICS, promised, summarise
from sdpo_core.specs import ArmSpec, CellSpec, ExperimentSpec

SEEDS = (42, 1234, 2026)
DATASETS = ("spell_backward", "sciknoweval-physics")
ARMS: Mapping[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "sdpo-static": {"name": "sdpo", "teacher": {"schedule": "static"}},
    "sdpo-ema": {"name": "sdpo", "teacher": {"schedule": "ema", "rate": 0.05}},
}
_STRONGER = {"schedule": "static", "weights": "profile"}
# Of every kind that a page tells apart, and more than fit side by side.
VARIANTS: Mapping[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "grpo-kl": {"name": "grpo", "anchor": {"coefficient": 0.04, "estimator": "k2", "placement": "loss"}},
    "gspo": {"name": "gspo", "minibatches": 4},
    "ppo": {"name": "ppo", "rollout_cap": 2.0},
    "sdpo-paper": {
        "name": "sdpo",
        "teacher": {"schedule": "trust_region", "rate": 0.05},
        "divergence": {"top_k": 100},
        "demonstration": {"rule": "first"},
        "include_feedback": False,
        "rollout_cap": 2.0,
        "reduction": "sequence_mean_of_all",
    },
    "grpo-sdpo": {"name": "sdpo", "teacher": {"schedule": "live"}, "blend": {"weight": 0.9}},
    "opsd": {"name": "opsd", "divergence": {"support": "full", "top_k": None, "entry_clip": 0.05}},
    "opd": {"name": "grpo", "opd": {"teacher": _STRONGER, "only": True, "discount": 0.5}},
    "opd-topk": {
        "name": "grpo",
        "opd": {
            "teacher": _STRONGER,
            "coefficient": 0.5,
            "estimator": "divergence",
            "placement": "loss",
            "divergence": {"alpha": 1.0, "support": "teacher", "top_k": 16, "truncation": "bregman", "token_clip": 2.0},
        },
    },
}
STEPS = 6
START = 1_800_000_000.0
FACTS = (
    DatasetFacts(
        name="spell_backward",
        splits={"train": 400, "dev": 64, "test": 128, "warmup": 800},
        baselines={},
        digest="5e11bac0",
        quarantined={},
        rows_read=1392,
    ),
    DatasetFacts(
        name="sciknoweval-physics",
        splits={"train": 640, "dev": 79, "test": 80},
        baselines={"uniform": {"dev": 0.25, "test": 0.25}, "always B": {"dev": 0.39, "test": 0.4125}},
        digest="9b451c50",
        quarantined={"duplicate_options": 1},
        rows_read=800,
    ),
)

# Accuracy each arm reaches; seeds differ by +-0.02 around it.
_FINAL = {
    "spell_backward": {"grpo": 0.94, "sdpo-static": 0.96, "sdpo-ema": 0.97},
    "sciknoweval-physics": {"grpo": 0.40, "sdpo-static": 0.42, "sdpo-ema": 0.38},
}
_START = {"spell_backward": 0.5, "sciknoweval-physics": 0.2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """What a page is written from."""

    experiment: ExperimentSpec
    cells: tuple[CellRow, ...]
    bases: tuple[BaseRow, ...]
    arms: tuple[ArmSpec, ...]

    def page(self) -> Page:
        return Page(
            experiment=self.experiment,
            cells=self.cells,
            bases=self.bases,
            facts=FACTS,
            declared_arms=self.arms,
        )


def declared(arms: Mapping[str, dict[str, Any]]) -> tuple[ArmSpec, ...]:
    """The arms as an experiment declares them."""
    return tuple(
        ArmSpec.model_validate(
            {"name": name, "meaning": f"what {name} is", "source": f"a paper; ours: *{name}*", "algorithm": algorithm}
        )
        for name, algorithm in arms.items()
    )


def experiment(*, seeds: Sequence[int] = SEEDS, question: str = "Does SDPO beat GRPO?") -> ExperimentSpec:
    return ExperimentSpec(
        name="e900",
        question=question,
        prediction="Both reach 0.9 on spell_backward.\nNeither learns physics.",
        datasets=DATASETS,
        arms=tuple(ARMS),
        seeds=tuple(seeds),
        profile="tiny",
    )


def variant(spec: CellSpec, *, dataset: str, arm: str, seed: int, algorithm: Mapping[str, Any]) -> CellSpec:
    """`spec` as another cell of the same profile."""
    fields = spec.model_dump(mode="json")
    task = "spell_backward" if dataset == "spell_backward" else "mcq"
    evaluation = {"samples_per_problem": 4, "temperature": 1.0, "dev_problems": 64, "test_problems": 100}
    training = fields["training"] | {"steps": STEPS, "evaluate_every": 2}
    teacher = algorithm.get("opd", algorithm).get("teacher", {})
    changes = {
        "dataset": dataset,
        "task": task,
        "arm": arm,
        "seed": seed,
        "algorithm": dict(algorithm),
        "teacher_base": fields["base"] | {"name": "strong"} if teacher.get("weights") == "profile" else None,
    }
    return CellSpec.model_validate(fields | changes | {"evaluation": evaluation, "training": training})


def plan(spec: CellSpec, *, arms: Mapping[str, dict[str, Any]], seeds: Sequence[int]) -> tuple[PlannedCell, ...]:
    """Every cell, with its base made."""
    cells = [
        variant(spec, dataset=dataset, arm=arm, seed=seed, algorithm=algorithm)
        for dataset in DATASETS
        for arm, algorithm in arms.items()
        for seed in seeds
    ]
    return tuple(planned_cell(cell) for cell in cells)


def planned_cell(cell: CellSpec) -> PlannedCell:
    teacher = None if cell.teacher_base is None else f"teacher-{cell.dataset}"
    data_digest, base_digest = f"data-{cell.dataset}", f"weights-{cell.dataset}"
    teacher_digest = None if teacher is None else f"weights-{teacher}"
    return PlannedCell(
        spec=cell,
        fingerprint=cell_fingerprint(
            cell, data_digest=data_digest, base_digest=base_digest, teacher_digest=teacher_digest
        ),
        data_digest=data_digest,
        base_digest=base_digest,
        base_fingerprint=f"base-{cell.dataset}",
        teacher_digest=teacher_digest,
        teacher_fingerprint=teacher,
    )


def write_bases(store: Store) -> None:
    """Two bases a data set, the second a stronger model, and their probes; physics has no feedback probe."""
    for kind, name, accuracy, with_demonstration, with_feedback in (
        ("base", "spell_backward", 0.5, 0.9, 0.75),
        ("base", "sciknoweval-physics", 0.2, 0.55, None),
        ("teacher", "spell_backward", 0.96, 0.9, 0.85),
        ("teacher", "sciknoweval-physics", 0.6, 0.6, None),
    ):
        folder = store.bases / f"{kind}-{name}"
        digest = f"weights-{name}" if kind == "base" else f"weights-{kind}-{name}"
        base = {"weights_digest": digest, "parameters": 812_544, "vocab_size": 259, "seconds": 41.5}
        write_json(folder / "base.json", {"fingerprint": folder.name, "losses": [3.0, 1.0], **base})
        probe = {
            "dataset": name,
            "dev_problems": 64,
            "dev_accuracy": accuracy,
            "demonstration_accuracy": with_demonstration,
            "feedback_accuracy": with_feedback,
            "test_problems": 100,
            "test_accuracy": accuracy,
            "test_format_rate": 0.96875,
        }
        write_json(folder / f"probe-{name}.json", probe)


def write_done(store: Store, planned: PlannedCell) -> None:
    """Journal and result of a finished cell; every number follows from its spec."""
    assert planned.fingerprint is not None
    spec = planned.spec
    journal, records = store.journal(planned.fingerprint), _records(spec)
    journal.write_spec(
        spec,
        fingerprint=planned.fingerprint,
        data_digest=str(planned.data_digest),
        base_digest=str(planned.base_digest),
        base_fingerprint=str(planned.base_fingerprint),
        teacher_digest=planned.teacher_digest,
        teacher_fingerprint=planned.teacher_fingerprint,
    )
    for record in records:
        journal.append_metrics(record)
    write_json(
        journal.result_path,
        {
            "fingerprint": planned.fingerprint,
            "label": spec.label,
            "steps": STEPS,
            "started": START + spec.seed,
            "ended": START + spec.seed + 31.25,
            "metrics": summarise([(record.moment, record.metrics) for record in records]),
            "workers": _workers(spec),
            "parts": {"test": _parts(spec), "test_at_best_dev": _parts(spec)},
            "environment": {
                "python": "3.11.9",
                "torch": "2.13.0+cpu",
                "platform": "Linux x86_64",
                "cpu": "Some CPU | 2 cores",
                "threads": 1,
                "memory": "resident",
                "commit": "0123456789abcdef0123456789abcdef01234567",
                "numerics_version": 1,
            },
        },
    )
    write_json(journal.tracking_path, {"run_id": f"run-{spec.arm}-{spec.seed}", "experiment_id": "1"})


def synthetic(
    home: Path,
    spec: CellSpec,
    *,
    arms: Mapping[str, dict[str, Any]] | None = None,
    seeds: Sequence[int] = SEEDS,
    is_done: Callable[[CellSpec], bool] = lambda _: True,
) -> Synthetic:
    """A store whose cells are done where `is_done` says so, read back through reports/rows.py."""
    arms = ARMS if arms is None else arms
    store, planned = Store(home), plan(spec, arms=arms, seeds=seeds)
    write_bases(store)
    for cell in planned:
        if is_done(cell.spec):
            write_done(store, cell)
    return Synthetic(
        experiment=experiment(seeds=seeds),
        cells=load_cells(store, planned),
        bases=load_bases(store, planned),
        arms=declared(arms),
    )


def with_holes(home: Path, spec: CellSpec) -> Synthetic:
    """Cells in every state. `stale` is set by hand: there is no older numerics version yet to be done under."""
    store, planned = Store(home), plan(spec, arms=ARMS, seeds=SEEDS)
    write_bases(store)
    special = {
        "spell_backward/grpo/1234": "failed",
        "spell_backward/sdpo-ema/42": "running",
        "spell_backward/sdpo-static/2026": "missing",
        "spell_backward/sdpo-ema/2026": "stale",
        "sciknoweval-physics/sdpo-ema/42": "missing",
        "sciknoweval-physics/sdpo-ema/1234": "missing",
        "sciknoweval-physics/sdpo-ema/2026": "missing",
    }
    for cell in planned:
        if cell.spec.label not in special:
            write_done(store, cell)
    by_label = {cell.spec.label: cell for cell in planned}
    failed = store.journal(str(by_label["spell_backward/grpo/1234"].fingerprint))
    write_json(failed.error_path, {"error": "loss: got nan at step 3 | <b>expected</b> a number.", "time": START})
    running = store.journal(str(by_label["spell_backward/sdpo-ema/42"].fingerprint))
    running.append_metrics(_records(by_label["spell_backward/sdpo-ema/42"].spec)[0])
    with running.lease({"pid": 1}) as is_ours:
        if not is_ours:
            raise DataError("with_holes: got a lease held by another, expected a fresh store. Use another folder.")
        cells = tuple(
            replace(cell, state="stale", note="done under numerics version 0")
            if special.get(cell.spec.label) == "stale"
            else cell
            for cell in load_cells(store, planned)
        )
    return Synthetic(experiment=experiment(), cells=cells, bases=load_bases(store, planned), arms=declared(ARMS))


def _parts(spec: CellSpec) -> list[dict[str, Any]]:
    """Physics has questions that stand in train, too, and is better there."""
    if spec.dataset == "spell_backward":
        return []
    accuracy = _score(spec, name="test/accuracy", step=STEPS)
    return [
        {"kind": "stem disjoint", "value": "false", "problems": 7, "accuracy": accuracy + 0.1},
        {"kind": "stem disjoint", "value": "true", "problems": 93, "accuracy": accuracy - 0.01},
    ]


def _records(spec: CellSpec) -> list[MetricRecord]:
    traits, records = spec.traits, []
    if starts := promised("start", traits):
        floors: dict[str, float | None] = dict.fromkeys(sorted(starts), 1e-9)
        records.append(MetricRecord(step=0, moment="start", time=START + spec.seed, metrics=floors))
    for step in range(STEPS + 1):
        time = START + spec.seed + 4.0 * step
        if step:
            values = {name: _step_value(spec, name=name, step=step) for name in sorted(promised("step", traits))}
            records.append(MetricRecord(step=step, moment="step", time=time, metrics=values))
        if step % 2 == 0:
            values = {name: _score(spec, name=name, step=step) for name in sorted(promised("evaluate", traits))}
            records.append(MetricRecord(step=step, moment="evaluate", time=time, metrics=values))
    ends = {name: _score(spec, name=name, step=STEPS) for name in sorted(promised("end", traits))}
    records.append(MetricRecord(step=STEPS, moment="end", time=START + spec.seed + 30.0, metrics=ends))
    return records


def _score(spec: CellSpec, *, name: str, step: int) -> float:
    if name == "test_at_best_dev/step":
        return float(STEPS)
    start, end = _START[spec.dataset], _FINAL[spec.dataset].get(spec.arm, 0.9)
    accuracy = start + (end - start) * step / STEPS + 0.02 * _offset(spec) * step / STEPS
    scores = {"accuracy": accuracy, "pass_at_k": min(1.0, accuracy + 0.05), "format_rate": 1.0}
    return scores.get(name.split("/")[1], 5.0 + 0.1 * step)


def _step_value(spec: CellSpec, *, name: str, step: int) -> float | None:
    if METRICS[name].trait not in ("any", "follows") and step == 3 and spec.seed == 2026 and name != "distill/tokens":
        # No rollout had context in this step: a mean over nothing.
        return None if METRICS[name].unit in ("nats", "probability") else 0.0
    shapes = {
        "fraction": 0.9 - 0.02 * step,
        "probability": 0.95 + 0.005 * step,
        "nats": 0.06 / step,
        "score": _score(spec, name="eval/accuracy", step=step) - 0.03 * (step % 3),
        "bytes": (412.0 if name.endswith("student") else 388.0) * 2**20,
        "tokens/s": 1830.0 + spec.seed / 100,
        "s": 0.25,
        "count": 1.0 if name in ("train/optimizer_steps", "cost/ema_updates") else 0.0,
    }
    return shapes.get(METRICS[name].unit, 4.0 + 0.5 * step)


def _offset(spec: CellSpec) -> int:
    """-1, 0, 1 for the three seeds."""
    return SEEDS.index(spec.seed) - 1


def _workers(spec: CellSpec) -> dict[str, dict[str, Any]]:
    workers = {"student": {"pid": 4001, "weights_sha256_start": "aa", "weights_sha256_end": "bb"}}
    if "teacher" in spec.traits:
        end = "cc" if "follows" in spec.traits else "aa"
        workers["teacher"] = {"pid": 4002, "weights_sha256_start": "aa", "weights_sha256_end": end}
    return workers
