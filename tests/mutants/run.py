"""`make mutants`: put each bug of the catalogue into a copy of the tree and see that a test fails.

    python -m tests.mutants.run [WORD ...]

Words select mutants by a part of their name. Prints a table; exits 1 when a mutant survives or its piece of code is not
found once, 2 when the unchanged copy already fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one mutant; `how` is the test that failed first, or why nothing can be said."""

    is_killed: bool
    how: str
    seconds: float


def main(words: Sequence[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_tree(Path(folder))
        suites = tuple(dict.fromkeys(path for mutant in chosen for path in mutant.tests))
        failed = first_failure(tree, tests=suites)
        if failed is not None:
            _say(f"mutants: got a failure without any bug ({failed}), expected none. Mend the tests first.")
            return 2
        survivors = 0
        for number, mutant in enumerate(chosen, start=1):
            outcome = try_mutant(mutant, tree=tree)
            survivors += not outcome.is_killed
            mark = "killed" if outcome.is_killed else "SURVIVED"
            _say(f"{number:2} {mark:8} {outcome.seconds:5.1f} s  {mutant.name} [{mutant.source}]: {outcome.how}")
    _say(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


def copy_tree(folder: Path) -> Path:
    """The files under version control, and those about to be."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def try_mutant(mutant: Mutant, *, tree: Path) -> Outcome:
    """Put the bug in, run its tests until one fails, take it out."""
    path = tree / mutant.file
    whole = path.read_text(encoding="utf-8")
    count = whole.count(mutant.find)
    if count != 1:
        return Outcome(is_killed=False, how=f"its piece of {mutant.file} was found {count} times", seconds=0.0)
    start = time.monotonic()
    path.write_text(whole.replace(mutant.find, mutant.replace), encoding="utf-8")
    try:
        failed = first_failure(tree, tests=mutant.tests)
    finally:
        path.write_text(whole, encoding="utf-8")
    seconds = time.monotonic() - start
    return Outcome(is_killed=failed is not None, how=failed or "no test failed", seconds=seconds)


def first_failure(tree: Path, *, tests: Sequence[str]) -> str | None:
    """The first test that fails; None when all pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        # A mutant may have the size and the second of the file it replaces, and so look compiled already.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return None
    marked = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return marked[0].split(" - ")[0].split(" ", 1)[1] if marked else f"pytest ended with {run.returncode}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
