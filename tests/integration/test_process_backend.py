"""The process backend against the operating system: cores, limits, signals, and what survives whose death."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.placer.backends import cgroups
from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.process import ProcessBackend, ProcessOptions
from services.placer.core.containers import Cause
from shared.devices import cpu_device_uuid
from shared.errors import BackendError
from shared.messages.ledger import ContainerLabels, Reservation
from shared.messages.place import PlaceRequest

NODE, BOX = "node-1", "box"
LIMIT_S = 20
ROOT = Path(__file__).parents[2]


def of_test(folder: Path) -> list[psutil.Process]:
    """Every process, living or zombie, that has to do with this test's folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
            if str(folder) in environment.get("LAXITY_RING_DIR", "") or str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    yield
    until(lambda: not of_test(tmp_path))
    children = psutil.Process().children()
    assert [] == [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


@pytest.fixture
async def backend(tmp_path: Path, no_orphans: None) -> AsyncIterator[ProcessBackend]:
    backend = make(tmp_path)
    yield backend
    for seen in await backend.list(NODE):
        await backend.stop(NODE, seen.container)


def make(folder: Path, **options: int) -> ProcessBackend:
    chosen = ProcessOptions(**{"stop_grace_us": 300_000, **options})
    return ProcessBackend(folder / "state", folder / "rings", chosen, work_dir=folder)


def spec(
    *command: str,
    cores: tuple[int, ...] = (),
    cpu_milli: int = 0,
    memory_mib: int = 0,
    env: dict[str, str] | None = None,
) -> StartSpec:
    held = Reservation(
        request_id="detector",
        replica=0,
        generation=1,
        devices=tuple(cpu_device_uuid("m1", core) for core in cores),
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
    )
    labels = ContainerLabels(container=BOX, ledger_id="ledger", node=NODE, reservation=held)
    return StartSpec(labels, PlaceRequest(command=command, env=dict(env or {})))


def python(program: str, *more: str) -> tuple[str, ...]:
    return ("python", "-c", textwrap.dedent(program), *more)


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up, "what the test waits for did not happen"
        time.sleep(0.01)


async def exited(backend: ProcessBackend) -> Seen:
    give_up = time.monotonic() + LIMIT_S
    while not (found := [seen for seen in await backend.list(NODE) if seen.state == "exited"]):
        assert time.monotonic() < give_up, "it did not exit"
        await asyncio.sleep(0.01)
    return found[0]


def started(folder: Path) -> dict[str, int]:
    content: dict[str, int] = json.loads((folder / "state" / BOX / "started.json").read_bytes())
    return content


def stdout(folder: Path) -> str:
    return (folder / "state" / BOX / "stdout.log").read_text()


async def test_it_is_pinned_to_the_core_that_stands_for_its_device(backend: ProcessBackend) -> None:
    core = max(os.sched_getaffinity(0))
    seen = await backend.start(spec("sleep", "60", cores=(core,)))
    assert [core] == psutil.Process(seen.pid).cpu_affinity()


async def test_a_core_that_the_machine_lacks_is_a_failed_start(backend: ProcessBackend) -> None:
    with pytest.raises(BackendError, match=r"cannot pin it to cores \[99999\]"):
        await backend.start(spec("sleep", "60", cores=(99_999,)))
    assert [] == await backend.list(NODE)


async def test_reasons_of_failed_starts_name_the_thing(backend: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "no-program").write_text("text")
    for command, reason in {
        ("no-such-command",): "command not found: no-such-command",
        ("./no-program",): "command not executable: ./no-program",
        ("a\0b",): "cannot execute it: .*null",
        ("",): "cannot execute it: .*empty",
    }.items():
        with pytest.raises(BackendError, match=f"^{reason}"):
            await backend.start(spec(*command))
    assert [".ended"] == [path.name for path in (tmp_path / "state").iterdir()]
    assert [] == list((tmp_path / "state" / ".ended").iterdir())
    assert [] == list((tmp_path / "rings").iterdir())


async def test_the_environment_is_clean_and_tells_the_sdk_where_its_ring_is(
    backend: ProcessBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_SECRET", "must not leak")
    core = max(os.sched_getaffinity(0))
    await backend.start(spec("env", cores=(core,), env={"MODEL": "yolo", "OPENBLAS_NUM_THREADS": "2"}))
    await exited(backend)
    env = dict(line.split("=", 1) for line in stdout(tmp_path).splitlines())
    assert "OUR_SECRET" not in env
    assert "PYTHONPATH" not in env
    assert (str(tmp_path / "rings" / BOX), f"CPU-m1-{core}") == (env["LAXITY_RING_DIR"], env["LAXITY_DEVICES"])
    assert (BOX, "detector") == (env["LAXITY_CONTAINER"], env["LAXITY_REQUEST_ID"])
    assert ("1", "2", "yolo") == (env["OMP_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"], env["MODEL"])
    assert str(Path(sys.executable).parent) == env["PATH"].split(":")[0]


async def test_python_in_a_command_is_the_one_that_has_the_sdk(backend: ProcessBackend, tmp_path: Path) -> None:
    await backend.start(spec(*python("import sys; print(sys.prefix)")))
    assert 0 == (await exited(backend)).exit_code
    assert sys.prefix == stdout(tmp_path).strip()


async def test_exit_codes_and_signals_come_back(backend: ProcessBackend) -> None:
    for command, code, cause in (
        ("exit 0", 0, None),
        ("exit 255", 255, None),
        ("exit 137", 137, None),
        ("kill -9 $$", 137, Cause("SIGKILL")),
        ("kill -15 $$", 143, Cause("SIGTERM")),
        ("kill -35 $$", 163, Cause("signal 35")),
    ):
        await backend.start(spec("sh", "-c", command))
        seen = await exited(backend)
        assert (code, cause) == (seen.exit_code, seen.cause)
        await backend.remove(NODE, BOX)


async def test_term_reaches_the_command_and_its_children(backend: ProcessBackend, tmp_path: Path) -> None:
    child = "trap 'touch child; exit 0' TERM; touch ready; while :; do sleep 0.05; done"
    parent = f"trap 'echo parent; wait; exit 5' TERM; sh -c \"{child}\" & wait"
    await backend.start(spec("sh", "-c", parent))
    until((tmp_path / "ready").exists)
    os.kill(started(tmp_path)["shim"], signal.SIGTERM)
    assert 5 == (await exited(backend)).exit_code
    assert ("parent\n", True) == (stdout(tmp_path), (tmp_path / "child").exists())


async def test_what_the_command_leaves_running_ends_with_it(backend: ProcessBackend, tmp_path: Path) -> None:
    await backend.start(spec("sh", "-c", "sleep 60 & setsid sleep 61 & exit 4"))
    assert 4 == (await exited(backend)).exit_code
    until(lambda: not of_test(tmp_path))


async def test_a_shim_killed_by_force_leaves_no_child_and_no_made_up_exit_code(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    await backend.start(spec("sh", "-c", "setsid sleep 61 & touch ready; exec sleep 60"))
    until((tmp_path / "ready").exists)
    os.kill(started(tmp_path)["shim"], signal.SIGKILL)
    seen = await exited(backend)
    assert None is seen.exit_code
    assert [] == of_test(tmp_path)


async def test_a_watcher_notices_that_a_shim_was_killed(backend: ProcessBackend, tmp_path: Path) -> None:
    posts: asyncio.Queue[Seen] = asyncio.Queue()
    watching = asyncio.create_task(backend.watch(posts.put_nowait))
    await backend.start(spec("sleep", "60"))
    os.kill(started(tmp_path)["shim"], signal.SIGKILL)
    seen = await asyncio.wait_for(posts.get(), LIMIT_S)
    assert ("exited", None) == (seen.state, seen.exit_code)
    watching.cancel()


async def test_a_shim_that_is_stopped_does_not_hold_up_a_stop(backend: ProcessBackend, tmp_path: Path) -> None:
    await backend.start(spec("sleep", "60"))
    os.kill(started(tmp_path)["shim"], signal.SIGSTOP)
    await backend.stop(NODE, BOX)
    assert [] == await backend.list(NODE)
    assert [] == of_test(tmp_path)


async def test_an_exit_is_noticed_at_once_though_nobody_looks(tmp_path: Path) -> None:
    backend = make(tmp_path, rescan_us=3_600_000_000)
    posts: asyncio.Queue[float] = asyncio.Queue()
    watching = asyncio.create_task(backend.watch(lambda seen: posts.put_nowait(time.time())))
    await backend.start(spec("sh", "-c", "sleep 0.3; date +%s.%N"))
    noticed = await asyncio.wait_for(posts.get(), LIMIT_S)
    assert noticed - float(stdout(tmp_path)) < 2  # a busy machine; alone it is some 10 ms
    watching.cancel()
    await backend.remove(NODE, BOX)


PLACER = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from services.placer.backends.process import ProcessBackend
from services.placer.backends.base import StartSpec
from shared.messages.ledger import ContainerLabels
from shared.messages.place import PlaceRequest

async def main():
    backend = ProcessBackend(Path({folder!r}) / "state", Path({folder!r}) / "rings", work_dir=Path({folder!r}))
    labels = ContainerLabels.from_json({labels!r})
    await backend.start(StartSpec(labels, PlaceRequest.from_json({request!r})))
    print("started", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def start_and_die(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as placer:
        assert placer.stdout is not None
        assert b"started\n" == placer.stdout.readline()
        placer.kill()


async def test_a_container_outlives_its_placer_and_the_next_one_learns_its_exit_code(tmp_path: Path) -> None:
    asked = spec("sh", "-c", "echo before; while [ ! -e go ]; do sleep 0.02; done; echo after; exit 6")
    program = PLACER.format(
        root=str(ROOT), folder=str(tmp_path), labels=asked.labels.to_json(), request=asked.request.to_json()
    )
    start_and_die(program)
    adopting = make(tmp_path)
    (seen,) = await adopting.list(NODE)
    assert ("running", asked.labels) == (seen.state, seen.labels)
    assert seen.pid == (await adopting.start(asked)).pid
    (tmp_path / "go").touch()
    assert 6 == (await exited(adopting)).exit_code
    assert "before\nafter\n" == stdout(tmp_path)
    await adopting.remove(NODE, BOX)


async def test_a_start_that_broke_off_is_cleared_away_and_can_be_repeated(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    folder = tmp_path / "state" / BOX
    folder.mkdir(parents=True)
    (folder / "labels.json").write_bytes(spec("sleep", "60").labels.to_json())
    (tmp_path / "rings" / BOX).mkdir(parents=True)
    assert [] == await backend.list(NODE)
    assert not folder.exists()
    assert "running" == (await backend.start(spec("sleep", "60"))).state


async def test_process_ids_of_another_boot_are_nobody(backend: ProcessBackend, tmp_path: Path) -> None:
    await backend.start(spec("sleep", "60"))
    file = tmp_path / "state" / BOX / "started.json"
    true = file.read_text()
    ours = {"pid": os.getpid(), "ticks": 1, "shim": os.getpid(), "shim_ticks": 1}
    file.write_text(json.dumps({**json.loads(true), **ours, "boot_id": "another"}))
    assert [] == await backend.list(NODE)  # its lock is held, so it is left alone
    file.write_text(true)
    assert ["running"] == [seen.state for seen in await backend.list(NODE)]


async def test_spoiled_labels_are_shown_as_unknown_and_not_as_absent(backend: ProcessBackend, tmp_path: Path) -> None:
    await backend.start(spec("sleep", "60"))
    (tmp_path / "state" / BOX / "labels.json").write_text("{")
    (seen,) = await backend.list("any-node")
    assert (None, "running", BOX) == (seen.labels, seen.state, seen.container)


async def test_what_the_machine_refuses_is_an_error_of_the_backend(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = ProcessBackend(tmp_path / "file", tmp_path / "rings")
    with pytest.raises(BackendError, match=r"cannot start box: .*file"):
        await backend.start(spec("true"))
    with pytest.raises(BackendError, match=r"cannot list the containers: .*file"):
        await backend.list(NODE)
    with pytest.raises(BackendError, match=r"cannot forget box: .*file"):
        await backend.stop(NODE, BOX)


async def test_many_lines_do_not_block_and_logs_stay_short(tmp_path: Path) -> None:
    backend = make(tmp_path, log_bytes=100_000)
    await backend.start(spec(*python("for n in range(200_000): print(n)")))
    assert 0 == (await exited(backend)).exit_code
    logs = {path.name: path for path in (tmp_path / "state" / BOX).glob("stdout.log*")}
    assert {"stdout.log", "stdout.log.1"} == logs.keys()
    assert logs["stdout.log.1"].read_text().endswith("199999\n")
    assert sum(path.stat().st_size for path in logs.values()) <= 150_000
    await backend.remove(NODE, BOX)


async def test_logs_of_the_last_removed_ones_are_kept_without_their_environment(tmp_path: Path) -> None:
    backend = make(tmp_path, kept=2)
    for number in range(4):
        await backend.start(spec("echo", str(number), env={"MODEL": "yolo"}))
        await exited(backend)
        await backend.remove(NODE, BOX)
    kept = sorted((tmp_path / "state" / ".ended").iterdir())
    assert ["2\n", "3\n"] == sorted((folder / "stdout.log").read_text() for folder in kept)
    assert [] == holding(tmp_path, b"yolo")


def holding(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def needs(controller: str) -> None:
    applied = cgroups.apply(f"laxity-probe-{os.getpid()}", 1000, 64)
    cgroups.remove(applied.groups)
    if not applied.applied[controller].startswith("cgroup"):
        pytest.skip(f"{controller} limit: {applied.applied[controller]}")


async def test_a_memory_limit_holds(backend: ProcessBackend) -> None:
    needs("memory")
    await backend.start(spec(*python("x = b'x' * (200 << 20)"), memory_mib=64))
    assert 137 == (await exited(backend)).exit_code
    assert backend.limits(BOX)["memory"].endswith("64 MiB")


async def test_a_cpu_limit_holds(backend: ProcessBackend, tmp_path: Path) -> None:
    needs("cpu")
    program = """
        import time
        end = time.monotonic() + 1
        while time.monotonic() < end: pass
        print(time.process_time())
    """
    await backend.start(spec(*python(program), cpu_milli=200))
    assert 0 == (await exited(backend)).exit_code
    assert float(stdout(tmp_path)) < 0.5
    assert backend.limits(BOX)["cpu"].endswith("200 milli")


async def test_its_control_groups_go_with_it(backend: ProcessBackend, tmp_path: Path) -> None:
    needs("cpu")
    await backend.start(spec("sleep", "60", cpu_milli=500, memory_mib=64))
    plan = json.loads((tmp_path / "state" / BOX / "start.json").read_bytes())
    groups = [Path(group) for group in plan["groups"]]
    assert [True] * len(groups) == [group.exists() for group in groups]
    os.kill(started(tmp_path)["shim"], signal.SIGKILL)
    await exited(backend)
    assert [False] * len(groups) == [group.exists() for group in groups]


async def test_limits_not_asked_for_are_not_set(backend: ProcessBackend) -> None:
    await backend.start(spec("sleep", "60"))
    assert {"cpu": "not asked for", "memory": "not asked for"} == backend.limits(BOX)
