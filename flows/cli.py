"""The command line `sdpo`: the only module that prints. Exit codes: 0 all done, 1 some cells failed, 2 cannot start."""

import json
import logging
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer

from data_prep.card import percent
from data_prep.check import check as faults
from data_prep.grade_file import MODES, grade_file, summary
from data_prep.manifest import Manifest
from data_prep.prepare import prepare_dataset
from data_prep.table import DATASETS
from experiments.matrix import Selection
from flows import services as persistent
from flows.launch import program, quiet_environment
from flows.machine import require_machine
from flows.matrix import Matrix, load_matrix
from flows.services import ServiceRecord, private
from reports.export import cells_json
from reports.rows import load_bases, load_cells
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import Journal, Store
from sdpo_core.specs import CellSpec

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains every cell of a declared experiment (data set x arm x seed) and writes its results page.",
)

P = ParamSpec("P")
R = TypeVar("R")

ExperimentArgument = Annotated[str, typer.Argument(help="A name of the table (e001), or the path of a .py file.")]
DatasetsOption = Annotated[list[str] | None, typer.Option("--datasets", help="Only these data sets (repeat, or a,b).")]
ArmsOption = Annotated[list[str] | None, typer.Option("--arms", help="Only these arms (repeat, or a,b).")]
SeedsOption = Annotated[list[str] | None, typer.Option("--seeds", help="Only these seeds (repeat, or a,b).")]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="Another profile than the declared one.")]


def main() -> None:
    """Entry point of the console script."""
    os.environ.update({name: value for name, value in quiet_environment().items() if name not in os.environ})
    app()


def home_folder() -> Path:
    """The store: $SDPO_HOME, or .sdpo under the working directory."""
    return Path(os.environ.get("SDPO_HOME", ".sdpo")).absolute()


def _speaks_plainly(command: Callable[P, R]) -> Callable[P, R]:
    """Our own errors become one line and an exit code; all others keep their traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (SpecError, DataError) as error:
            typer.echo(f"sdpo: {error}", err=True)
            raise typer.Exit(2) from None
        except CellError as error:
            typer.echo(f"sdpo: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("sdpo: interrupted. Run it again: cells go on from their last checkpoints.", err=True)
            raise typer.Exit(130) from None

    return run


@app.command()
@_speaks_plainly
def prepare(
    datasets: Annotated[list[str] | None, typer.Argument(help="Names or file:PATH; the table if none.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="Say what is wrong with a file, line by line.")] = None,
    grade: Annotated[Path | None, typer.Option("--grade", help="Grade the responses of a JSON Lines file.")] = None,
) -> None:
    """Normalise sources to JSON Lines with manifest, card and quarantine, and print the counts."""
    if sum(map(bool, (datasets, check, grade))) > 1:
        raise SpecError("prepare: got more than one of names, --check and --grade, expected one. Run them one by one.")
    if check is not None:
        _print_faults(check)
    elif grade is not None:
        _print_grades(grade)
    else:
        manifests = [prepare_dataset(name, home=home_folder()) for name in datasets or DATASETS]
        header = ("data set", "read", "kept", "train", "dev", "test", "not kept, by reason", "flagged", "leaks found")
        _print_table((*header, "guess baselines on test, %"), [_manifest_row(manifest) for manifest in manifests])


@app.command()
@_speaks_plainly
def plan(
    experiment: ExperimentArgument,
    datasets: DatasetsOption = None,
    arms: ArmsOption = None,
    seeds: SeedsOption = None,
    profile: ProfileOption = None,
) -> None:
    """List the cells with their states and estimated cost."""
    matrix = load_matrix(experiment, _selection(datasets, arms, seeds, profile), home=home_folder())
    statuses = [(cell, matrix.status(cell)) for cell in matrix.planned()]
    seconds = _median_seconds(matrix)
    rows = [
        (
            cell.spec.label,
            status.state,
            cell.fingerprint or "n/a",
            "" if status.state == "done" else seconds.get((cell.spec.dataset, cell.spec.arm), "unknown"),
            status.note,
        )
        for cell, status in statuses
    ]
    _print_table(("cell", "state", "fingerprint", "estimate", "note"), rows)


@app.command()
@_speaks_plainly
def run(
    experiment: ExperimentArgument,
    datasets: DatasetsOption = None,
    arms: ArmsOption = None,
    seeds: SeedsOption = None,
    profile: ProfileOption = None,
) -> None:
    """Run the flow here and now; services that are not up are started privately and end with it."""
    home = home_folder()
    selection = _selection(datasets, arms, seeds, profile)
    # Before any service is started: what is wrong with the declaration is said within a second or two.
    require_machine(load_matrix(experiment, selection, home=home).profile)
    with _prefect(home):
        from flows.sdpo_matrix import REFUSED, sdpo_matrix

        state = sdpo_matrix(
            experiment,
            datasets=list(selection.datasets) if selection.datasets else None,
            arms=list(selection.arms) if selection.arms else None,
            seeds=list(selection.seeds) if selection.seeds else None,
            profile=selection.profile,
            return_state=True,
        )
    if not state.is_completed():
        if isinstance(state.data, Exception):
            raise state.data
        typer.echo(f"sdpo: {state.message}", err=True)
        raise typer.Exit(2 if state.name == REFUSED else 1)
    typer.echo(str(state.message))


@app.command()
@_speaks_plainly
def report(
    experiment: ExperimentArgument,
    profile: ProfileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON and write nothing.")] = False,
) -> None:
    """Write the results page from finished records."""
    matrix = load_matrix(experiment, Selection(profile=profile), home=home_folder())
    planned = matrix.page_cells()
    cells = load_cells(matrix.store, planned)
    if as_json:
        typer.echo(json.dumps(cells_json(cells), indent=1, allow_nan=False))
        return
    from reports.document import write_report

    folder = matrix.folder(Path("results"), profile_is_declared=profile is None)
    bases = load_bases(matrix.store, planned)
    page = write_report(matrix.declared, cells, bases, matrix.facts(), arms=matrix.arms(), folder=folder)
    typer.echo(str(page))


@app.command()
@_speaks_plainly
def samples(
    cell: Annotated[str | None, typer.Argument(help="<data set>/<arm>/<seed>, or the start of a fingerprint.")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Rollouts shown early and late.")] = 3,
    problem: Annotated[
        str | None, typer.Option("--problem", help="A problem's id: the row as student, teacher and grader see it.")
    ] = None,
) -> None:
    """Show rollouts with teacher prompt, verdict and feedback, early against late; or one problem."""
    if (cell is None) == (problem is None):
        raise SpecError("samples: got neither or both of a cell and --problem, expected one. Name one of them.")
    if problem is not None:
        from flows.problem_view import view

        typer.echo(view(problem, data=home_folder() / "data"))
        return
    assert cell is not None
    for journal in _journals(cell):
        spec = journal.read_spec()
        rows = journal.read_samples()
        typer.echo(f"=== {spec.label} ({spec.profile}) {journal.folder.name}: {journal.status().state}")
        if not rows:
            typer.echo("no samples yet")
            continue
        early, late = rows[:count], rows[max(count, len(rows) - count) :]
        for title, part in (("early", early), ("late", late)):
            for sample in part:
                _print_sample(title, sample, spec=spec)


@app.command()
@_speaks_plainly
def doctor(
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="Only print the digest of this model folder, for an arm to declare."),
    ] = None,
) -> None:
    """Say what this machine can run, and what to install for the rest."""
    if weights is not None:
        from sdpo_core.model_folder import weights_digest

        typer.echo(weights_digest(weights))
        return
    from flows.doctor import examine

    findings = examine(home_folder())
    _print_table(("what", "state", "what to do"), [(row.what, row.state, row.advice) for row in findings])
    if any(row.blocks for row in findings):
        raise typer.Exit(2)


@app.command()
@_speaks_plainly
def up() -> None:
    """Start MLflow, Prefect (server, pool, worker, deployment) and Ray, to stay."""
    home = home_folder()
    _print_services(persistent.up(home))
    running = persistent.running(home)
    if running is not None:
        typer.echo(f"\nexport PREFECT_API_URL={running.prefect_api_url}")
        typer.echo(f"{program('prefect')} deployment run sdpo-matrix/matrix -p experiment=e001")


@app.command()
@_speaks_plainly
def down() -> None:
    """End what `sdpo up` started."""
    ended = persistent.down(home_folder())
    typer.echo(f"ended: {', '.join(ended)}" if ended else "nothing was up")


@app.command()
@_speaks_plainly
def status() -> None:
    """Show the persistent services."""
    _print_services(persistent.status(home_folder()))


@contextmanager
def _prefect(home: Path) -> Iterator[None]:
    """A Prefect server to talk to, and plain lines of progress on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    with private(home) as services:
        os.environ.update(services.environment())
        # The flow's own lines and its final state say it all; Prefect's say it again, with tracebacks of nothing.
        os.environ["PREFECT_LOGGING_LEVEL"] = "CRITICAL"
        try:
            yield
        finally:
            from prefect.logging.handlers import APILogHandler

            # While the server is there: at exit, Prefect would try for a minute to reach one that has ended.
            APILogHandler().flush()


def _selection(
    datasets: list[str] | None, arms: list[str] | None, seeds: list[str] | None, profile: str | None
) -> Selection:
    words = _split(seeds)
    wrong = [word for word in words if not re.fullmatch(r"-?[0-9]+", word)]
    if wrong:
        raise SpecError(f"--seeds: got {', '.join(wrong)}, expected whole numbers. Correct the selection.")
    return Selection(
        datasets=_split(datasets) or None,
        arms=_split(arms) or None,
        seeds=tuple(map(int, words)) or None,
        profile=profile,
    )


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(word.strip() for value in values or () for word in value.split(",") if word.strip())


def _median_seconds(matrix: Matrix) -> dict[tuple[str, str], str]:
    """What a cell of a data set and an arm costs, from the finished ones of this experiment and profile."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in load_cells(matrix.store, matrix.page_cells()):
        if isinstance(row.seconds, float):
            seconds.setdefault((row.dataset, row.arm), []).append(row.seconds)
    return {key: f"{statistics.median(values):.0f} s" for key, values in seconds.items()}


def _journals(cell: str) -> list[Journal]:
    """Journals whose label or fingerprint matches."""
    store = Store(home_folder())
    found = []
    for folder in sorted(store.cells.glob("*")) if store.cells.is_dir() else []:
        journal = store.journal(folder.name)
        if journal.spec_path.exists() and (folder.name.startswith(cell) or journal.read_spec().label == cell):
            found.append(journal)
    if not found:
        raise SpecError(f"samples: got {cell!r}, expected a cell of {store.cells}. List them with `sdpo plan`.")
    return found


def _print_sample(title: str, sample: dict[str, object], *, spec: CellSpec) -> None:
    typer.echo(f"\n--- {title}: step {sample['step']}, {sample['problem_id']}, rollout {sample['rollout']}")
    typer.echo(f"[prompt]\n{sample['prompt']}")
    typer.echo(f"[response]\n{sample['response']}")
    typer.echo(f"[verdict] score {sample['score']}, {sample['reason']}")
    typer.echo(f"[feedback] {sample['feedback'] or 'none'}")
    if spec.teacher is None:
        typer.echo("[teacher] n/a: the arm has none")
    elif "context" not in spec.traits:
        typer.echo("[teacher] reads the prompt above")
    elif sample["teacher_prompt"] is None:
        typer.echo("[teacher] n/a: no teacher context")
    else:
        shown = "" if sample["demonstrator"] is None else f" (demonstration by rollout {sample['demonstrator']})"
        typer.echo(f"[teacher prompt]{shown}\n{sample['teacher_prompt']}")


def _manifest_row(manifest: Manifest) -> tuple[str, ...]:
    return (
        manifest.name,
        str(manifest.rows_read),
        str(manifest.kept),
        *(str(manifest.splits.get(name, 0)) for name in ("train", "dev", "test")),
        *(_counts(counts) for counts in (manifest.quarantined, manifest.flagged, manifest.leaks)),
        ", ".join(f"{rule} {percent(scores['test'])}" for rule, scores in manifest.baselines.items()) or "-",
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in counts.items()) or "-"


def _print_faults(path: Path) -> None:
    count = 0
    for fault in faults(path):
        typer.echo(f"{fault.path}:{fault.line}: {fault.code}: {fault.note}")
        count += 1
    if count:
        raise DataError(
            f"{path}: got {count} rows that cannot be used, expected none. Correct them, or leave them out."
        )
    typer.echo(f"{path}: nothing is wrong")


def _print_grades(path: Path) -> None:
    """A JSON line a response; the means go to standard error, so that the lines can be read on."""
    graded = list(grade_file(path, data=home_folder() / "data"))
    for item in graded:
        typer.echo(json.dumps(item.to_json(), ensure_ascii=False))
    _print_table(("data set", "responses", *MODES, "most frequent reasons"), summary(graded), err=True)


def _print_services(records: tuple[ServiceRecord, ...]) -> None:
    rows = [(record.name, record.state, record.url or "-", str(record.log)) for record in records]
    _print_table(("service", "state", "page", "log"), rows)


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, err: bool = False) -> None:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, tuple("-" * width for width in widths), *rows):
        typer.echo("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip(), err=err)


if __name__ == "__main__":
    main()
