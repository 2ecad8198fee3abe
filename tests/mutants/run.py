"""`make mutants`: put each bug of the catalogue into a copy of the tree and see that a test fails.

    python -m tests.mutants.run [--jobs N] [WORD ...]

Words select mutants by a part of their name. Prints a table; exits 1 when a mutant survives or its piece of code is not
found once, 2 when the unchanged copy already fails. Each of N processes at a time has a copy of its own.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
# Copies of the code that nobody works in.
Trees = queue.SimpleQueue[Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one mutant; `how` is the test that failed first, or why nothing can be said."""

    is_killed: bool
    how: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.words or any(word in mutant.name for word in options.words)]
    suites = tuple(dict.fromkeys(path for mutant in chosen for path in mutant.tests))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees = Trees()
        for number in range(options.jobs):
            trees.put(copy_tree(Path(folder) / str(number)))
        # Longest of all, so it comes first; what is said of mutants counts when it has passed.
        unchanged = pool.submit(try_unchanged, suites, trees=trees)
        outcomes = [pool.submit(try_mutant, mutant, trees=trees) for mutant in chosen]
        try:
            failed = unchanged.result()
            if failed is not None:
                _say(f"mutants: got a failure without any bug ({failed}), expected none. Mend the tests first.")
                return 2
            survivors = 0
            for number, (mutant, future) in enumerate(zip(chosen, outcomes, strict=True), start=1):
                outcome = future.result()
                survivors += not outcome.is_killed
                mark = "killed" if outcome.is_killed else "SURVIVED"
                _say(f"{number:2} {mark:8} {outcome.seconds:5.1f} s  {mutant.name} [{mutant.source}]: {outcome.how}")
        finally:
            pool.shutdown(cancel_futures=True)
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


def try_unchanged(tests: Sequence[str], *, trees: Trees) -> str | None:
    """The first test that fails without any bug."""
    with _one_of(trees) as tree:
        return first_failure(tree, tests=tests)


def try_mutant(mutant: Mutant, *, trees: Trees) -> Outcome:
    """Put the bug in, run its tests until one fails, take it out."""
    with _one_of(trees) as tree:
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


@contextmanager
def _one_of(trees: Trees) -> Iterator[Path]:
    tree = trees.get()
    try:
        yield tree
    finally:
        trees.put(tree)


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
