"""Data sets of the hub: pinned names, a copy on disk in the place of the hub, and what is said without either."""

import json

import datasets  # type: ignore[import-untyped]
import pytest

from data_prep.hub import HubName, hub_name, hub_rows
from data_prep.prepare import prepare_dataset
from data_prep.table import dataset_entry
from sdpo_core.errors import DataError, SpecError
from tests.data_prep.source_rows import RAW, bundled

REVISION = "53addee640092d667439e9a8901bf55f2d92c9ed"
LINES = f"hub:hicai-zju/SciKnowEval@{REVISION}:v2"
PARQUET = f"hub:someone/copy@{REVISION}:parts"
# As the hub's pages declare configurations: one split that is called test, and three splits.
README = {
    "hicai-zju/SciKnowEval": """---
configs:
- config_name: v2
  data_files:
  - split: test
    path: data/v2/*.jsonl
- config_name: v1
  data_files: data/v1/*.jsonl
---
""",
    "someone/copy": """---
configs:
- config_name: parts
  data_files:
  - split: train
    path: data/train*
  - split: validation
    path: data/held*
  - split: test
    path: data/test*
---
""",
}


@pytest.fixture
def home(tmp_path):
    """A home folder with copies of two data sets of the hub, of the same rows: JSON Lines and parquet."""
    rows = list(bundled(f"{RAW}/Biology/stability_prediction.jsonl"))
    lines, parquet = (tmp_path / "sources" / "hub" / name / REVISION / "data" for name in README)
    for folder, readme in zip((lines, parquet), README.values(), strict=True):
        (folder / "v2").mkdir(parents=True)
        (folder.parent / "README.md").write_text(readme)
    (lines / "v2" / "sciknoweval_test_v2.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, part in (("train", rows[:60]), ("held-out", rows[60:80]), ("test", rows[80:])):
        datasets.Dataset.from_list(part).to_parquet(parquet / f"{name}.parquet")
    return tmp_path


def test_hub_name_reads_name_commit_and_configuration():
    assert hub_name("hub:a/b@0123abc:v2") == HubName(name="a/b", revision="0123abc", config="v2")
    assert hub_name("hub:a/b@0123abc").label == "hub:a/b@0123abc"


@pytest.mark.parametrize("name", ["hub:a/b", "hub:a/b@main", "hub:a/b@v1.0", "hub:@0123abc", "hub:a/b/c@0123abc"])
def test_hub_name_refuses_what_is_not_pinned(name):
    with pytest.raises(SpecError, match=r"expected hub:NAME@REVISION .* with a commit"):
        dataset_entry(name)


def test_hub_rows_takes_the_splits_of_a_set_with_train(home):
    rows = list(hub_rows(hub_name(PARQUET), home=home))
    assert [[found for _, found in rows].count(split) for split in ("train", "dev", "test")] == [60, 20, 20]


def test_prepare_makes_the_splits_of_a_set_that_has_only_test(home):
    manifest = prepare_dataset(LINES, home=home)
    assert manifest.name == "hicai-zju-sciknoweval-53addee64009-v2"
    assert manifest.kept == 100
    assert manifest.splits["train"] > manifest.splits["test"] > 0
    assert manifest.source["files"][0]["revision"] == REVISION


def test_prepare_reads_parquet_as_it_reads_json_lines(home):
    """The same rows, but for their splits and the place in their ids."""
    found = {}
    for name in (LINES, PARQUET):
        manifest = prepare_dataset(name, home=home)
        folder = home / "data" / manifest.name
        rows = [
            json.loads(line)
            for split in manifest.files
            for line in (folder / f"{split}.jsonl").read_text().splitlines()
        ]
        found[name] = {row["metadata"]["group_key"]: (row["prompt"], row["label"]) for row in rows}
    assert found[LINES] == found[PARQUET]
    assert len(found[LINES]) > 90


def test_prepare_without_copy_or_hub_says_what_to_place_where(tmp_path):
    with pytest.raises(DataError) as refusal:
        prepare_dataset(LINES, home=tmp_path)
    message = str(refusal.value)
    assert message.startswith(f"{LINES}: got ")
    assert f"hicai-zju/SciKnowEval at that commit in $SDPO_HOME/sources/hub/hicai-zju/SciKnowEval/{REVISION}" in message
    assert "HF_HUB_OFFLINE=0" in message
    assert not list((tmp_path / "data").glob("hicai*"))


def test_prepare_says_which_configurations_there_are(home):
    with pytest.raises(DataError, match=r"expected rows") as refusal:
        prepare_dataset(LINES.replace(":v2", ":v9"), home=home)
    assert "v1" in str(refusal.value)
