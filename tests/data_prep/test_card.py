"""The data card: what it says of the shipped data, and that no text of others becomes markup."""

import json
import re
from pathlib import Path

import data_prep.card
from data_prep.card import escaped
from data_prep.card_notes import NOTES
from data_prep.codes import CODES, FLAGS
from data_prep.prepare import prepare_dataset
from data_prep.rules import FATES, NOT_DRAWN
from data_prep.table import DATASETS

SOURCES = Path(data_prep.card.__file__).parent


def _card(item):
    return (item.folder / "card.md").read_text()


def test_card_gives_counts_meanings_sources_and_citations(prepared):
    card = _card(prepared["sciknoweval-materials"])
    for part in (
        "935 rows read, 914 kept: 743 train, 77 dev, 94 test. Graders: mcq (914).",
        "| `lasgroup-sdpo/sciknoweval/material/train.json` | 841 | github.com/lasgroup/SDPO 0e6d5106abe6 | Apache-2.0",
        "| `group_in_test` | 16 | a row outside test whose question is in test |",
        "| `data_block_missing` | 11 | the question promises data and holds none |",
        "16 rows were taken out of train or dev because",
        "Of 94 test rows, 5 share their stem with a row of the source's train, and 89 do not",
        "| all | 743 | 77 | 94 | 25.0 / 25.0 |",
        "A: 16.9 / 31.9",
        "SciKnowEval, arXiv 2406.09098",
    ):
        assert part in card


def test_card_names_the_shortcuts_of_each_task(prepared):
    card = _card(prepared["sciknoweval-chemistry-raw"])
    line = "- `molecular_property_prediction`: `second_largest_number` is right on 100.0 % of 50 test rows"
    assert line in card
    assert "best_constant_letter` is right" in _card(prepared["sciknoweval-physics"])
    assert "Known shortcuts" not in _card(prepared["sciknoweval-solubility-raw"])


def test_card_says_where_rows_belong_until_they_are_there(prepared):
    assert "training rows belong in `$SDPO_HOME/sources/toolalpaca`" in _card(prepared["toolalpaca"])


def test_card_of_a_mixture_speaks_of_its_parts(prepared):
    card = _card(prepared["sciknoweval-mixed"])
    assert "| `sciknoweval-biology` | 1 |" in card
    assert "| `sciknoweval-biology` | 407 | 43 | 50 |" in card
    assert "as its parts: `sciknoweval-biology`," in card


def test_every_code_and_flag_has_a_meaning(prepared):
    """Those in the code, and those of the shipped data."""
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    codes = set(re.findall(r'RowRejectedError\(\s*"(\w+)"', text)) | {fate for fate in FATES if fate}
    assert len(codes) > 25
    assert codes - {FATES[NOT_DRAWN]} <= set(CODES)
    assert {flag for item in prepared.values() for flag in item.manifest.flagged} <= set(FLAGS)


def test_every_note_belongs_to_a_data_set():
    assert set(NOTES) <= set(DATASETS)


def test_card_takes_no_markup_from_a_users_rows(tmp_path):
    bad = "<script>|*[x](y)*\n# z"
    rows = [{"prompt": f"{n}?", "label": "Yes", "task": "true_false", "details": {"task": bad}} for n in range(20)]
    rows += [{**row, "prompt": f"{n} more?", "flags": [bad]} for n, row in enumerate(rows)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = prepare_dataset(f"file:{tmp_path / 'mine.jsonl'}", home=tmp_path)
    card = (tmp_path / "data" / manifest.name / "card.md").read_text()
    assert "<script>" not in card.replace(escaped(bad), "")
    assert escaped(bad) == r"\<script\>\|\*\[x\](y)\* \# z"
    assert f"| {escaped(bad)} | 20 |" in card
