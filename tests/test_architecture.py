"""Rules no linter checks: who may import what, what a package file holds, which names and paths may stand in files.

Each rule is a pure function from text to a list of faults; each is shown to fail on a bad example.
"""

import ast
import posixpath
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("data_prep", "experiments", "flows", "reports", "sdpo_core", "tasks")
OWN = frozenset({*FOLDERS, "tests", "benchmarks", "sdpo_sglang"})
TORCH_FREE = (
    "algorithm_specs",
    "backends/table",
    "base_specs",
    "errors",
    "extras",
    "fingerprint",
    "journal",
    "layout",
    "metrics",
    "process_tree",
    "random_streams",
    "records",
    "rollout/table",
    "sglang/guard",
    "sglang/probe",
    "sglang/server",
    "spec_base",
    "specs",
    "teacher/table",
)

# Package -> the only files of the project's folders that may import it.
IMPORTERS = {
    "prefect": ("flows/*", "tasks/*"),
    "mlflow": ("tasks/tracking.py",),
    "megatron": ("sdpo_core/backends/megatron/*",),
    "ray": ("tasks/ray_jobs.py", "sdpo_core/actors/*"),
    "torch": ("sdpo_core/*",),
    "transformers": ("sdpo_core/*",),
}

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
MAX_FUNCTION_LINES = 60

# Written in pieces, so that this file passes its own rule.
MACHINE_PATHS = re.compile(r"(?<![\w.:/-])/(?:root|work|home|Users|opt|mnt)/" + r"\w")
REGISTRY_HOSTS = re.compile(
    r"pypi\." + r"org|python" + r"hosted\.org|download\." + r"pytorch\.org|registry\.npm" + r"js\.org"
)
INDEX_OPTIONS = re.compile(r"--(?:extra-)?index-" + r"url|--find-" + r"links|\bfile:" + r"//")
CODE = (".py", ".toml", ".yaml", ".yml", ".lock", "Makefile", ".ci/run", ".ci/lock", "-env", "-lock")


@cache
def tracked() -> tuple[str, ...]:
    """Paths of the files under version control that are present."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(path for path in listing.split("\0") if path and (ROOT / path).is_file())


def modules() -> tuple[str, ...]:
    """The project's own Python files, tests and benchmarks aside."""
    return tuple(path for path in tracked() if path.endswith(".py") and path.split("/")[0] in FOLDERS)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def imported(source: str) -> Iterator[str]:
    """Full names of the modules a source file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


def import_faults(path: str, source: str) -> list[str]:
    """Imports of packages that belong elsewhere."""
    faults = []
    for name in imported(source):
        package = name.split(".")[0]
        places = IMPORTERS.get(package)
        if places is not None and not any(fnmatch(path, place) for place in places):
            faults.append(f"{path}: imports {name}, which belongs to {', '.join(places)}")
        if package == "torch" and path in {f"sdpo_core/{module}.py" for module in TORCH_FREE}:
            faults.append(f"{path}: imports {name}, but must start without torch")
    return faults


def package_file_faults(path: str, source: str) -> list[str]:
    """An `__init__.py` holds a docstring and nothing else."""
    body = ast.parse(source).body
    is_docstring_only = len(body) == 1 and ast.get_docstring(ast.parse(source)) is not None
    return [] if is_docstring_only else [f"{path}: holds more or less than one docstring"]


def name_faults(path: str) -> list[str]:
    """A module or folder named after nothing in particular."""
    vague = VAGUE_NAMES & {part.removesuffix(".py") for part in path.split("/")}
    return [f"{path}: is named {name}; name it after what it holds" for name in sorted(vague)]


def future_faults(path: str, source: str) -> list[str]:
    """Postponed annotations hide record fields from the shape checker."""
    is_postponed = path.startswith("sdpo_core/") and "__future__" in set(imported(source))
    return [f"{path}: imports from __future__"] if is_postponed else []


def ascii_faults(path: str, text: str) -> list[str]:
    """Characters outside ASCII in code."""
    lines = text.splitlines()
    return [f"{path}:{number}: not ASCII" for number, line in enumerate(lines, start=1) if not line.isascii()]


def length_faults(path: str, source: str) -> list[str]:
    """Functions longer than a screen."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                faults.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}")
    return faults


def loading_faults(path: str, source: str) -> list[str]:
    """Ways to load a model file that run code found in it."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            faults.append(f"{path}:{node.lineno}: torch.load unpickles; use safetensors")
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            faults.append(f"{path}:{node.value.lineno}: trust_remote_code runs code of the model's folder")
    return faults


def machine_faults(path: str, text: str) -> list[str]:
    """Absolute paths of somebody's machine, hosts of package registries, options that point pip at one."""
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        for rule in (MACHINE_PATHS, REGISTRY_HOSTS, INDEX_OPTIONS):
            if found := rule.search(line):
                faults.append(f"{path}:{number}: names {found.group()!r}")
    return faults


def lock_faults(text: str) -> list[str]:
    """Lines of a lock file that are not `name==version`, local versions (`+cpu`) included."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._!]+", line)]


def distribution_name(requirement: str) -> str:
    """`Ray[default]==2.60.0` is `ray`."""
    return re.split(r"[\[=<>;! ]", requirement)[0].lower().replace("_", "-")


@cache
def distributions() -> Mapping[str, list[str]]:
    """Import name -> the installed packages that bring it."""
    return packages_distributions()


def dependency_faults(path: str, source: str, *, declared: frozenset[str]) -> list[str]:
    """Imports of packages that are there only because something else pulls them in."""
    faults = []
    for name in sorted({name.split(".")[0] for name in imported(source)} - sys.stdlib_module_names - OWN):
        owners = {distribution_name(owner) for owner in distributions().get(name, [name])}
        if owners.isdisjoint(declared):
            faults.append(f"{path}: imports {name}, which pyproject.toml does not declare")
    return faults


def named_paths(page: str, *, tops: frozenset[str]) -> set[str]:
    """Repository paths in a page's inline code; placeholders (`<name>`, `NNN`) are left out.

    A word of inline code is a path when its first part is a top-level name and it has a further part or a suffix.
    """
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    words = {word for code in re.findall(r"`([^`\n]+)`", prose) for word in code.split()}
    paths = {word.rstrip(".,;:").removeprefix("./") for word in words}
    return {
        path
        for path in paths
        if re.fullmatch(r"[\w./-]+", path)
        and "NNN" not in path
        and path.split("/")[0] in tops
        and ("/" in path or "." in path)
    }


def link_targets(page: str, *, folder: str) -> set[str]:
    """Relative links of a page, pictures included, as paths from the root; `folder` is where the page lies."""
    targets = re.findall(r"\]\(((?!\w+:|#)[^)\s]+)\)", page)
    return {posixpath.normpath(posixpath.join(folder, target.split("#")[0])) for target in targets}


def path_faults(where: str, page: str, *, present: frozenset[str]) -> list[str]:
    """Paths a page names that are not in the repository."""
    tops = frozenset(path.split("/")[0] for path in present)
    folders = {str(parent) for path in present for parent in Path(path).parents}
    named = named_paths(page, tops=tops) | link_targets(page, folder=posixpath.dirname(where))
    return [
        f"{where}: names {path}, which is not there"
        for path in sorted(named)
        if path.rstrip("/") not in present | folders
    ]


def pages() -> tuple[str, ...]:
    return tuple(path for path in tracked() if path.endswith(".md") and path.split("/")[0] not in FOLDERS)


def is_code(path: str) -> bool:
    return path.endswith(CODE) and not path.startswith("data_prep/bundled/")


def test_imports_stay_where_they_belong() -> None:
    assert [fault for path in modules() for fault in import_faults(path, read(path))] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("reports/rows.py", "import prefect"),
        ("tasks/train.py", "from mlflow.tracking import MlflowClient"),
        ("flows/services.py", "import ray"),
        ("sdpo_core/trainer.py", "def start():\n    import ray.actor\n"),
        ("reports/figures.py", "import torch.nn as nn"),
        ("sdpo_core/journal.py", "from torch import Tensor"),
        ("sdpo_core/backends/policy.py", "from megatron.core import parallel_state"),
    ],
)
def test_import_faults_finds_misplaced_import(path: str, source: str) -> None:
    assert len(import_faults(path, source)) == 1


def test_import_faults_lets_owners_import() -> None:
    assert import_faults("tasks/tracking.py", "import mlflow\nimport prefect") == []
    assert import_faults("sdpo_core/actors/student.py", "import ray\nimport torch") == []


def test_package_files_hold_a_docstring_only() -> None:
    files = [path for path in modules() if path.endswith("__init__.py")]
    assert [fault for path in files for fault in package_file_faults(path, read(path))] == []


@pytest.mark.parametrize("source", ["", '"""What."""\nfrom sdpo_core.errors import DataError\n', "x = 1\n"])
def test_package_file_faults_finds_content(source: str) -> None:
    assert len(package_file_faults("reports/__init__.py", source)) == 1


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without `__init__.py` would be missing from the wheel."""
    present = set(tracked())
    assert [path for path in modules() if str(Path(path).parent / "__init__.py") not in present] == []


def test_names_say_what_a_module_holds() -> None:
    python = [path for path in tracked() if path.endswith(".py")]
    assert [fault for path in python for fault in name_faults(path)] == []


@pytest.mark.parametrize("path", ["reports/utils.py", "sdpo_core/common/maths.py", "tests/helpers.py"])
def test_name_faults_finds_vague_name(path: str) -> None:
    assert len(name_faults(path)) == 1


def test_core_postpones_no_annotations() -> None:
    assert [fault for path in modules() for fault in future_faults(path, read(path))] == []


def test_future_faults_finds_import() -> None:
    assert len(future_faults("sdpo_core/cell.py", "from __future__ import annotations\n")) == 1


def test_code_is_ascii() -> None:
    assert [fault for path in tracked() if is_code(path) for fault in ascii_faults(path, read(path))] == []


def test_ascii_faults_finds_line() -> None:
    assert ascii_faults("flows/cli.py", "x = 1\n# caf\u00e9\n") == ["flows/cli.py:2: not ASCII"]


def test_functions_fit_a_screen() -> None:
    assert [fault for path in modules() for fault in length_faults(path, read(path))] == []


def test_length_faults_finds_long_function() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert len(length_faults("flows/cli.py", f"def long():\n{body}")) == 1


def test_model_files_load_without_running_code() -> None:
    assert [fault for path in modules() for fault in loading_faults(path, read(path))] == []


@pytest.mark.parametrize("source", ["torch.load(path)", "load(path, trust_remote_code=True)"])
def test_loading_faults_finds_call(source: str) -> None:
    assert len(loading_faults("sdpo_core/backends/hf.py", source)) == 1


def test_files_name_no_machine() -> None:
    texts = [path for path in tracked() if is_code(path) or path.endswith((".md", ".json"))]
    texts = [path for path in texts if not path.startswith("data_prep/bundled/")]
    assert [fault for path in texts for fault in machine_faults(path, read(path))] == []


@pytest.mark.parametrize(
    "text",
    [
        "HOME = '/ro" + "ot/x'",
        "cd /ho" + "me/ada",
        "https://pypi." + "org/simple",
        "--find-" + "links wheels",
        "x @ file:" + "///x.whl",
    ],
)
def test_machine_faults_finds_line(text: str) -> None:
    assert len(machine_faults("README.md", text)) == 1


def test_machine_faults_lets_relative_paths_pass() -> None:
    assert machine_faults("README.md", "see tests/home/x, ./work/y and http://127.0.0.1:4200/work/z") == []


def test_lock_pins_every_package() -> None:
    assert lock_faults(read("requirements.lock")) == []


@pytest.mark.parametrize("line", ["torch==2.13.0+cpu", "torch>=2", "x @ git", "--index x", "-e ."])
def test_lock_faults_finds_line(line: str) -> None:
    assert lock_faults(f"# head\nnumpy==2.4.6\n{line}\n") == [line]


def test_extras_are_pinned_in_one_place() -> None:
    """In pyproject.toml: the lock is what everybody installs."""
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    locked = {distribution_name(line) for line in read("requirements.lock").splitlines()}
    optional = [line for name, extra in extras.items() if name != "dev" for line in extra]
    assert optional
    assert lock_faults("\n".join(optional)) == []
    assert locked.isdisjoint(map(distribution_name, optional))


def test_imports_are_declared_dependencies() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extra = project["optional-dependencies"]["megatron"]
    # The modules of an extra are imported where it is installed, and read here where it is not.
    runtime = frozenset(map(distribution_name, [*project["dependencies"], *extra])) | {"megatron"}
    tests = runtime | frozenset(map(distribution_name, project["optional-dependencies"]["dev"]))
    # A project of its own, for another environment.
    server = tomllib.loads(read("sglang_plugin/pyproject.toml"))["project"]
    declared = {
        "sglang_plugin": frozenset(map(distribution_name, server["dependencies"])),
        **dict.fromkeys(FOLDERS, runtime),
    }
    python = [path for path in tracked() if path.endswith(".py")]
    assert [
        fault
        for path in python
        for fault in dependency_faults(path, read(path), declared=declared.get(path.split("/")[0], tests))
    ] == []


def test_dependency_faults_finds_a_borrowed_package() -> None:
    source = "import json\nimport sdpo_core.specs\nimport yaml\nimport pytest\n"
    faults = dependency_faults("flows/cli.py", source, declared=frozenset({"pytest"}))
    assert faults == ["flows/cli.py: imports yaml, which pyproject.toml does not declare"]


def test_pages_name_paths_that_exist() -> None:
    present = frozenset(tracked())
    assert [fault for path in pages() for fault in path_faults(path, read(path), present=present)] == []


def test_path_faults_finds_missing_path() -> None:
    page = "`docs/gone.md`, [a](lost.md), [b](../README.md), `docs/here.md`, `docs/<name>.md`, `eval/accuracy`, docs."
    faults = path_faults("docs/page.md", page, present=frozenset({"docs/here.md", "README.md"}))
    assert [fault.split()[2] for fault in faults] == ["docs/gone.md,", "docs/lost.md,"]


def light_modules() -> list[str]:
    """Modules that must start at once: `plan` and `report` wait for nothing they do not use."""
    paths = [path for path in modules() if path.startswith(("data_prep/", "experiments/", "reports/"))]
    paths += [f"sdpo_core/{name}.py" for name in TORCH_FREE]
    paths += [path for path in modules() if path == "flows/cli.py"]
    return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]


def test_light_modules_start_without_torch() -> None:
    """One process imports them all; the one that brought torch in is named."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {sorted(heavy)}'\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *light_modules()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
