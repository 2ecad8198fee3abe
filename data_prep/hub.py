"""Rows through `datasets`: a hub data set at a pinned revision, a copy of one on disk, a parquet file. One way for all.

`datasets` is imported late: it takes seconds, and most commands need none of it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Split

PREFIX = "hub:"

_NAME = re.compile(r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)@(?P<revision>[0-9a-f]{7,64})(?::(?P<config>[\w.-]+))?")
_SPLITS: Mapping[str, Split] = {"train": "train", "validation": "dev", "valid": "dev", "dev": "dev", "test": "test"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """A data set of the hub: its name, a commit, and a configuration where it has several."""

    name: str
    revision: str
    config: str | None

    @property
    def label(self) -> str:
        """As it is written where a data set is named."""
        config = "" if self.config is None else f":{self.config}"
        return f"{PREFIX}{self.name}@{self.revision}{config}"

    @property
    def place(self) -> str:
        """Where a copy of it is looked for first, below the home folder."""
        return f"sources/hub/{self.name}/{self.revision}"


def hub_name(text: str) -> HubName:
    """Read `hub:NAME@REVISION[:CONFIG]`; a name without a commit means other data on another day, and is refused."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise SpecError(
            f"data set: got {text!r}, expected hub:NAME@REVISION or hub:NAME@REVISION:CONFIG with a commit as the "
            "revision. Look it up on the data set's page."
        )
    return HubName(name=match["name"], revision=match["revision"], config=match["config"])


def hub_rows(hub: HubName, *, home: Path) -> Iterator[tuple[Mapping[str, Any], Split | None]]:
    """The rows with the splits that the hub names: from the copy below `home`, else from the hub."""
    copy = home / hub.place
    if copy.is_dir():
        return dataset_rows(str(copy), where=str(copy), config=hub.config)
    advice = (
        f"Place a copy of the repository {hub.name} at that commit in $SDPO_HOME/{hub.place} (the files as they are, "
        "README.md with them), or allow the download with HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0"
    )
    return dataset_rows(hub.name, where=hub.label, config=hub.config, revision=hub.revision, advice=advice)


def dataset_rows(
    builder: str,
    *,
    where: str,
    config: str | None = None,
    revision: str | None = None,
    data_files: str | None = None,
    advice: str = "Repair the file",
) -> Iterator[tuple[Mapping[str, Any], Split | None]]:
    """The rows that `datasets` loads, split by split. `builder`: a name of the hub, a folder, or "parquet".

    A column without a value is no key of its row. Where there is no split `train`, or one of another kind, the splits
    are not those of a training set and none is given.

    Raises:
        DataError: nothing could be loaded; the message ends with `advice`.
    """
    import datasets  # type: ignore[import-untyped]

    datasets.disable_progress_bars()
    is_local = revision is None
    try:
        # What lies on disk is streamed; what is fetched is kept by `datasets`, so that it is fetched once.
        loaded = datasets.load_dataset(
            builder, name=config, revision=revision, data_files=data_files, streaming=is_local
        )
        is_known = "train" in loaded and loaded.keys() <= _SPLITS.keys()
        for name, rows in loaded.items():
            split = _SPLITS[name] if is_known and data_files is None else None
            for row in rows:
                yield {key: value for key, value in row.items() if value is not None}, split
    # `datasets` and what is below it raise errors of a dozen packages for files and connections alike.
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"{where}: got {why}, expected rows. {advice}.") from error
