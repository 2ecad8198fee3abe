"""The command line without services: exit codes, and one clear line for whatever is wrong."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from data_prep.sources import bundled_bytes
from experiments.matrix import Selection
from experiments.profiles import PROFILES
from flows import machine
from flows.cli import app
from flows.matrix import Matrix, load_matrix
from flows.processes import REPOSITORY
from sdpo_core import extras
from sdpo_core.journal import MetricRecord, Store, write_json
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import CellSpec

Sdpo = Callable[..., Result]
IMPORTS = """
import sys
import flows.cli
print([name for name in ("torch", "transformers", "prefect", "mlflow", "ray", "pandas", "matplotlib")
       if name in sys.modules])
"""


@pytest.fixture
def sdpo(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sdpo:
    monkeypatch.setenv("SDPO_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def _refused(result: Result, *parts: str) -> None:
    """Exit 2 and one line on standard error that holds `parts`."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("sdpo: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["e999"], "got 'e999', expected one of e000, e001, e010"),
        (["none.py"], "got none.py, expected a file"),
        (["e000", "--arms", "dpo"], "got arm 'dpo', expected one of grpo, grpo-paper, grpo-std"),
        (["e000", "--arms", "opd"], "got arm 'opd', expected one the experiment declares"),
        (["e000", "--datasets", "spelling"], "got data set 'spelling', expected one of spell_backward"),
        (["e000", "--seeds", "7"], "got seed 7, expected one the experiment declares (42)"),
        (["e000", "--seeds", "42,x,--1"], "--seeds: got x, --1, expected whole numbers"),
        (["e000", "--profile", "huge"], "got profile 'huge', expected one of tiny, smoke"),
    ],
)
def test_wrong_names_are_refused_before_anything_starts(
    sdpo: Sdpo, command: str, arguments: list[str], part: str
) -> None:
    _refused(sdpo(command, *arguments), part)


def test_a_data_set_the_experiment_does_not_declare_is_refused(sdpo: Sdpo, small: str) -> None:
    _refused(sdpo("plan", small, "--datasets", "sciknoweval-biology"), "expected one the experiment declares")


def test_tool_use_without_rows_says_where_to_place_them(sdpo: Sdpo, small: str) -> None:
    place = "$SDPO_HOME/sources/toolalpaca "
    _refused(sdpo("run", small, "--datasets", "toolalpaca"), "got 0 training rows", place)


def test_a_page_of_an_experiment_with_tool_use_is_refused_before_training(sdpo: Sdpo, tmp_path: Path) -> None:
    """The selection alone could be trained, but the page at the end shows the whole declaration."""
    experiment = tmp_path / "mine.py"
    experiment.write_text(
        "from experiments.e000_smoke import E000\n"
        'MINE = E000.model_copy(update={"name": "mine", "datasets": ("sciknoweval-physics", "toolalpaca")})\n'
    )
    _refused(sdpo("plan", str(experiment), "--datasets", "sciknoweval-physics"), "'toolalpaca' of task 'tool_call'")


def test_prepare_prints_the_damaged_rows_of_a_source_and_goes_on(sdpo: Sdpo, home: Path) -> None:
    rows = bundled_bytes("lasgroup-sdpo/tooluse/test.json").split(b"\n")[:10]
    # An API that the test rows do not have, and numbers of their own, as training rows must.
    rows = [
        json.dumps({**json.loads(line.replace(b"Axolotl", b"Newt")), "idx": n}).encode() for n, line in enumerate(rows)
    ]
    source = home / "sources" / "toolalpaca" / "train.json"
    source.parent.mkdir(parents=True)
    source.write_bytes(b"\n".join((*rows, b'{"broken": ')))
    result = sdpo("prepare", "toolalpaca")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()[2:]
    assert "bad_json 1" in line
    name, read, kept, train, dev, test = line.split()[:6]
    assert (name, read, kept, int(train) + int(dev), test) == ("toolalpaca", "79", "75", 10, "65")


def test_prepare_refuses_an_unknown_name(sdpo: Sdpo) -> None:
    _refused(sdpo("prepare", "spelling"), "'spelling', expected one of spell_backward")


def test_prepare_prints_one_row_a_data_set(sdpo: Sdpo) -> None:
    lines = sdpo("prepare", "sciknoweval-physics").stdout.splitlines()
    assert lines[0].startswith("data set")
    assert lines[2].split()[:3] == ["sciknoweval-physics", "800", "784"]


def test_prepare_prints_leaks_and_baselines(sdpo: Sdpo) -> None:
    header, _, line = sdpo("prepare", "sciknoweval-physics").stdout.splitlines()
    assert header.endswith("guess baselines on test, %")
    assert "group_in_test 13, test_stem_in_train 7" in line
    assert line.endswith("best_constant_letter 41.2, second_largest_number 42.5")


Rows = list[dict[str, object]]
ROWS: Rows = [{"prompt": f"Say {n}.", "label": str(n), "task": "exact"} for n in range(60)]


def _own(path: Path, rows: Rows) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_prepare_takes_a_users_file_and_lets_its_responses_be_graded(sdpo: Sdpo, home: Path, tmp_path: Path) -> None:
    path = _own(tmp_path / "mine.jsonl", ROWS)
    (line,) = sdpo("prepare", f"file:{path}").stdout.splitlines()[2:]
    name, read, kept = line.split()[:3]
    assert (name.startswith("mine-"), read, kept) == (True, "60", "60")
    problem = json.loads((home / "data" / name / "train.jsonl").read_text().splitlines()[0])
    answers: Rows = [{"id": problem["id"], "response": text} for text in (problem["label"], "no")]
    result = sdpo("prepare", "--grade", str(_own(tmp_path / "answers.jsonl", answers)))
    assert [json.loads(row)["score"] for row in result.stdout.splitlines()] == [1.0, 0.0]
    assert "0.500" in result.stderr.splitlines()[2]


def test_prepare_check_lists_faults_and_exits_2(sdpo: Sdpo, home: Path, tmp_path: Path) -> None:
    path = _own(tmp_path / "mine.jsonl", [*ROWS[:2], {"prompt": "x", "label": 3, "task": "exact"}])
    result = sdpo("prepare", "--check", str(path))
    assert result.exit_code == 2
    assert result.stdout == f"{path}:3: missing_field: label: got a value of type int, expected text\n"
    assert result.stderr.startswith(f"sdpo: {path}: got 1 rows that cannot be used")
    good = sdpo("prepare", "--check", str(_own(tmp_path / "good.jsonl", ROWS)))
    assert (good.exit_code, good.stdout) == (0, f"{tmp_path / 'good.jsonl'}: nothing is wrong\n")
    assert not (home / "data").exists() or not list((home / "data").glob("*good*"))


def test_prepare_does_one_thing_at_a_time(sdpo: Sdpo, tmp_path: Path) -> None:
    _refused(sdpo("prepare", "toolalpaca", "--check", str(tmp_path)), "got more than one of names, --check and --grade")


def test_plan_takes_a_users_file_as_a_data_set(sdpo: Sdpo, home: Path, tmp_path: Path) -> None:
    """Cells carry the name that stands for its content; the path appears nowhere in the store."""
    question = "Which?\n\nA: 1\nB: 2"
    rows: Rows = [{"prompt": f"{n} {question}", "label": "B", "task": "mcq"} for n in range(60)]
    place = tmp_path / "hidden-folder"
    place.mkdir()
    path = _own(place / "mine.jsonl", rows)
    experiment = tmp_path / "own.py"
    experiment.write_text(
        "from experiments.e000_smoke import E000\n"
        f'OWN = E000.model_copy(update={{"name": "own", "datasets": ("file:{path}",)}})\n'
    )
    lines = sdpo("plan", str(experiment), "--arms", "grpo").stdout.splitlines()[2:]
    assert [line.split("/")[0].startswith("mine-") for line in lines] == [True]
    assert len(sdpo("plan", str(experiment), "--datasets", f"file:{path}").stdout.splitlines()) == 5
    written = [file.read_text() for file in (home / "data").glob("mine-*/*")]
    assert len(written) == 6
    assert not any("hidden-folder" in text for text in written)


def test_a_users_file_without_a_task_of_the_profile_is_refused(sdpo: Sdpo, tmp_path: Path) -> None:
    path = _own(tmp_path / "mine.jsonl", ROWS)
    experiment = tmp_path / "own.py"
    experiment.write_text(
        "from experiments.e000_smoke import E000\n"
        f'OWN = E000.model_copy(update={{"name": "own", "datasets": ("file:{path}",)}})\n'
    )
    _refused(sdpo("plan", str(experiment)), "of task 'exact', expected a task of profile 'smoke'")
    experiment.write_text(experiment.read_text().replace(str(path), str(tmp_path / "none.jsonl")))
    _refused(sdpo("plan", str(experiment)), "expected a file or folder there")


def test_plan_shows_states_and_why(sdpo: Sdpo, matrix: Matrix, small: str) -> None:
    cells = matrix.planned()
    journals = [matrix.store.journal(str(cell.fingerprint)) for cell in cells]
    write_json(journals[1].error_path, {"error": "step 3: got nan.", "time": 1.0})
    journals[2].append_metrics(MetricRecord(step=1, moment="step", time=1.0, metrics={}))
    (journals[2].checkpoints / "step-000001").mkdir(parents=True)
    with journals[0].lease({"pid": 1}):
        lines = sdpo("plan", small).stdout.splitlines()[2:]
    assert [line.split()[1] for line in lines] == ["running", "failed", "missing"]
    assert lines[1].endswith("step 3: got nan.")
    assert lines[2].endswith("interrupted, resumes from step 1")
    assert [line.split()[2] for line in lines] == [cell.fingerprint for cell in cells]


def test_plan_says_why_a_base_failed(sdpo: Sdpo, home: Path, small: str) -> None:
    base = load_matrix(small, Selection(), home=home).bases()[0]
    write_json(home / "bases" / base.fingerprint / "error.json", {"error": "base smoke-mcq: got nan.", "time": 1.0})
    lines = sdpo("plan", small).stdout.splitlines()[2:]
    assert [line.split()[1] for line in lines] == ["failed"] * 3
    assert lines[0].endswith("base smoke-mcq: got nan.")


def test_plan_takes_a_part(sdpo: Sdpo, small: str) -> None:
    lines = sdpo("plan", small, "--arms", "grpo, sdpo-ema", "--arms", "sdpo-static", "--seeds", "42").stdout
    assert [line.split()[0].split("/")[1] for line in lines.splitlines()[2:]] == ["grpo", "sdpo-ema", "sdpo-static"]


def test_command_line_starts_without_the_heavy_packages() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_report_json_lists_cells_that_are_not_done_without_numbers(sdpo: Sdpo, home: Path, small: str) -> None:
    rows = json.loads(sdpo("report", small, "--json").stdout)
    assert len(rows) == 3
    assert rows[0] == {
        "dataset": "sciknoweval-physics",
        "arm": "grpo",
        "seed": 42,
        "state": "missing",
        "fingerprint": None,
        "metrics": {},
    }
    assert not (home.parent / "results").exists()


def test_report_under_another_profile_goes_to_a_folder_of_its_own(sdpo: Sdpo, tmp_path: Path, small: str) -> None:
    result = sdpo("report", small, "--profile", "tiny")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "results/small-tiny/results.md"
    assert "3 missing" in (tmp_path / "results" / "small-tiny" / "results.md").read_text()


@pytest.mark.parametrize("name", ["manifest.json", "train.jsonl"])
def test_damaged_prepared_files_are_made_again(sdpo: Sdpo, home: Path, small: str, name: str) -> None:
    assert sdpo("plan", small).exit_code == 0
    path = home / "data" / "sciknoweval-physics" / name
    good = path.read_bytes()
    path.write_bytes(good[:50])
    assert sdpo("plan", small).exit_code == 0
    assert path.read_bytes() == good


def test_damaged_journal_names_the_file(sdpo: Sdpo, matrix: Matrix, small: str) -> None:
    journal = matrix.store.journal(str(matrix.planned()[0].fingerprint))
    journal.metrics_path.write_text('{"step": 1\n')
    _refused(sdpo("report", small), f"{journal.metrics_path}:1", "Delete")


def test_damaged_result_names_the_file(sdpo: Sdpo, matrix: Matrix, small: str) -> None:
    journal = matrix.store.journal(str(matrix.planned()[0].fingerprint))
    journal.result_path.write_text("{")
    _refused(sdpo("report", small), str(journal.result_path), "Delete")


def test_damaged_cell_spec_is_written_again(sdpo: Sdpo, matrix: Matrix) -> None:
    journal = matrix.store.journal(str(matrix.planned()[0].fingerprint))
    good = journal.spec_path.read_bytes()
    journal.spec_path.write_text("{")
    _refused(sdpo("samples", "sciknoweval-physics/grpo/42"), str(journal.spec_path))
    matrix.write_specs()
    assert journal.spec_path.read_bytes() == good


def test_damaged_base_record_names_the_file(sdpo: Sdpo, matrix: Matrix, small: str) -> None:
    record = matrix.store.bases / matrix.bases()[0].fingerprint / "base.json"
    record.write_text("[]")
    _refused(sdpo("plan", small), str(record))


def test_samples_shows_early_against_late(sdpo: Sdpo, matrix: Matrix) -> None:
    journal = matrix.store.journal(str(matrix.planned()[1].fingerprint))
    for step in range(1, 7):
        journal.append_sample(
            {
                "step": step,
                "problem_id": "spell/train/1",
                "rollout": 0,
                "prompt": "Spell this.",
                "response": f"answer of step {step}",
                "score": 0.5,
                "reason": "wrong",
                "feedback": None,
                "teacher_prompt": "With context." if step == 6 else None,
                "demonstrator": 2 if step == 6 else None,
            }
        )
    for name in ("sciknoweval-physics/sdpo-static/42", journal.folder.name[:8]):
        shown = sdpo("samples", name, "--count", "2").stdout
        assert [step for step in range(1, 7) if f"answer of step {step}" in shown] == [1, 2, 5, 6]
        assert "(demonstration by rollout 2)\nWith context." in shown
        assert "[teacher] n/a: no teacher context" in shown


@pytest.mark.parametrize(
    ("arm", "line"), [("grpo", "[teacher] n/a: the arm has none"), ("opd", "[teacher] reads the prompt above")]
)
def test_samples_says_what_a_teacher_without_context_reads(
    sdpo: Sdpo, home: Path, cell_spec: CellSpec, arm: str, line: str
) -> None:
    algorithm = {"name": "grpo", "opd": {"teacher": {"schedule": "static"}}} if arm == "opd" else {"name": "grpo"}
    spec = CellSpec.model_validate(cell_spec.model_dump(mode="json") | {"arm": arm, "algorithm": algorithm})
    journal = Store(home).journal("0" * 20)
    digests = {"data_digest": "d", "base_digest": "b", "base_fingerprint": "f"}
    journal.write_spec(spec, fingerprint="0" * 20, **digests, teacher_digest=None, teacher_fingerprint=None)
    sample = {"step": 1, "problem_id": "a", "rollout": 0, "prompt": "Spell.", "response": "b", "score": 0.5}
    journal.append_sample({**sample, "reason": "wrong", "feedback": None, "teacher_prompt": None, "demonstrator": None})
    assert line in sdpo("samples", spec.label).stdout.splitlines()


@pytest.mark.usefixtures("matrix")
def test_samples_refuses_an_unknown_cell(sdpo: Sdpo) -> None:
    assert sdpo("samples", "sciknoweval-physics/grpo/42").stdout.strip().endswith("no samples yet")
    _refused(sdpo("samples", "sciknoweval-physics/grpo/7"), "got 'sciknoweval-physics/grpo/7', expected a cell of")


def test_doctor_finds_this_machine_able(sdpo: Sdpo) -> None:
    result = sdpo("doctor")
    assert result.exit_code == 0, result.output
    assert "runs here" in result.stdout


def test_doctor_prints_the_digest_that_a_worker_of_these_weights_reports(sdpo: Sdpo, tmp_path: Path) -> None:
    from tests.sdpo_core.micro import load_model, make_base

    folder = tmp_path / "model"
    make_base(folder)
    result = sdpo("doctor", "--weights", str(folder))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == load_model(folder).facts().weights_sha256
    _refused(sdpo("doctor", "--weights", str(tmp_path)), f"model {tmp_path}: got no config.json", "no safetensors")


def test_plan_says_what_is_to_be_placed_and_run_what_is_to_be_installed(
    sdpo: Sdpo, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda _: False)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "gpus", lambda: 0)
    python = home.with_name("python")
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", str(python))
    arguments = ("e020", "--datasets", "sciknoweval-physics,toolalpaca-real", "--seeds", "42", "--arms", "grpo")
    result = sdpo("plan", *arguments)
    assert result.exit_code == 0, result.output
    for line in result.stdout.splitlines()[2:]:
        assert re.match(r".*/grpo/42 +missing +n/a +unknown +its base model is to be placed .* models/Qwen3-4B$", line)
    _refused(
        sdpo("run", *arguments),
        "profile qwen3-4b-2gpu: got a machine without 4 cores, 2 GPUs, extra megatron (install it: .venv/bin/pip",
        ", extra transformer_engine (install it: ",
        ", extra sglang (install it: make sglang-env)",
    )
    assert not (home / "bases").exists()
    monkeypatch.setattr(extras, "is_installed", lambda _: True)
    python.touch()
    _refused(sdpo("run", *arguments), "got a machine without 4 cores, 2 GPUs, expected all that its cells need.")
    (home / "models" / "Qwen3-4B").mkdir(parents=True)
    assert "its base model is not made yet" in sdpo("plan", *arguments).stdout


def test_a_profile_whose_parts_do_not_fit_is_refused_at_once(sdpo: Sdpo, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"layout": LayoutSpec(context=2), "dtype": "bfloat16", "engine": "vllm"}
    monkeypatch.setitem(PROFILES, "smoke", PROFILES["smoke"].model_copy(update=changes))
    for command in ("plan", "run"):
        _refused(
            sdpo(command, "e000"),
            "profile smoke: got a layout of 2 processes for backend 'hf', expected one process; got dtype 'bfloat16'",
            "; got engine 'vllm', expected one of local, replica, sglang; got dtype 'bfloat16' for ",
        )


def test_an_arm_that_does_not_fit_the_profile_is_refused_before_anything_starts(sdpo: Sdpo, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from experiments.e000_smoke import E000\n"
        'MINE = E000.model_copy(update={"name": "mine", "arms": ("grpo", "opd")})\n'
    )
    _refused(sdpo("run", str(path)), "expected profile 'smoke' to name one for task 'mcq' (teacher_base)")


def test_status_and_down_without_services(sdpo: Sdpo) -> None:
    assert {line.split()[1] for line in sdpo("status").stdout.splitlines()[2:]} == {"down"}
    assert sdpo("down").stdout.strip() == "nothing was up"
