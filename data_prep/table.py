"""The data sets, one line each, and `dataset_entry`: the one way from a name to what is behind it."""

from data_prep.card_notes import NOTES
from data_prep.entry import DatasetEntry, Part
from data_prep.sources import SourceFile
from data_prep.splits import DrawnSplits, GivenSplits, HashedSplits
from data_prep.user_data import is_named_by_user, mixture_entry, user_entry
from sdpo_core.errors import SpecError
from sdpo_core.records import Split

_LASGROUP = "lasgroup-sdpo"
_RAW = "hicai-zju-sciknoweval/v2-L3"


def _reference(folder: str, *, domain: str, permute: int | None = None) -> DatasetEntry:
    """SciKnowEval as the SDPO authors have it, in their split."""
    splits: tuple[Split, ...] = ("train", "test")
    path = f"{_LASGROUP}/sciknoweval/{folder}"
    name = f"sciknoweval-{domain}{'' if permute is None else '-permuted'}"
    return DatasetEntry(
        name=name,
        task="mcq",
        tasks=frozenset({"mcq"}),
        domain=domain,
        files=tuple(SourceFile(path=f"{path}/{split}.json", split=split, source=_LASGROUP) for split in splits),
        permute=permute,
        marks_stems=True,
        notes=NOTES.get(name, ()),
    )


def _raw(name: str, path: str, *, task: str = "mcq") -> DatasetEntry:
    """SciKnowEval as its authors have it: one split by name, so the splits are made here."""
    return DatasetEntry(
        name=name,
        task=task,
        tasks=frozenset({task}),
        files=(SourceFile(path=f"{_RAW}/{path}", split=None, source="v2"),),
        policy=HashedSplits(),
        notes=NOTES.get(name, ()),
    )


def _toolalpaca(name: str, train: SourceFile, *, policy: GivenSplits) -> DatasetEntry:
    """ToolAlpaca: the 68 test rows that everybody uses, and training rows from elsewhere."""
    return DatasetEntry(
        name=name,
        task="tool_call",
        tasks=frozenset({"tool_call"}),
        domain="tooluse",
        files=(train, SourceFile(path=f"{_LASGROUP}/tooluse/test.json", split="test", source=_LASGROUP)),
        policy=policy,
        notes=NOTES.get(name, ()),
    )


_SPELL_BACKWARD = DatasetEntry(
    name="spell_backward",
    task="spell_backward",
    tasks=frozenset({"spell_backward"}),
    domain="words",
    files=(SourceFile(path="reasoning-gym/words3to10.txt", split="train", source="reasoning-gym", is_word_list=True),),
    policy=DrawnSplits(sizes={"test": 300, "dev": 200, "train": 2_000, "warmup": 12_000}, eligible=r"[a-z]{3,7}"),
)
_DOMAINS = (
    _reference("biology", domain="biology"),
    _reference("chemistry", domain="chemistry"),
    _reference("material", domain="materials"),
    _reference("physics", domain="physics"),
)

DATASETS: dict[str, DatasetEntry] = {
    entry.name: entry
    for entry in (
        _SPELL_BACKWARD,
        *_DOMAINS,
        _reference("physics", domain="physics", permute=1),
        mixture_entry(
            "sciknoweval-mixed",
            parts=tuple(Part(entry=entry, weight=1) for entry in _DOMAINS),
            notes=NOTES["sciknoweval-mixed"],
        ),
        _raw("sciknoweval-biology-raw", "Biology"),
        _raw("sciknoweval-chemistry-raw", "Chemistry"),
        _raw("sciknoweval-materials-raw", "Material"),
        _raw("sciknoweval-physics-raw", "Physics"),
        _raw("sciknoweval-solubility-raw", "Biology/solubility_prediction.jsonl", task="true_false"),
        _toolalpaca(
            "toolalpaca",
            SourceFile(path="toolalpaca", split="train", where="supplied", source=_LASGROUP),
            policy=GivenSplits(),
        ),
        _toolalpaca(
            "toolalpaca-real",
            SourceFile(path="tangqiaoyu-toolalpaca/eval_real.redacted.json", split="train", source="tangqiaoyu"),
            policy=GivenSplits(dev_percent=20, unit="api"),
        ),
    )
}


def dataset_entry(name: str) -> DatasetEntry:
    """The data set of that name: one of the table, `file:PATH` or `hub:NAME@REVISION[:CONFIG]`.

    Raises:
        SpecError: no such data set.
    """
    if name in DATASETS:
        return DATASETS[name]
    if is_named_by_user(name):
        return user_entry(name, lookup=dataset_entry)
    raise SpecError(
        f"table: got data set {name!r}, expected one of {', '.join(DATASETS)}, file:PATH or hub:NAME@REVISION. "
        "Correct the name."
    )
