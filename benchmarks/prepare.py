"""Speed and memory of preparing: a made file of raw SciKnowEval rows, and all the data that ships.

    .venv/bin/python -m benchmarks.prepare                 a million rows, then the shipped data
    .venv/bin/python -m benchmarks.prepare --rows 100000

Rows are as long as real ones. Every tenth is a repeat, every twentieth has no usable gold, one in a hundred is of
another type. Time is CPU time of one process with one thread. Memory is the peak of a process of its own over what it
held with the code loaded.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from data_prep.prepare import prepare_dataset
from data_prep.table import DATASETS

MIB = 2**20

_TASKS = ("molar_weight_calculation", "molecular_property_calculation", "reaction_prediction", "retrosynthesis")
_INSTRUCTION = (
    'Given a question and four options, please select the right answer. Your answer should be "A", "B", "C" or '
    '"D". Please directly give the answer without any explanation.'
)


def rows(count: int) -> Iterator[str]:
    """Lines of a raw file of `count` rows, the same each time."""
    draw = random.Random(7)
    before = ""
    for number in range(count):
        if number % 10 == 9:
            yield before
            continue
        smiles = "".join(draw.choice("CNOcn1(=)F") for _ in range(120))
        weights = [f"{draw.uniform(100, 900):.3f}" for _ in range(4)]
        row = {
            "prompt": {"default": _INSTRUCTION},
            "question": f"What is the molar weight (g/mol) of the molecule {number} with the SMILES '{smiles}'?",
            "choices": {"text": weights, "label": ["A", "B", "C", "D"]},
            "answerKey": "E" if number % 20 == 3 else draw.choice("ABCD"),
            "answer": "",
            "type": "filling" if number % 100 == 7 else "mcq-4-choices",
            "domain": "Chemistry",
            "details": {"level": "L3", "task": draw.choice(_TASKS), "subtask": "s2w", "source": "PubChem"},
        }
        before = json.dumps(row)
        yield before


def measure(name: str, *, home: Path) -> dict[str, float]:
    """Prepare one data set, or all that ship, in this process."""
    held = _peak()
    start, wall = time.process_time(), time.perf_counter()
    manifests = [prepare_dataset(each, home=home) for each in ([name] if name != "shipped" else DATASETS)]
    return {
        "rows": sum(manifest.rows_read for manifest in manifests),
        "kept": sum(manifest.kept for manifest in manifests),
        "cpu_seconds": time.process_time() - start,
        "wall_seconds": time.perf_counter() - wall,
        "grown_bytes": _peak() - held,
        "peak_bytes": _peak(),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _apart(name: str, *, home: Path) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.prepare", "--measure", name, "--home", str(home)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--measure", help="one data set, in this process")
    parser.add_argument("--home", type=Path)
    arguments = parser.parse_args()
    if arguments.measure:
        sys.stdout.write(json.dumps(measure(arguments.measure, home=arguments.home)))
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        path = home / "made.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{row}\n" for row in rows(arguments.rows))
        sys.stdout.write(f"made: {path.stat().st_size / MIB:.0f} MiB\n")
        for name in (f"file:{path}", "shipped"):
            found = _apart(name, home=home)
            count = found["rows"]
            sys.stdout.write(
                f"{'shipped' if name == 'shipped' else 'made'}: {count:.0f} rows, {found['kept']:.0f} kept, "
                f"{found['cpu_seconds']:.1f} CPU s ({count / found['cpu_seconds']:.0f} rows/s), "
                f"{found['wall_seconds']:.1f} s, peak {found['peak_bytes'] / MIB:.0f} MiB, "
                f"grown by {found['grown_bytes'] / count:.0f} bytes a row\n"
            )


if __name__ == "__main__":
    main()
