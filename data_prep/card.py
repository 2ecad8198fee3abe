"""The data card: what a prepared data set holds, where it comes from, what is wrong with it, how to cite it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data_prep.codes import CODES, FLAGS
from data_prep.entry import DatasetEntry
from data_prep.manifest import Manifest

CARD_NAME = "card.md"

# A guess that beats uniform by so much on so many test rows is one that a policy will find.
_SHORTCUT_GAIN = 0.15
_SHORTCUT_ROWS = 20

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")
_NAME = re.compile(r"[\w./:@$-]*[a-z][\w./:@$-]*")
_SPLITS = ("train", "dev", "test")
# How to name a source, by repository.
_CITATIONS = {
    "github.com/lasgroup/SDPO": "lasgroup/SDPO, https://github.com/lasgroup/SDPO (rows in this form, and their split)",
    "github.com/HICAI-ZJU/SciKnowEval": "Feng et al., SciKnowEval, arXiv 2406.09098",
    "github.com/tangqiaoyu/ToolAlpaca": "Tang et al., ToolAlpaca, arXiv 2306.05301",
    "reasoning-gym": "reasoning-gym, https://github.com/open-thought/reasoning-gym",
}


def render_card(entry: DatasetEntry, manifest: Manifest) -> str:
    """The card as markdown; the same manifest gives the same text."""
    sections = {
        f"# {manifest.name}": [_summary(entry, manifest)],
        "## Sources": [*_sources(manifest)],
        "## Notes": [f"- {note}" for note in entry.notes],
        "## Rows by shape": [*_shapes(manifest)],
        "## Taken out": [*_meanings(manifest.quarantined, CODES)],
        "## Flags on kept rows": [*_meanings(manifest.flagged, FLAGS)],
        "## Splits and leaks": [_splits(entry, manifest)],
        "## Guess baselines": [*_baselines(manifest)],
        "## Known shortcuts": [*_shortcuts(manifest)],
        "## How to cite": [*_citations(entry, manifest)],
    }
    return "\n\n".join(f"{title}\n\n{chr(10).join(lines)}" for title, lines in sections.items() if lines) + "\n"


def escaped(text: object) -> str:
    """One line of text in which nothing is markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def percent(score: float | None) -> str:
    """A share of 1 in per cent; n/a where there is none."""
    return "n/a" if score is None else f"{100 * score:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A markdown table; no lines at all without rows."""
    if rows:
        yield f"| {' | '.join(header)} |"
        yield f"| {' | '.join('---' for _ in header)} |"
        yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value)
    return f"`{text}`" if _NAME.fullmatch(text) and not text.isalpha() else escaped(text)


def _summary(entry: DatasetEntry, manifest: Manifest) -> str:
    splits = ", ".join(f"{count:,} {split}" for split, count in manifest.splits.items())
    graders = ", ".join(f"{_cell(task)} ({count:,})" for task, count in manifest.tasks.items()) or "none"
    order = "" if entry.permute is None else f" Options are permuted with seed {entry.permute}."
    return (
        f"{manifest.rows_read:,} rows read, {manifest.kept:,} kept: {splits}. Graders: {graders}.{order} "
        f"Digest `{manifest.digest}`."
    )


def _sources(manifest: Manifest) -> Iterator[str]:
    files = manifest.source["files"]
    rows = [
        (
            file["path"],
            file["rows"],
            f"{file['repository']} {file['revision'][:12]}",
            file["licence"],
            file["sha256"][:12],
        )
        for file in files
    ]
    yield from _table(("file", "rows", "from", "licence", "SHA-256"), rows)
    parts = [(part["name"], f"{part['weight']:g}", part["digest"]) for part in manifest.source.get("parts", ())]
    yield from _table(("part", "weight", "digest"), parts)
    for path in manifest.source["supplied"]:
        if not any(file["path"].startswith(path) for file in files):
            yield f"\nNothing was supplied: training rows belong in `$SDPO_HOME/{path}`."
    for path in manifest.source.get("ignored", ()):
        yield f"\nHolds no rows, and was left aside: {escaped(path)}."


def _shapes(manifest: Manifest) -> Iterator[str]:
    rows = [(shape, code, count) for shape, codes in manifest.shapes.items() for code, count in codes.items()]
    yield from _table(("shape", "what became of it", "rows"), rows)


def _meanings(counts: Mapping[str, int], meanings: Mapping[str, str]) -> Iterator[str]:
    rows = [(code, count, meanings.get(code, "as the rows' own maker says")) for code, count in counts.items()]
    yield from _table(("code", "rows", "meaning"), rows)


def _splits(entry: DatasetEntry, manifest: Manifest) -> str:
    crossing = manifest.leaks.get("group_in_test", 0) + manifest.leaks.get("group_in_dev", 0)
    told = "Splits are those of the parts" if entry.parts else entry.policy.meaning
    lines = [
        f"{told}. A group (the same question, or the same API and request) stands in one split. Leaks found: "
        f"{crossing} rows were taken out of train or dev because their question stands in test or dev."
    ]
    if "test_stem_in_train" in manifest.leaks:
        shared = manifest.leaks["test_stem_in_train"]
        lines.append(
            f"Of {manifest.splits['test']} test rows, {shared} share their stem with a row of the source's train, and "
            f"{manifest.splits['test'] - shared} do not (`details.stem_disjoint`)."
        )
    return " ".join(lines)


def _baselines(manifest: Manifest) -> Iterator[str]:
    """A row a group of rows, a column a rule: what it chose on train, dev / test."""
    groups = _groups(manifest)
    rules = list(dict.fromkeys(rule for facts in groups.values() for rule in facts["baselines"]))
    if rules:
        yield "Accuracy without a model, in per cent: dev / test, behind what the rule chose on train.\n"
        rows = [
            (name, *(facts["rows"].get(split, 0) for split in _SPLITS), *(_score(facts, rule) for rule in rules))
            for name, facts in groups.items()
        ]
        yield from _table(("rows", *_SPLITS, *rules), rows)


def _groups(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    everything = {
        "rows": manifest.splits,
        "baselines": manifest.baselines,
        "baseline_choices": manifest.baseline_choices,
    }
    return {"all": everything, **manifest.by_part, **manifest.by_task}


def _score(facts: Mapping[str, Any], rule: str) -> str:
    if rule not in facts["baselines"]:
        return "n/a"
    scores, chosen = facts["baselines"][rule], facts["baseline_choices"].get(rule)
    return f"{'' if chosen is None else f'{chosen}: '}{percent(scores['dev'])} / {percent(scores['test'])}"


def _shortcuts(manifest: Manifest) -> Iterator[str]:
    for name, facts in _groups(manifest).items():
        floor, rows = facts["baselines"].get("uniform", {}).get("test"), facts["rows"].get("test", 0)
        if floor is None or rows < _SHORTCUT_ROWS:
            continue
        for rule, scores in facts["baselines"].items():
            if scores["test"] is not None and scores["test"] >= floor + _SHORTCUT_GAIN:
                yield (
                    f"- {_cell(name)}: `{rule}` is right on {percent(scores['test'])} % of {rows} test rows, "
                    f"where chance is {percent(floor)} %."
                )


def _citations(entry: DatasetEntry, manifest: Manifest) -> Iterator[str]:
    repositories = dict.fromkeys(str(file["repository"]) for file in manifest.source["files"])
    cited = [text for repository in repositories for key, text in _CITATIONS.items() if key in repository]
    # The authors' rows are made of these.
    if any("lasgroup" in repository for repository in repositories):
        is_tool_use = "tool_call" in manifest.tasks
        cited.append(_CITATIONS[f"github.com/{'tangqiaoyu/ToolAlpaca' if is_tool_use else 'HICAI-ZJU/SciKnowEval'}"])
    yield from (f"- {text}" for text in dict.fromkeys(cited))
    if entry.parts:
        yield f"- as its parts: {', '.join(f'`{part.entry.name}`' for part in entry.parts)}"
