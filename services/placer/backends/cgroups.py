"""CPU and memory limits by control groups, version 1 or 2, where this process may make them; starts nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PERIOD_US = 20_000
"""How often a quota is dealt out: the kernel's default, 100 ms, would halt a small quota for longer than a deadline."""
LEAST_QUOTA_US = 1_000
"""The kernel refuses a smaller one."""
UNLIMITED = "not asked for"
_CPU = ("cpu.max", "cpu.cfs_quota_us")
_MEMORY = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True)
class Hierarchy:
    """Where our own group lies in one mounted hierarchy."""

    version: int
    controllers: frozenset[str]
    own: Path


@dataclass(frozen=True)
class Limits:
    """What became of the limits of one container."""

    groups: tuple[str, ...]
    """Folders that the command joins before it is executed."""
    applied: dict[str, str]
    """``cpu`` and ``memory``: in words what holds, or why nothing does."""


def apply(name: str, cpu_milli: int, memory_mib: int, hierarchies: tuple[Hierarchy, ...] | None = None) -> Limits:
    """Make the groups ``name`` below our own. 0 is no limit. What the machine refuses is said, and no error."""
    where = own_groups() if hierarchies is None else hierarchies
    asked = {"cpu": cpu_milli, "memory": memory_mib}
    groups: dict[str, None] = {}
    applied = {}
    for controller, amount in asked.items():
        group, applied[controller] = _limit(where, name, controller, amount)
        if group is not None:
            groups[str(group)] = None
    return Limits(tuple(groups), applied)


def change(groups: tuple[str, ...], cpu_milli: int, memory_mib: int) -> None:
    """Other limits for the groups of a container; 0 leaves one as it is.

    OSError where there is no group for one of them, or where the kernel refuses: then both are as they were.
    """
    cpu = _group_with(groups, _CPU, "cpu") if cpu_milli else None
    memory = _group_with(groups, _MEMORY, "memory") if memory_mib else None
    if memory is not None:  # first: what is in use already may be refused, a quota never is
        _change_memory(memory, memory_mib << 20)
    if cpu is not None:
        _write_cpu(cpu, cpu_milli)


def _group_with(groups: tuple[str, ...], files: tuple[str, ...], what: str) -> Path:
    for group in map(Path, groups):
        if any((group / file).exists() for file in files):
            return group
    raise OSError(errno.ENOENT, f"it was started without a limit of {what}")


def _change_memory(group: Path, size: int) -> None:
    """Version 1 keeps memory at most memory with swap, at each of the two steps."""
    if (group / "memory.max").exists():
        (group / "memory.max").write_text(str(size), encoding="ascii")
        return
    limit, with_swap = group / "memory.limit_in_bytes", group / "memory.memsw.limit_in_bytes"
    files = [limit, *([with_swap] if with_swap.exists() else [])]
    for file in reversed(files) if size > int(limit.read_text(encoding="ascii")) else files:
        file.write_text(str(size), encoding="ascii")


def _write_cpu(group: Path, cpu_milli: int) -> None:
    quota, period = quota_us(cpu_milli)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {period}", encoding="ascii")
        return
    (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
    (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")


def remove(groups: tuple[str, ...]) -> None:
    """Remove the groups; one that still has members, or is gone already, stays as it is."""
    for group in groups:
        with suppress(OSError):
            Path(group).rmdir()


def quota_us(cpu_milli: int) -> tuple[int, int]:
    """(quota, period) in µs: quota / period = cpu_milli / 1000, the period longer only for very small quotas."""
    quota = PERIOD_US * cpu_milli // 1000
    if quota >= LEAST_QUOTA_US:
        return quota, PERIOD_US
    return LEAST_QUOTA_US, min(1_000_000, LEAST_QUOTA_US * 1000 // cpu_milli)


def own_groups(proc: Path = Path("/proc/self")) -> tuple[Hierarchy, ...]:
    """The hierarchies that this process sees mounted, with its own place in each."""
    try:
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
        places = dict(_places((proc / "cgroup").read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(found for line in mounts if (found := _hierarchy(line, places)))


def _places(text: str) -> Iterator[tuple[str, str]]:
    """(controller, path) of each line of /proc/self/cgroup; version 2 has no controllers and the name ''."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _hierarchy(mount: str, places: dict[str, str]) -> Hierarchy | None:
    before, _, after = mount.partition(" - ")
    root, point = before.split()[3:5]
    kind, _, options = after.split(" ", 2)
    if kind == "cgroup2" and "" in places:
        own = _below(Path(point), root, places[""])
        return Hierarchy(2, frozenset(_words(own / "cgroup.controllers")), own)
    controllers = frozenset(options.split(",")) & places.keys()
    if kind != "cgroup" or not controllers:
        return None
    return Hierarchy(1, controllers, _below(Path(point), root, places[next(iter(controllers))]))


def _below(point: Path, root: str, path: str) -> Path:
    """Our group under a mount that shows only what lies below ``root``, as in a container."""
    inside = PurePosixPath(path)
    return point / inside.relative_to(root) if inside.is_relative_to(root) else point


def _limit(where: tuple[Hierarchy, ...], name: str, controller: str, amount: int) -> tuple[Path | None, str]:
    if amount <= 0:
        return None, UNLIMITED
    found = next((h for h in where if controller in h.controllers), None)
    if found is None:
        return None, f"not applied: no control group with {controller} is mounted"
    group = found.own / name
    made_before = group.exists()  # version 2 has one group for all controllers
    try:
        return (_limit_v1 if found.version == 1 else _limit_v2)(group, controller, amount)
    except OSError as error:
        if not made_before:
            remove((str(group),))
        return None, f"not applied: cgroup v{found.version} refuses: {error.strerror}"


def _limit_v1(group: Path, controller: str, amount: int) -> tuple[Path, str]:
    group.mkdir(exist_ok=True)
    if controller == "cpu":
        quota, period = quota_us(amount)
        (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
        return group, f"cgroup v1: {amount} milli"
    size = str(amount << 20)
    (group / "memory.limit_in_bytes").write_text(size, encoding="ascii")
    with suppress(OSError):  # absent where swap is not accounted
        (group / "memory.memsw.limit_in_bytes").write_text(size, encoding="ascii")
    return group, f"cgroup v1: {amount} MiB"


def _limit_v2(group: Path, controller: str, amount: int) -> tuple[Path, str]:
    switch = group.parent / "cgroup.subtree_control"
    if controller not in _words(switch):  # refused where the parent has members of its own and is not the root
        switch.write_text(f"+{controller}", encoding="ascii")
    group.mkdir(exist_ok=True)
    if controller == "cpu":
        quota, period = quota_us(amount)
        (group / "cpu.max").write_text(f"{quota} {period}", encoding="ascii")
        return group, f"cgroup v2: {amount} milli"
    (group / "memory.max").write_text(str(amount << 20), encoding="ascii")
    with suppress(OSError):
        (group / "memory.swap.max").write_text("0", encoding="ascii")
    return group, f"cgroup v2: {amount} MiB"


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
