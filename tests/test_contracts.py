"""`docs/contracts.md` lists all contracts, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> dict[int, str]:
    """Number of a contract to what holds it."""
    text = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    return {int(number): held for number, _, held in ROW.findall(text)}


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(held: str) -> list[str]:
    """Tests that are named and not there."""
    return [
        f"{path}::{name}"
        for path, name in TEST.findall(held)
        if not (ROOT / path).is_file() or name not in functions(path)
    ]


def test_contracts_are_36() -> None:
    assert list(rows()) == list(range(1, 37))


def test_named_tests_exist() -> None:
    assert [name for held in rows().values() for name in missing(held)] == []


def test_every_contract_is_held_and_none_waits() -> None:
    untested = {number for number, held in rows().items() if not TEST.search(held)}
    waiting = {number for number, held in rows().items() if "waits for" in held or "wait for" in held}
    assert untested == waiting == set()


def test_a_test_that_is_not_there_is_found() -> None:
    assert missing("`tests/test_contracts.py::test_nothing` and `tests/gone.py::test_x`") == [
        "tests/test_contracts.py::test_nothing",
        "tests/gone.py::test_x",
    ]
