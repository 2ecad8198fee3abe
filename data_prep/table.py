"""The data sets, one line each: what is read, in which shape, how it is split, who grades it."""

from dataclasses import dataclass

from data_prep.shapes import sciknoweval, spell_backward, tooluse
from data_prep.shapes.base import Shape
from data_prep.sources import SourceFile
from data_prep.splits import DrawnSplits, GivenSplits, SplitPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """One data set. `task` names the grader and the warm-up; `source` is the middle part of its problems' ids."""

    task: str
    domain: str
    source: str
    shape: Shape
    files: tuple[SourceFile, ...]
    policy: SplitPolicy


def _sciknoweval(folder: str, *, domain: str) -> DatasetEntry:
    files = (
        SourceFile(path=f"lasgroup-sdpo/sciknoweval/{folder}/train.json", split="train"),
        SourceFile(path=f"lasgroup-sdpo/sciknoweval/{folder}/test.json", split="test"),
    )
    return DatasetEntry(
        task="mcq",
        domain=domain,
        source="lasgroup-sdpo",
        shape=sciknoweval.SHAPE,
        files=files,
        policy=GivenSplits(),
    )


DATASETS: dict[str, DatasetEntry] = {
    "spell_backward": DatasetEntry(
        task="spell_backward",
        domain="words",
        source="reasoning-gym",
        shape=spell_backward.SHAPE,
        files=(SourceFile(path="reasoning-gym/words3to10.txt", split="train"),),
        policy=DrawnSplits(sizes={"test": 300, "dev": 200, "train": 2_000, "warmup": 12_000}, eligible=r"[a-z]{3,7}"),
    ),
    "sciknoweval-biology": _sciknoweval("biology", domain="biology"),
    "sciknoweval-chemistry": _sciknoweval("chemistry", domain="chemistry"),
    "sciknoweval-materials": _sciknoweval("material", domain="materials"),
    "sciknoweval-physics": _sciknoweval("physics", domain="physics"),
    "toolalpaca": DatasetEntry(
        task="tool_call",
        domain="tooluse",
        source="lasgroup-sdpo",
        shape=tooluse.SHAPE,
        files=(
            SourceFile(path="toolalpaca/train.json", split="train", is_supplied=True),
            SourceFile(path="lasgroup-sdpo/tooluse/test.json", split="test"),
        ),
        policy=GivenSplits(),
    ),
}
