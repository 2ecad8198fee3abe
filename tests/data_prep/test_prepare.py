"""Preparing: counts of the shipped data, splits, idempotence, damaged and supplied rows."""

import json
import lzma
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from data_prep.manifest import read_manifest, require_train
from data_prep.prepare import prepare_dataset
from data_prep.sources import BUNDLED, SourceFile, bundled_bytes, open_sources
from data_prep.table import DATASETS, dataset_entry
from data_prep.warmups.table import warmup
from sdpo_core.errors import DataError, SpecError
from sdpo_core.fingerprint import file_digest
from tests.data_prep.source_rows import RAW, sample

ROOT = Path(__file__).resolve().parents[2]

# name: rows in the source's train and test, rows kept in train, dev and test, quarantined by code.
COUNTS: dict[str, tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]] = {
    "sciknoweval-biology": ((450, 50), (407, 43, 50), {}),
    "sciknoweval-chemistry": ((1890, 210), (1703, 187, 210), {}),
    "sciknoweval-materials": ((841, 94), (743, 77, 94), {"exact_repeat": 5, "group_in_test": 16}),
    "sciknoweval-physics": ((720, 80), (638, 66, 80), {"gold_under_two_labels": 3, "group_in_test": 13}),
    "toolalpaca": ((0, 68), (0, 0, 65), {"gold_tool_unknown": 3}),
    "toolalpaca-real": ((11, 68), (83, 21, 65), {"gold_input_not_object": 4, "gold_tool_unknown": 9}),
}
# name: rows read, rows kept in train, dev and test, quarantined by code.
RAW_COUNTS: dict[str, tuple[int, tuple[int, int, int], dict[str, int]]] = {
    "sciknoweval-biology-raw": (600, (394, 54, 52), {"other_task": 100}),
    "sciknoweval-chemistry-raw": (2400, (1687, 206, 207), {"type_not_supported": 300}),
    "sciknoweval-materials-raw": (935, (726, 106, 96), {"choices_mismatch": 1, "exact_repeat": 6}),
    "sciknoweval-physics-raw": (1018, (651, 80, 66), {"gold_under_two_labels": 3, "level_not_l3": 218}),
    "sciknoweval-solubility-raw": (100, (77, 10, 13), {}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_prepare_counts_every_row_of_the_reference_data(prepared, name):
    manifest = prepared[name].manifest
    read, kept, quarantined = COUNTS[name]
    by_split = {entry["split"]: entry["rows"] for entry in manifest.source["files"]}
    assert (by_split.get("train", 0), by_split["test"]) == read
    assert (manifest.splits["train"], manifest.splits["dev"], manifest.splits["test"]) == kept
    assert manifest.quarantined == quarantined


@pytest.mark.parametrize("name", RAW_COUNTS)
def test_prepare_counts_every_raw_row(prepared, name):
    manifest = prepared[name].manifest
    read, kept, quarantined = RAW_COUNTS[name]
    assert sum(entry["rows"] for entry in manifest.source["files"]) == manifest.rows_read == read
    assert (manifest.splits["train"], manifest.splits["dev"], manifest.splits["test"]) == kept
    assert manifest.quarantined == quarantined


def test_prepare_reads_the_rows_of_the_reference_from_the_raw_files(prepared):
    """Level L3 and multiple choice: 4,335 rows, of which the same ones fall to the same rules."""
    names = [name for name in RAW_COUNTS if name != "sciknoweval-solubility-raw"]
    unwanted = {"other_task", "type_not_supported", "level_not_l3"}
    wanted = [
        prepared[name].manifest.rows_read
        - sum(count for code, count in prepared[name].manifest.quarantined.items() if code in unwanted)
        for name in names
    ]
    assert wanted == [500, 2100, 935, 800]


@pytest.mark.parametrize(("domain", "shared"), [("biology", 19), ("chemistry", 0), ("materials", 5), ("physics", 7)])
def test_prepare_marks_test_rows_whose_question_is_in_train(prepared, domain, shared):
    item = prepared[f"sciknoweval-{domain}"]
    marks = [problem.details["stem_disjoint"] for problem in item.problems["test"]]
    assert marks.count(False) == item.manifest.leaks["test_stem_in_train"] == shared
    assert all("stem_disjoint" not in problem.details for problem in item.problems["train"])


def test_prepare_puts_whole_apis_into_dev(prepared):
    rows = prepared["toolalpaca-real"].problems
    apis = {split: {row.details["api"] for row in rows[split]} for split in ("train", "dev", "test")}
    assert [len(found) for found in apis.values()] == [8, 3, 10]
    assert not apis["train"] & apis["dev"] | (apis["train"] | apis["dev"]) & apis["test"]


def test_prepare_accounts_for_each_row_read(prepared):
    for item in prepared.values():
        manifest = item.manifest
        assert manifest.rows_read == manifest.kept + sum(manifest.quarantined.values())
        assert manifest.kept == sum(manifest.splits.values())
        lines = (item.folder / "quarantine.jsonl").read_text().splitlines()
        assert len(lines) == sum(manifest.quarantined.values())


def test_prepare_draws_the_words_to_size(prepared):
    manifest = prepared["spell_backward"].manifest
    assert manifest.splits == {"train": 2000, "dev": 200, "test": 300, "warmup": 12000}
    words = [row.reference["word"] for rows in prepared["spell_backward"].problems.values() for row in rows]
    assert len(set(words)) == 14500
    assert all(word.isascii() and word.islower() and 3 <= len(word) <= 7 for word in words)
    # The 28 palindromes met on the way take no place.
    assert manifest.quarantined == {"palindrome": 28}


def test_prepare_gives_privileged_text_that_is_a_right_response(prepared):
    """It reads as a demonstration does, and a data set without it has no such key."""
    for rows in prepared["spell_backward"].problems.values():
        assert all(problem.privileged == warmup(problem.task).right(problem) for problem in rows)
    assert b"privileged" not in (prepared["sciknoweval-physics"].folder / "train.jsonl").read_bytes()


def test_prepare_keeps_each_group_in_one_split(prepared):
    for item in prepared.values():
        groups = {split: {row.group_key for row in rows} for split, rows in item.problems.items()}
        for split, keys in groups.items():
            for other, other_keys in groups.items():
                assert split == other or not keys & other_keys


def test_prepare_gives_unique_ids_and_the_split_of_the_file(prepared):
    for name, item in prepared.items():
        ids = [row.id for rows in item.problems.values() for row in rows]
        assert len(set(ids)) == len(ids)
        # In a mixture, rows go by the names of its parts.
        names = {part.entry.name for part in DATASETS[name].parts} or {name}
        assert {row.dataset for row in item.problems["test"]} == names
        assert all(row.id.startswith(f"{row.dataset}/") for row in item.problems["test"])
        assert all(row.split == split for split, rows in item.problems.items() for row in rows)


def test_prepare_flags_known_defects(prepared):
    flags = {name: item.manifest.flagged for name, item in prepared.items()}
    assert flags["sciknoweval-biology"] == {"two_options_under_four_option_prompt": 200}
    # The 11 material rows without their data block are known line by line.
    assert flags["sciknoweval-materials"]["data_block_missing"] == 11
    assert flags["sciknoweval-physics"]["equal_options"] == 3
    assert flags["toolalpaca"]["empty_string_in_gold"] == 4


def test_prepare_again_leaves_the_same_bytes_untouched(tmp_path):
    first = prepare_dataset("sciknoweval-physics", home=tmp_path)
    folder = tmp_path / "data" / "sciknoweval-physics"
    stamps = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert prepare_dataset("sciknoweval-physics", home=tmp_path) == first
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == stamps
    assert read_manifest(folder) == first


def test_prepare_restores_a_changed_folder(tmp_path):
    prepare_dataset("toolalpaca", home=tmp_path)
    folder = tmp_path / "data" / "toolalpaca"
    original = (folder / "test.jsonl").read_bytes()
    (folder / "test.jsonl").write_bytes(original[:100])
    (folder / "stray.txt").write_text("x")
    prepare_dataset("toolalpaca", home=tmp_path)
    assert (folder / "test.jsonl").read_bytes() == original
    assert not (folder / "stray.txt").exists()


def test_prepare_after_a_killed_run_starts_clean(tmp_path):
    aside = tmp_path / "data" / ".toolalpaca.new"
    aside.mkdir(parents=True)
    (aside / "half.jsonl").write_text("{")
    prepare_dataset("toolalpaca", home=tmp_path)
    assert sorted(path.name for path in (tmp_path / "data" / "toolalpaca").iterdir()) == [
        "card.md",
        "dev.jsonl",
        "manifest.json",
        "quarantine.jsonl",
        "test.jsonl",
        "train.jsonl",
    ]
    assert not aside.exists()


def test_prepare_gives_the_same_bytes_in_another_process_and_place(prepared, tmp_path):
    """Hashes of text differ between processes; nothing that is written may."""
    names = ["spell_backward", "sciknoweval-mixed", "sciknoweval-physics-permuted", "sciknoweval-chemistry-raw"]
    script = "import sys; from pathlib import Path; from data_prep.prepare import prepare_dataset\n"
    script += "for name in sys.argv[2:]: prepare_dataset(name, home=Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path), *names], check=True, cwd=ROOT)
    for name in names:
        for path in (tmp_path / "data" / name).iterdir():
            assert path.read_bytes() == (prepared[name].folder / path.name).read_bytes()


def _raw_rows(path: Path, count: int) -> str:
    """A file of `count` raw rows, made from a real one."""
    row = json.loads(bundled_bytes(f"{RAW}/Chemistry/retrosynthesis.jsonl").split(b"\n")[0])
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({**row, "question": f"{row['question']} {number}"}) + "\n")
    return f"file:{path}"


def test_prepare_that_is_killed_leaves_the_old_files_or_none(tmp_path):
    """SIGKILL at any moment: what is there is whole, and the next run makes the rest."""
    name = _raw_rows(tmp_path / "rows.jsonl", 3_000)
    folder = tmp_path / "data" / dataset_entry(name).name
    script = "import sys; from pathlib import Path; from data_prep.prepare import prepare_dataset\n"
    script += "prepare_dataset(sys.argv[2], home=Path(sys.argv[1]))"
    seen: set[str] = set()
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name], cwd=ROOT)
        aside = folder.with_name(f".{folder.name}.new")
        while not list(aside.glob("*")) and process.poll() is None:
            time.sleep(0.001)
        time.sleep(0.1 * len(seen))
        process.kill()
        process.wait()
        seen |= {path.name for path in aside.glob("*")} if aside.is_dir() else {"done"}
        assert not folder.exists() or read_manifest(folder).kept == 3_000
        if folder.exists():
            break
    assert "spool" in seen
    manifest = prepare_dataset(name, home=tmp_path)
    assert manifest.kept == 3_000
    assert {path.name for path in (tmp_path / "data").iterdir()} == {folder.name, f".{folder.name}.lock"}
    digests = {split: file_digest(folder / f"{split}.jsonl") for split in manifest.files}
    assert digests == manifest.files


def test_prepare_that_fails_leaves_nothing_beside_the_old_files(tmp_path):
    prepare_dataset("toolalpaca", home=tmp_path)
    before = (tmp_path / "data" / "toolalpaca" / "test.jsonl").read_bytes()
    _supply(tmp_path, '[{"idx": 1}')
    with pytest.raises(DataError, match="damaged JSON array"):
        prepare_dataset("toolalpaca", home=tmp_path)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"toolalpaca", ".toolalpaca.lock"}
    assert (tmp_path / "data" / "toolalpaca" / "test.jsonl").read_bytes() == before


def test_prepare_keeps_at_most_200_bytes_of_a_row(tmp_path):
    """Memory of Python and numpy at its peak, by rows; the first run also pays for what is loaded once."""
    peaks = {}
    for count in (100, 500, 3_500):
        name = _raw_rows(tmp_path / f"rows-{count}.jsonl", count)
        dataset_entry(name)
        tracemalloc.start()
        prepare_dataset(name, home=tmp_path)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert 58 * 3_000 < peaks[3_500] - peaks[500] <= 200 * 3_000


def test_prepare_names_the_data_sets_it_knows(tmp_path):
    with pytest.raises(SpecError, match="spell_backward, sciknoweval-biology"):
        prepare_dataset("sciknoweval", home=tmp_path)


def test_require_train_says_where_rows_are_placed(prepared):
    require_train(prepared["sciknoweval-physics"].manifest)
    with pytest.raises(SpecError, match=r"\$SDPO_HOME/sources/toolalpaca and run"):
        require_train(prepared["toolalpaca"].manifest)


def _tool_rows(count: int) -> list[dict[str, object]]:
    """Rows like the reference's train rows: test rows moved to an API that test does not have."""
    rows = [json.loads(line) for line in bundled_bytes("lasgroup-sdpo/tooluse/test.json").split(b"\n")[:count]]
    return [
        {**row, "idx": number, "prompt": row["prompt"].replace("Name: Axolotl\n", "Name: Newt\n")}
        for number, row in enumerate(rows)
    ]


def _supply(home: Path, text: str) -> None:
    path = home / "sources" / "toolalpaca" / "train.json"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")


def test_prepare_reads_supplied_apis_and_flat_rows_by_their_keys(tmp_path):
    """A folder of files with any names: raw APIs with steps, and rows in the hub's columns."""
    folder = tmp_path / "sources" / "toolalpaca"
    folder.mkdir(parents=True)
    apis = [{**api, "Name": f"New {api['Name']}"} for api in sample("toolalpaca_instances.json")]
    (folder / "whatever").write_text(json.dumps(apis))
    (folder / "LICENSE").write_text("Apache")
    manifest = prepare_dataset("toolalpaca", home=tmp_path)
    assert manifest.shapes["toolalpaca-api"]["kept"] == manifest.splits["train"] + manifest.splits["dev"] > 0
    assert manifest.quarantined["instance_error"] > 0
    assert manifest.source["ignored"] == ["sources/toolalpaca/LICENSE"]


@pytest.mark.parametrize("is_array", [False, True])
def test_prepare_reads_supplied_training_rows(tmp_path, is_array):
    rows = _tool_rows(10)
    _supply(tmp_path, json.dumps(rows, indent=1) if is_array else "\n".join(map(json.dumps, rows)) + "\n")
    manifest = prepare_dataset("toolalpaca", home=tmp_path)
    assert manifest.splits["train"] + manifest.splits["dev"] == 10
    assert manifest.splits["test"] == 65
    require_train(manifest)


def test_prepare_keeps_test_requests_out_of_supplied_rows(tmp_path):
    rows = _tool_rows(10)
    rows[3]["prompt"] = str(rows[3]["prompt"]).replace("Name: Newt\n", "Name: Axolotl\n")
    _supply(tmp_path, "\n".join(map(json.dumps, rows)))
    manifest = prepare_dataset("toolalpaca", home=tmp_path)
    assert manifest.quarantined["group_in_test"] == 1
    assert manifest.splits["test"] == 65


def test_prepare_quarantines_damaged_supplied_rows(tmp_path):
    rows = _tool_rows(8)
    del rows[2]["answer"]
    lines = [*map(json.dumps, rows), '{"idx": 99, "prompt": ', json.dumps(rows[0])]
    _supply(tmp_path, "\n".join(lines))
    manifest = prepare_dataset("toolalpaca", home=tmp_path)
    expected = {"bad_json": 1, "exact_repeat": 1, "gold_tool_unknown": 3, "missing_field": 1}
    assert manifest.quarantined == expected
    entries = [
        json.loads(line) for line in (tmp_path / "data" / "toolalpaca" / "quarantine.jsonl").read_text().splitlines()
    ]
    assert [(entry["path"], entry["line"]) for entry in entries if entry["code"] == "bad_json"] == [
        ("sources/toolalpaca/train.json", 9)
    ]


def test_prepare_refuses_a_source_without_survivors(tmp_path):
    _supply(tmp_path, '{"idx": 1}\nnot json\n')
    with pytest.raises(DataError, match=r"sources/toolalpaca/train\.json: got no usable row .*'bad_json': 1"):
        prepare_dataset("toolalpaca", home=tmp_path)
    assert not (tmp_path / "data" / "toolalpaca").exists()


def test_prepare_splits_do_not_depend_on_row_order(tmp_path):
    rows = _tool_rows(10)
    found = []
    for home, ordered in ((tmp_path / "a", rows), (tmp_path / "b", rows[::-1])):
        _supply(home, "\n".join(map(json.dumps, ordered)))
        prepare_dataset("toolalpaca", home=home)
        text = (home / "data" / "toolalpaca" / "dev.jsonl").read_text()
        found.append({json.loads(line)["id"] for line in text.splitlines()})
    assert found[0] == found[1]


def test_open_sources_refuses_other_content(tmp_path):
    file = SourceFile(path="lasgroup-sdpo/tooluse/test.json", split="test")
    (tmp_path / "lasgroup-sdpo" / "tooluse").mkdir(parents=True)
    (tmp_path / "sources.json").write_text((BUNDLED / "sources.json").read_text())
    stored = tmp_path / f"{file.path}.xz"
    stored.write_bytes(lzma.compress(b'{"idx": 1}\n'))
    (source,) = open_sources(file, home=tmp_path, bundled=tmp_path)
    assert source.rows is not None
    with pytest.raises(DataError, match="SHA-256"):
        list(source.rows())
    stored.write_bytes(b"not xz")
    with pytest.raises(DataError, match=r"readable \.xz"):
        list(source.rows())


def test_sources_list_every_bundled_file():
    listed = {entry["path"]: entry for entry in json.loads((BUNDLED / "sources.json").read_text())["files"]}
    files = {file for entry in DATASETS.values() for file in entry.files if file.where == "bundled"}
    used = {source.label for file in files for source in open_sources(file, home=Path())}
    # The simulated requests are there to rebuild the 68 test prompts from.
    assert set(listed) - used == {"tangqiaoyu-toolalpaca/eval_simulated.json"}
    for path, entry in listed.items():
        content = lzma.decompress((BUNDLED / f"{path}.xz").read_bytes())
        assert len(content) == entry["bytes"]
        lines = content.count(b"\n") + (not content.endswith(b"\n"))
        assert (len(json.loads(content)) if content.startswith(b"[") else lines) == entry["rows"]
