"""What the images install: all that the project needs to run, with hashes, and nothing of development."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from compose.run_requirements import SERVER, entries

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in requirements}


def packages(text: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))


def test_all_that_the_project_names_is_there_but_the_server_and_nothing_of_development() -> None:
    found = packages(entries(LOCK))

    assert names(PROJECT["project"]["dependencies"]) - {SERVER} <= found
    assert not found & (names(PROJECT["dependency-groups"]["dev"]) | {SERVER})
    assert {"pydantic-core", "pynacl", "cffi"} <= found  # what those want in turn


def test_each_package_keeps_all_its_hashes() -> None:
    blocks = re.split(r"^(?=[\w.-]+==)", entries(LOCK), flags=re.MULTILINE)[1:]

    assert all("--hash=sha256:" in block for block in blocks)
    assert all(f"{block.rstrip()}\n    # via" in LOCK for block in blocks)


def test_one_package_can_be_asked_for_alone() -> None:
    assert {SERVER} == packages(entries(LOCK, SERVER))


def test_a_package_is_needed_through_others_and_not_by_development_alone() -> None:
    lock = (
        "one==1 \\\n    --hash=sha256:aa\n    # via laxity (pyproject.toml), two\n"
        "three==3 \\\n    --hash=sha256:cc \\\n    --hash=sha256:dd\n    # via two, one\n"
        "two==2 \\\n    --hash=sha256:bb\n    # via laxity (pyproject.toml:dev)\n"
    )

    assert "one==1 \\\n    --hash=sha256:aa\nthree==3 \\\n    --hash=sha256:cc \\\n    --hash=sha256:dd\n" == entries(
        lock
    )


@pytest.mark.parametrize("line", ["RUN --mount", "# syntax=", "<<EOF"])
def test_the_dockerfile_needs_no_buildkit(line: str) -> None:
    assert line not in (ROOT / "Dockerfile").read_text(encoding="utf-8")
