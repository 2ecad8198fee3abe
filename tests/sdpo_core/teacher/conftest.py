"""One served teacher for all tests that only ask it something."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sdpo_core.specs import CellSpec
    from sdpo_core.workers import TeacherWorker
    from tests.sdpo_core.micro import Base


@pytest.fixture(scope="package")
def static(cell_spec: "CellSpec", base: "Base", tmp_path_factory: pytest.TempPathFactory) -> Iterator["TeacherWorker"]:
    """Its weights never change; whoever ends its server starts one of their own."""
    # Imported here: the shape checker must be in place before sdpo_core is.
    from tests.sdpo_core.teacher.serving import served_teacher, static_spec

    scratch = tmp_path_factory.mktemp("static")
    with served_teacher(static_spec(cell_spec), folder=base.folder, scratch=scratch) as worker:
        yield worker
