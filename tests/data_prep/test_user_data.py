"""A user's own rows: read by task, named by content, never lost without a word."""

import copy
import json
import random
import shutil
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest

from data_prep.codes import CODES
from data_prep.prepare import prepare_dataset
from data_prep.shapes.base import Origin, RowRejectedError
from data_prep.shapes.canonical import SHAPE
from data_prep.shapes.table import recognise
from data_prep.table import dataset_entry
from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Problem, read_problems
from tests.data_prep.source_rows import RAW, TOOL_USE, bundled

ORIGIN = Origin(dataset="d", domain=None, source="file", repository="r", revision="", path="d", line=7, split="train")
MCQ = {"prompt": "Which is liquid?\n\nA: iron\nB: mercury\nC: zinc", "label": "B", "task": "mcq"}
CHOICES = [{"label": "1", "text": "iron"}, {"label": "2", "text": "mercury"}]
LISTED = {"prompt": "iron or mercury?", "task": "mcq", "label": "2", "reference": {"choices": CHOICES}}
TRUE = {"prompt": "Is water wet?", "label": "true", "task": "true_false"}
EXACT = {"prompt": "Which metal is liquid?", "label": "mercury", "task": "exact"}
CALL = {"name": "f", "arguments": {"b": 1.5, "a": [None, "x"]}}
CALLS = {"calls": [CALL], "tool_names": ["f", "g"]}
TOOLS = {"prompt": "Call f.", "task": "tool_call", "reference": CALLS}
OWN = {"prompt": "Say 4.", "label": "4", "task": "call:tests.data_prep.test_user_data:own_grader"}
GOOD = (MCQ, LISTED, TRUE, EXACT, TOOLS, OWN)


def own_grader(reference, response):
    """A grader such as a user has."""
    return float(response.strip() == reference["answer"])


def broken_grader(reference, response):
    return len(reference) / len(response)


def _problem(row):
    (problem,) = SHAPE.problems(row, ORIGIN)
    assert isinstance(problem, Problem)
    return problem


def _write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"file:{path}"


def _rows(count, **more):
    return [{"prompt": f"Say {n}.", "label": str(n), "task": "exact", **more} for n in range(count)]


@pytest.mark.parametrize(
    ("row", "label", "reference"),
    [
        (
            MCQ,
            "B",
            {
                "answer_key": "B",
                "choices": [{"label": a, "text": b} for a, b in zip("ABC", ["iron", "mercury", "zinc"], strict=True)],
            },
        ),
        (LISTED, "2", {"answer_key": "2", "choices": CHOICES}),
        (TRUE, "Yes", {"answer": "Yes"}),
        ({**TRUE, "label": "no"}, "No", {"answer": "No"}),
        (EXACT, "mercury", {"answer": "mercury"}),
        (TOOLS, '[{"arguments":{"a":[null,"x"],"b":1.5},"name":"f"}]', {**CALLS, "order": "any"}),
        (
            {**TOOLS, "label": json.dumps([CALL]), "reference": {"tool_names": ["f", "g"]}},
            '[{"arguments":{"a":[null,"x"],"b":1.5},"name":"f"}]',
            {**CALLS, "order": "any"},
        ),
        (OWN, "4", {"answer": "4"}),
        ({**OWN, "reference": {"answer": "4", "more": [1]}}, "4", {"answer": "4", "more": [1]}),
    ],
)
def test_canonical_rows_are_read_by_task(row, label, reference):
    problem = _problem(row)
    assert (problem.label, dict(problem.reference), problem.task) == (label, reference, row["task"])
    assert [turn.content for turn in problem.prompt] == [row["prompt"]]
    assert recognise(row) is SHAPE


def test_canonical_row_keeps_all_that_it_says():
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello?"},
        {"role": "user", "content": "Which metal is liquid?"},
    ]
    row = {
        **EXACT,
        "prompt": turns,
        "id": "q1",
        "privileged": "It is mercury.",
        "split": "dev",
        "domain": "metals",
        "details": {"task": "liquids"},
        "group_key": "liquids",
        "flags": ["easy"],
    }
    problem = _problem(row)
    assert [{"role": turn.role, "content": turn.content} for turn in problem.prompt] == turns
    assert (problem.id, problem.privileged, problem.split, problem.domain) == (
        "d/q1",
        "It is mercury.",
        "dev",
        "metals",
    )
    assert (problem.details, problem.group_key, problem.flags) == ({"task": "liquids"}, "liquids", ("easy",))


@pytest.mark.parametrize(
    ("row", "change", "code"),
    [
        (MCQ, {"note": 1}, "unknown_key"),
        (MCQ, {"task": 3}, "missing_field"),
        (MCQ, {"prompt": ""}, "missing_field"),
        (MCQ, {"prompt": []}, "prompt_not_read"),
        (MCQ, {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "prompt_not_read"),
        (MCQ, {"prompt": [{"role": "tool", "content": "x"}]}, "prompt_not_read"),
        (MCQ, {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "missing_field"),
        (MCQ, {"prompt": "Which is liquid?"}, "options_not_found"),
        (MCQ, {"label": "D"}, "gold_not_a_label"),
        (MCQ, {"reference": {"answer_key": "C"}}, "gold_conflict"),
        (MCQ, {"label": None}, "missing_field"),
        (MCQ, {"split": "validation"}, "split_unknown"),
        (MCQ, {"privileged": " "}, "missing_field"),
        (MCQ, {"details": []}, "missing_field"),
        (LISTED, {"prompt": "Which is liquid?"}, "options_not_in_prompt"),
        (LISTED, {"reference": {"choices": CHOICES[:1]}}, "choices_mismatch"),
        (LISTED, {"reference": {"choices": [*CHOICES, CHOICES[0]]}}, "choices_mismatch"),
        (TRUE, {"label": "maybe"}, "gold_not_a_label"),
        (EXACT, {"label": 4}, "missing_field"),
        (EXACT, {"task": "exakt"}, "bad_reference"),
        (EXACT, {"reference": {"answer": 4}}, "bad_reference"),
        (TOOLS, {"reference": {"calls": [CALL], "tool_names": ["g"]}}, "gold_tool_unknown"),
        (TOOLS, {"reference": {"calls": [], "tool_names": ["g"]}}, "no_gold"),
        (
            TOOLS,
            {"reference": {"calls": [{"name": "f", "arguments": "{}"}], "tool_names": ["f"]}},
            "gold_input_not_object",
        ),
        (TOOLS, {"label": "{", "reference": {"tool_names": ["f"]}}, "gold_not_json"),
        (OWN, {"task": "call:nowhere:grade"}, "bad_reference"),
        (OWN, {"task": "call:tests.data_prep.test_user_data:GOOD"}, "bad_reference"),
        (OWN, {"task": "call:tests.data_prep.test_user_data:broken_grader"}, "bad_reference"),
    ],
)
def test_canonical_rows_that_are_wrong_say_how(row, change, code):
    with pytest.raises(RowRejectedError) as rejection:
        _problem({**row, **change})
    assert rejection.value.code == code
    assert code in CODES


def test_canonical_rows_of_one_question_are_one_group():
    """Options in another order ask the same; a group that is named stands as it is."""
    other = {**MCQ, "prompt": "Which  is liquid?\n\nA: mercury\nB: iron\nC: tin", "label": "A"}
    assert _problem(other).group_key == _problem(MCQ).group_key != _problem(TRUE).group_key


def test_prepared_lines_are_rows_again(tmp_path):
    """What `sdpo prepare` wrote can be named as a file: same prompts, golds, groups, flags and splits."""
    first = prepare_dataset("sciknoweval-physics", home=tmp_path)
    old = {
        row.id: row
        for split in ("train", "dev", "test")
        for row in read_problems(tmp_path / "data" / first.name / f"{split}.jsonl")
    }
    folder = tmp_path / "again"
    folder.mkdir()
    for split in ("train", "dev", "test"):
        shutil.copy(tmp_path / "data" / first.name / f"{split}.jsonl", folder)
    again = prepare_dataset(f"file:{folder}", home=tmp_path)
    assert again.splits == first.splits
    for split in ("train", "dev", "test"):
        for row in read_problems(tmp_path / "data" / again.name / f"{split}.jsonl"):
            before = old[row.id.removeprefix(f"{again.name}/")]
            assert (row.prompt, row.label, row.reference) == (before.prompt, before.label, before.reference)
            assert (row.group_key, row.flags, row.split) == (before.group_key, before.flags, split)
            assert (row.details, row.domain) == (before.details, "physics")


def test_file_is_named_by_stem_and_content(tmp_path):
    """Nowhere in what is written does its folder appear; the same file elsewhere is the same data set, to the byte."""
    here = _write(tmp_path / "secret" / "My rows.jsonl", _rows(40))
    there = _write(tmp_path / "other" / "My rows.jsonl", _rows(40))
    entry = dataset_entry(here)
    assert entry.name == dataset_entry(there).name
    assert entry.name.startswith("my-rows-")
    assert dataset_entry(_write(tmp_path / "third" / "My rows.jsonl", _rows(41))).name != entry.name
    homes = [tmp_path / "a", tmp_path / "b"]
    for home, name in zip(homes, (here, there), strict=True):
        prepare_dataset(name, home=home)
    one, other = ({path.name: path.read_bytes() for path in (home / "data" / entry.name).iterdir()} for home in homes)
    assert one == other
    assert all(b"secret" not in content for content in one.values())


def test_file_changed_is_seen(tmp_path):
    path = tmp_path / "mine.jsonl"
    before = dataset_entry(_write(path, _rows(5))).name
    assert dataset_entry(_write(path, _rows(6))).name != before


def test_file_without_splits_gets_them_and_given_ones_stay(tmp_path):
    made = prepare_dataset(_write(tmp_path / "made.jsonl", _rows(300)), home=tmp_path)
    assert made.splits["train"] > 200
    assert min(made.splits["dev"], made.splits["test"]) > 10
    rows = [
        *_rows(20, split="test"),
        *({**row, "prompt": row["prompt"] + " Now.", "split": "dev"} for row in _rows(20)),
    ]
    given = prepare_dataset(_write(tmp_path / "given.jsonl", rows), home=tmp_path)
    assert given.splits == {"train": 0, "dev": 20, "test": 20}


def test_file_takes_the_task_of_its_first_usable_row(tmp_path):
    assert dataset_entry(_write(tmp_path / "a.jsonl", [{"x": 1}, TOOLS, MCQ])).task == "tool_call"
    assert dataset_entry(_write(tmp_path / "b.jsonl", [{"x": 1}])).task is None


def test_folder_is_one_data_set_of_files_in_any_format(tmp_path):
    folder = tmp_path / "mine"
    _write(folder / "deep" / "a.txt", _rows(10))
    (folder / "b.json").write_text(json.dumps(_rows(10, domain="b")))
    datasets.Dataset.from_list([{"prompt": f"{n}?", "label": "x", "task": "exact"} for n in range(10)]).to_parquet(
        folder / "c"
    )
    (folder / "README.md").write_text("# Mine")
    (folder / ".hidden").write_text("{")
    manifest = prepare_dataset(f"file:{folder}", home=tmp_path)
    # The rows of the array ask what those of the first file ask.
    assert (manifest.rows_read, manifest.kept, manifest.quarantined) == (30, 20, {"exact_repeat": 10})
    assert manifest.source["ignored"] == [f"{manifest.name}/README.md"]


@pytest.mark.parametrize("path", [f"{RAW}/Chemistry/retrosynthesis.jsonl", TOOL_USE])
def test_file_may_hold_rows_of_any_known_shape(tmp_path, path):
    manifest = prepare_dataset(_write(tmp_path / "rows", bundled(path)[:40]), home=tmp_path)
    assert manifest.kept + manifest.quarantined.get("gold_tool_unknown", 0) == 40


def test_file_that_is_not_there_or_holds_nothing_is_refused(tmp_path):
    with pytest.raises(SpecError, match="expected a file or folder there"):
        dataset_entry(f"file:{tmp_path / 'none.jsonl'}")
    (tmp_path / "page.md").write_text("# Mine")
    with pytest.raises(DataError, match=r"got no usable row \(there are no rows\).*--check"):
        prepare_dataset(f"file:{tmp_path / 'page.md'}", home=tmp_path)


_STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    float("nan"),
    float("inf"),
    "",
    " ",
    "A",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    {"a": {}},
)


def _damaged(draw):
    row = json.loads(json.dumps(draw.choice(GOOD)))
    for _ in range(draw.randint(1, 3)):
        place = row
        while isinstance(place, dict | list) and place and draw.random() < 0.5:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list):
                break
            place = place[key]
        if isinstance(place, dict):
            key = draw.choice([*place, "extra", "split", "details", "id", "metadata", "flags"])
        elif place:
            key = draw.randrange(len(place))
        else:
            continue
        if draw.random() < 0.2 and key in (place if isinstance(place, dict) else range(len(place))):
            del place[key]
        else:
            place[key] = copy.deepcopy(draw.choice(_STRANGE))
    return row


def test_damaged_rows_are_kept_unchanged_or_rejected(tmp_path):
    """10,000 of them go through the whole of preparing: each line is accounted for, and what is kept is as it stood."""
    draw = random.Random(3)
    lines = [json.dumps(_damaged(draw)) for _ in range(10_000)]
    for place in range(0, len(lines), 50):
        lines[place] = lines[place][: draw.randrange(len(lines[place]))]
    (tmp_path / "damaged").write_text("\n".join(['{"prompt": "Say x.", "label": "x", "task": "exact"}', *lines]))
    manifest = prepare_dataset(f"file:{tmp_path / 'damaged'}", home=tmp_path)
    blank = sum(not line for line in lines)
    assert manifest.rows_read == len(lines) + 1 - blank
    assert set(manifest.quarantined) <= set(CODES)
    assert len(manifest.quarantined) > 15
    kept = 0
    for split in manifest.files:
        for problem in read_problems(tmp_path / "data" / manifest.name / f"{split}.jsonl"):
            number = problem.source["line"]
            row = json.loads(lines[number - 2]) if number > 1 else None
            if row is not None:
                said = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
                assert problem.prompt[-1].content == said
                kept += 1
    assert kept == manifest.kept - 1 > 5
