"""Mixtures: proportions, sameness, leaks between parts, and the file that declares one."""

import json
from collections import Counter

import pytest

from data_prep.entry import Part
from data_prep.prepare import prepare_dataset
from data_prep.table import DATASETS, dataset_entry
from data_prep.user_data import mixture_entry
from sdpo_core.errors import SpecError
from sdpo_core.records import read_problems


def _rows(path, count, *, task="exact", first=0):
    rows = [
        {"prompt": f"{path.stem} {n}?", "label": "Yes", "task": task, "id": f"{n}"} for n in range(first, first + count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))


def _declare(path, **declaration):
    path.write_text(json.dumps(declaration))
    return f"file:{path}"


@pytest.fixture
def folder(tmp_path):
    """Two files of rows, of two tasks, of 400 and 100 rows."""
    _rows(tmp_path / "large.jsonl", 400)
    _rows(tmp_path / "small.jsonl", 100, task="true_false")
    return tmp_path


def _prepared(name, *, home):
    manifest = prepare_dataset(name, home=home)
    return manifest, {
        split: read_problems(home / "data" / manifest.name / f"{split}.jsonl") for split in manifest.files
    }


def test_mixture_has_training_rows_in_proportion_and_all_of_dev_and_test(folder):
    name = _declare(
        folder / "mix.json", parts={"file:large.jsonl": 3, "file:small.jsonl": 2}, task="exact", permute=None
    )
    manifest, rows = _prepared(name, home=folder)
    parts = {stem: _prepared(f"file:{folder / stem}.jsonl", home=folder)[0] for stem in ("large", "small")}
    scarce = parts["small"].splits["train"]
    counts = Counter(row.dataset for row in rows["train"])
    assert counts == {parts["large"].name: 3 * scarce // 2, parts["small"].name: scarce}
    for split in ("dev", "test"):
        assert manifest.splits[split] == sum(part.splits[split] for part in parts.values())
    assert manifest.tasks["exact"] > manifest.tasks["true_false"]
    # Mixed from start to end: neither part stands alone at either.
    for split in ("train", "dev", "test"):
        assert len({row.dataset for row in rows[split][:12]}) == len({row.dataset for row in rows[split][-12:]}) == 2


def test_mixture_reports_each_part(folder):
    name = _declare(folder / "mix.json", parts={"file:large.jsonl": 3, "file:small.jsonl": 2}, task="exact")
    manifest, _ = _prepared(name, home=folder)
    small = next(facts for part, facts in manifest.by_part.items() if part.startswith("small-"))
    assert small["rows"]["train"] == _prepared(f"file:{folder / 'small.jsonl'}", home=folder)[0].splits["train"]
    assert small["baselines"]["best_constant_answer"]["test"] == 1.0
    assert [part["weight"] for part in manifest.source["parts"]] == [3, 2]
    assert sum(facts["rows"]["train"] for facts in manifest.by_part.values()) == manifest.splits["train"]


def test_mixture_is_the_same_wherever_its_files_lie(folder, tmp_path_factory):
    parts = {"file:large.jsonl": 1, "file:small.jsonl": 1}
    other = tmp_path_factory.mktemp("other")
    for stem in ("large", "small"):
        (other / f"{stem}.jsonl").write_bytes((folder / f"{stem}.jsonl").read_bytes())
    names = [_declare(place / "mix.json", parts=parts, task="exact") for place in (folder, other)]
    manifests = [prepare_dataset(name, home=place) for name, place in zip(names, (folder, other), strict=True)]
    assert manifests[0] == manifests[1]
    changed = _declare(folder / "mix.json", parts={**parts, "file:large.jsonl": 2}, task="exact")
    assert dataset_entry(changed).name != manifests[0].name


def test_mixture_of_another_name_draws_other_rows(folder):
    parts = {"file:large.jsonl": 1, "file:small.jsonl": 1}
    drawn = []
    for stem in ("one", "two"):
        _, rows = _prepared(_declare(folder / f"{stem}.json", parts=parts, task="exact"), home=folder)
        drawn.append({row.id for row in rows["train"] if row.dataset.startswith("large")})
    assert len(drawn[0]) == len(drawn[1]) > len(drawn[0] & drawn[1])


def test_mixture_keeps_questions_of_one_part_out_of_the_others_test(tmp_path):
    """The raw Physics rows are those of the reference; each part's train holds questions of the other's test."""
    name = _declare(tmp_path / "twice.json", parts={"sciknoweval-physics": 1, "sciknoweval-physics-raw": 1})
    manifest, rows = _prepared(name, home=tmp_path)
    tests = {row.group_key for row in rows["test"]}
    assert not tests & {row.group_key for split in ("train", "dev") for row in rows[split]}
    assert manifest.quarantined["group_in_test"] > 50
    assert manifest.quarantined["exact_repeat"] > 400


def test_mixture_permutes_options_of_its_parts(tmp_path):
    plain = _declare(tmp_path / "plain.json", parts={"sciknoweval-physics": 1})
    moved = _declare(tmp_path / "moved.json", parts={"sciknoweval-physics": 1}, permute=3)
    one, other = ({row.id: row for row in _prepared(name, home=tmp_path)[1]["test"]} for name in (plain, moved))
    assert one.keys() == other.keys()
    assert 30 < sum(one[key].label != other[key].label for key in one) < 78


def test_shipped_mixture_takes_as_many_rows_of_each_domain(prepared):
    manifest = prepared["sciknoweval-mixed"].manifest
    assert {facts["rows"]["train"] for facts in manifest.by_part.values()} == {407}
    assert manifest.splits["test"] == 434
    # The mark of a reference row stays on it.
    assert sum(not row.details["stem_disjoint"] for row in prepared["sciknoweval-mixed"].problems["test"]) == 31


def test_mixture_of_two_tasks_must_name_one():
    parts = (Part(entry=DATASETS["sciknoweval-physics"], weight=1), Part(entry=DATASETS["toolalpaca-real"], weight=1))
    with pytest.raises(SpecError, match="got parts of the tasks mcq, tool_call, expected one task"):
        mixture_entry("both", parts=parts)
    assert mixture_entry("both", parts=parts, task="mcq").task == "mcq"


def test_mixture_of_a_part_without_training_rows_says_where_they_belong(tmp_path):
    name = _declare(tmp_path / "mix.json", parts={"toolalpaca": 1, "toolalpaca-real": 1})
    with pytest.raises(SpecError, match=r"toolalpaca: got 0 training rows.*\$SDPO_HOME/sources/toolalpaca"):
        prepare_dataset(name, home=tmp_path)


@pytest.mark.parametrize(
    ("declaration", "why"),
    [
        ({"parts": {}}, "parts that are no names with weights"),
        ({"parts": ["sciknoweval-physics"]}, "parts that are no names with weights"),
        ({"parts": {"sciknoweval-physics": 0}}, "parts that are no names with weights"),
        ({"parts": {"sciknoweval-physics": True}}, "parts that are no names with weights"),
        ({"parts": {"sciknoweval-physics": 1}, "seed": 1}, "the keys seed"),
        ({"parts": {"sciknoweval-physics": 1}, "permute": "x"}, "a permute that is no whole number"),
        ({"parts": {"sciknoweval-physics": 1}, "task": 1}, "a task that is no text"),
        ({"parts": {"physics": 1}}, "got data set 'physics', expected one of spell_backward"),
        ({"parts": {"file:none.jsonl": 1}}, "expected a file or folder there"),
    ],
)
def test_declaration_that_is_faulty_is_refused(tmp_path, declaration, why):
    with pytest.raises(SpecError, match=why):
        dataset_entry(_declare(tmp_path / "mix.json", **declaration))
