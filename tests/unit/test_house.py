"""The rules of the house that no tool checks: sizes, docstrings, names, and what must not be committed."""

import ast
import itertools
import os
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "shared", "cli", "sdk/src")
NOT_OURS = {".git", ".venv", "build", "dist", "node_modules", "__pycache__"}

FILE_LINES = 500
FUNCTION_LINES = 60
USUAL_FUNCTION_LINES = 35  # nine of ten
MEDIAN_FUNCTION_LINES = 10

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# Joined here so that this file does not contain what it looks for.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("sum", "golang", "org"),
        ("repo", "maven", "apache", "org"),
        ("repo1", "maven", "org"),
        ("deb", "debian", "org"),
    ]
]
NOT_COMMITTED = re.compile(
    "|".join(map(re.escape, REGISTRY_HOSTS))
    + r"|https?://[\w.:-]+/simple\b"  # any other package index
    + r"|(?<![\w.~<$}/-])/(work|root|home|Users)/[\w.-]+"  # a path of one machine
)
LOCK_ENTRY = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+)( ; [^\\]+)? \\$")


def committed() -> Iterator[Path]:
    """Every file of the checkout that is ours: git is not asked, a copy without .git must pass too."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith(".egg-info")]
        yield from (Path(folder, name) for name in files)


def modules(*roots: str) -> Iterator[Path]:
    for root in roots or PACKAGES:
        yield from sorted((ROOT / root).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def function_sizes() -> Iterator[tuple[int, str]]:
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield node.end_lineno - first + 1, f"{shown(path)}:{node.lineno} {node.name}"


def imported(node: ast.AST) -> list[str]:
    """The top-level names that one import statement of ours brings in; a relative import is our own."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.partition(".")[0]]
    return []


def test_every_package_of_the_layout_is_looked_at() -> None:
    assert [] == [root for root in PACKAGES if not any(modules(root))]


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {
        shown(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in modules(*PACKAGES, "tests", "bench", "examples")
    }
    assert {} == {path: lines for path, lines in lengths.items() if lines > FILE_LINES}


def test_no_function_is_longer_than_60_lines() -> None:
    assert [] == [(lines, where) for lines, where in function_sizes() if lines > FUNCTION_LINES]


def test_functions_are_small_in_the_main() -> None:
    sizes = sorted(lines for lines, _ in function_sizes())
    assert statistics.median(sizes) <= MEDIAN_FUNCTION_LINES
    assert sizes[len(sizes) * 9 // 10] <= USUAL_FUNCTION_LINES


def test_every_module_says_what_lives_there() -> None:
    assert [] == [shown(path) for path in modules(*PACKAGES, "tests") if not ast.get_docstring(tree(path))]


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [] == [shown(path) for path in modules(*PACKAGES, "tests", "bench") if path.stem in FORBIDDEN_NAMES]


def test_the_sdk_imports_the_standard_library_and_itself_and_what_its_wrappers_wrap() -> None:
    allowed = sys.stdlib_module_names | {"laxity"}
    wrapped = {"grpc.py": "grpc", "stream.py": "torch"}  # a user of the wrapper has it
    found = [
        f"{shown(path)}: {name}"
        for path in modules("sdk/src")
        for node in ast.walk(tree(path))
        for name in imported(node)
        if name not in allowed | {wrapped.get(path.name)}
    ]
    assert [] == found


def test_the_sdk_declares_no_dependency() -> None:
    project = tomllib.loads((ROOT / "sdk/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [] == project.get("dependencies", [])


def test_a_core_draws_no_chance_from_numpy() -> None:
    # import-linter sees `numpy`, not `numpy.random`
    cores = [path for path in modules("services") if "core" in path.parts or path.stem == "core"]
    used = [
        f"{shown(path)}:{node.lineno}"
        for path in cores
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr == "random")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numpy.random"))
    ]
    assert [] == used


def test_no_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    found = []
    for path in committed():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        hits = ((number, NOT_COMMITTED.search(line)) for number, line in enumerate(lines, 1))
        found += [f"{shown(path)}:{number}: {hit[0]}" for number, hit in hits if hit]
    assert [] == found


@pytest.mark.parametrize(
    "line",
    [
        "/".join(["-i https:", "", "mirror.example", "simple"]),
        *("/".join(["cd ", top, "x"]) for top in ("home", "work", "root")),
        *REGISTRY_HOSTS,
    ],
)
def test_what_must_not_be_committed_would_be_found(line: str) -> None:
    assert NOT_COMMITTED.search(line)


@pytest.mark.parametrize("line", ["~/work/x", "https://host.example/root/x", "$HOME/work/x", "docs/home/x"])
def test_a_path_of_no_machine_may_be_committed(line: str) -> None:
    assert not NOT_COMMITTED.search(line)


def test_every_locked_package_has_its_hashes() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    entries = [pair for pair in itertools.pairwise([*lines, ""]) if not pair[0].startswith(" ")]
    assert entries
    unhashed = [name for name, following in entries if not (LOCK_ENTRY.match(name) and "sha256:" in following)]
    assert [] == unhashed


def test_the_lock_holds_every_dependency_of_the_project() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {match["name"] for match in map(LOCK_ENTRY.match, lock.splitlines()) if match}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    assert set() == {re.split(r"[=<>~!\[ ;]", name)[0] for name in wanted} - locked


def test_make_alone_prints_what_can_be_done() -> None:
    shell = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, timeout=20, check=True)
    missing = {"setup", "demo", "test", "check", "docs", "lock", "bench-NAME"}
    missing -= {line.split()[1] for line in shell.stdout.splitlines() if line.startswith("  make ")}
    assert set() == missing


def test_B23_every_task_is_held_by_something_that_outlives_it() -> None:
    """asyncio keeps weak references alone: a task that nobody holds may vanish in the middle of its work."""
    dropped = [
        f"{shown(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr)
        and isinstance(call := node.value, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in {"create_task", "ensure_future"}
        and ast.unparse(call.func.value) in {"asyncio", "loop", "asyncio.get_running_loop()"}
    ]
    assert dropped == []


def test_every_test_that_the_list_of_cases_names_exists() -> None:
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(test_\w+)` \((tests/[\w/]+\.py)\)", text)
    assert [name for name, path in listed if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")] == []
    assert len(listed) > 60
