"""Task: one data set from its source to canonical files."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from data_prep.manifest import Manifest
from data_prep.prepare import prepare_dataset


@task(name="prepare", task_run_name="prepare {dataset}", cache_policy=NO_CACHE)
def prepare(dataset: str, *, home: Path) -> Manifest:
    """Prepare `dataset` under `home`; unchanged input leaves the files alone."""
    return prepare_dataset(dataset, home=home)
