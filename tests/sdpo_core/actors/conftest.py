"""A Ray for the tests of this folder, which says that it has two GPUs: nothing here uses one."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package", autouse=True)
def _ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
