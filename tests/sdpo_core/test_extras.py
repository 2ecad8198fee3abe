"""What is installed is found without importing it."""

import subprocess
import sys

import pytest

from sdpo_core.extras import Extra, is_installed, lacks, missing


@pytest.mark.parametrize(
    ("module", "is_there"),
    [
        ("json", True),
        ("json.decoder", True),
        ("json.nothing", False),
        ("nothing_here", False),
        ("nothing.at.all", False),
    ],
)
def test_is_installed(module: str, is_there: bool) -> None:
    assert is_installed(module) == is_there


def test_looking_does_not_import() -> None:
    script = (
        "import sys; from sdpo_core.extras import is_installed; print(is_installed('torch'), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]


def test_missing_names_each_once() -> None:
    here, gone = (Extra(name=name, module=name, install="") for name in ("json", "nothing_here"))
    assert missing((here, gone, None, gone)) == (gone,)


def test_extra_in_an_environment_of_its_own_says_itself_whether_it_is_there() -> None:
    """No module of this environment shows it."""
    here, gone = (
        Extra(name=name, module="json", install="make x", is_there=is_there)
        for name, is_there in (("here", lambda: True), ("gone", lambda: False))
    )
    assert missing((here, gone)) == (gone,)
    assert lacks(gone) == "got no environment with json, expected extra 'gone' (install it: make x)"
