"""The Docker backend on a real engine: what the conformance suite, which runs on it too, cannot know of engines."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.docker import DockerBackend
from services.placer.backends.docker_options import DockerEngine, DockerOptions
from services.placer.backends.docker_spec import LABELS, create_body
from services.placer.core.containers import Cause
from shared.errors import BackendError
from shared.messages.ledger import ContainerLabels, Reservation
from shared.messages.place import PlaceRequest
from tests.backends import watched
from tests.docker.proxy import Proxy
from tests.docker_engine import IMAGE, docker, docker_options, engine_url, inspect

pytestmark = pytest.mark.docker

NODE = "node-1"
BOX = "laxity-0123456789abcdef01234567"
LIMIT_S = 20
SLEEP = ("sleep", "60")
NO_HOOK = "could not select device driver"


@pytest.fixture
async def options(tmp_path: Path) -> AsyncIterator[DockerOptions]:
    made = docker_options(tmp_path).model_copy(update={"stop_grace_us": 200_000})
    yield made
    if left := docker("ps", "-aq", "--filter", f"label=laxity.scope={made.scope}").split():
        docker("rm", "-f", *left)


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    if not engine_url().startswith("unix://"):
        pytest.skip("the engine is not on a unix socket")
    made = Proxy(Path(engine_url().removeprefix("unix://")))
    server = await asyncio.start_unix_server(made.serve, str(tmp_path / "p"))
    yield made
    made.cut()
    server.close()
    await server.wait_closed()
    await until(lambda: made.open == 0)


def through(options: DockerOptions, folder: Path, **more: Any) -> DockerOptions:
    return options.model_copy(update={"engines": {"*": DockerEngine(url=f"unix://{folder / 'p'}")}, **more})


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[[DockerOptions], DockerBackend]]:
    made: list[DockerBackend] = []

    def backend(options: DockerOptions) -> DockerBackend:
        made.append(DockerBackend(options, tmp_path / "rings"))
        return made[-1]

    yield backend
    for each in made:
        await each.close()


Make = Callable[[DockerOptions], DockerBackend]


def spec(
    *command: str, container: str = BOX, devices: tuple[str, ...] = (), cpu: int = 0, memory: int = 0, **asked: Any
) -> StartSpec:
    request = PlaceRequest.model_validate({"command": command or SLEEP, **asked})
    held = Reservation(
        request_id="r",
        replica=0,
        generation=1,
        devices=devices,
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=cpu,
        memory_mib=memory,
    )
    return StartSpec(ContainerLabels(container=container, ledger_id="l", node=NODE, reservation=held), request)


def engine_name(options: DockerOptions, container: str = BOX) -> str:
    return f"{options.scope}.{container}"


def there(options: DockerOptions) -> list[str]:
    """All containers of the test in any state, as an outsider sees them."""
    listed = docker("ps", "-a", "--filter", f"label=laxity.scope={options.scope}", "--format", "{{.Names}}")
    return sorted(listed.split())


async def until(condition: Callable[[], bool]) -> None:
    async def met() -> bool:
        return condition()

    await until_awaited(met)


async def until_awaited(condition: Callable[[], Awaitable[bool]]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < give_up, "what the test waits for did not happen"
        await asyncio.sleep(0.01)


async def exited(backend: DockerBackend) -> Seen:
    found: list[Seen] = []

    async def look() -> bool:
        found[:] = [seen for seen in await backend.list(NODE) if seen.state == "exited"]
        return bool(found)

    await until_awaited(look)
    return found[0]


# --- what the engine was told ---


async def test_a_container_has_exactly_the_limits_that_were_asked(
    options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    told = options.model_copy(update={"volumes": {"models": str(tmp_path / "models")}, "pids": 123})
    volume = {"source": "models", "target": "/models"}
    asked = spec(cpu=250, memory=64, shm_mib=16, user="1000:1000", volumes=(volume,), devices=("CPU-m-0",), gpu={})
    await make(told).start(asked)
    found = inspect(engine_name(options))
    host = found["HostConfig"]
    assert 0.25 == host["CpuQuota"] / host["CpuPeriod"]
    assert (64 << 20, 64 << 20, 16 << 20, 123, "0") == tuple(
        host[name] for name in ("Memory", "MemorySwap", "ShmSize", "PidsLimit", "CpusetCpus")
    )
    assert {"/models": False, "/run/laxity/ring": True} == {m["Destination"]: m["RW"] for m in found["Mounts"]}
    assert "1000" == docker("exec", engine_name(options), "id", "-u")
    docker("exec", engine_name(options), "sh", "-c", "echo x > /run/laxity/ring/x")
    assert ["x"] == [path.read_text().strip() for path in (tmp_path / "rings").rglob("x")]


async def test_a_container_is_known_by_its_labels(options: DockerOptions, make: Make) -> None:
    await make(options).start(spec())
    labels = inspect(engine_name(options))["Config"]["Labels"]
    assert spec().labels == ContainerLabels.from_json(labels[LABELS].encode())
    assert (options.scope, NODE, BOX) == tuple(labels[f"laxity.{name}"] for name in ("scope", "node", "container"))


async def test_a_container_gains_no_privileges(options: DockerOptions, make: Make) -> None:
    await make(options).start(spec())
    host = inspect(engine_name(options))["HostConfig"]
    assert (False, ["ALL"], ["no-new-privileges:true"], "no") == (
        host["Privileged"],
        host["CapDrop"],
        host["SecurityOpt"],
        host["RestartPolicy"]["Name"],
    )
    status = docker("exec", engine_name(options), "cat", "/proc/1/status").splitlines()
    words = dict(line.split(":", 1) for line in status if ":" in line)
    assert ("0" * 16, "1", "2") == tuple(words[name].strip() for name in ("CapEff", "NoNewPrivs", "Seccomp"))


async def test_a_read_only_container_writes_to_tmp_only(options: DockerOptions, make: Make) -> None:
    backend = make(options.model_copy(update={"read_only": True}))
    await backend.start(spec("sh", "-c", "echo x > /tmp/x && ! echo x > /x"))
    assert 0 == (await exited(backend)).exit_code


async def test_a_port_is_published_on_this_machine_only(options: DockerOptions, make: Make) -> None:
    await make(options.model_copy(update={"network": "default"})).start(spec(ports=(47_321,)))
    assert "127.0.0.1:47321" == docker("port", engine_name(options), "47321/tcp")


async def test_a_secret_reaches_the_container_and_nothing_else(
    options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "token").write_text("hunter2\n")
    (tmp_path / "secrets" / "token").chmod(0o600)
    backend = make(options.model_copy(update={"secrets_dir": tmp_path / "secrets"}))
    await backend.start(spec(env={"TOKEN": {"secret": "token"}}))
    assert "hunter2" == docker("exec", engine_name(options), "sh", "-c", "echo $TOKEN")
    assert "hunter2" not in repr(await backend.list(NODE))
    assert "hunter2" not in "".join(file.read_text() for file in (tmp_path / "rings").rglob("*.json"))


async def test_limits_can_be_changed_while_it_runs(options: DockerOptions, make: Make) -> None:
    backend = make(options)
    await backend.start(spec(cpu=250, memory=64))
    pid = inspect(engine_name(options))["State"]["Pid"]
    await backend.resize(NODE, BOX, cpu_milli=500, memory_mib=128)
    found = inspect(engine_name(options))
    host = found["HostConfig"]
    assert (0.5, 128 << 20, 128 << 20) == (host["CpuQuota"] / host["CpuPeriod"], host["Memory"], host["MemorySwap"])
    assert pid == found["State"]["Pid"]
    with pytest.raises(BackendError, match="is not on"):
        await backend.resize(NODE, "unknown", cpu_milli=500)


async def start_with_gpus(backend: DockerBackend, asked: StartSpec) -> None:
    try:
        await backend.start(asked)
    except BackendError as error:
        if NO_HOOK in str(error):
            pytest.skip("the engine serves no GPUs, and has no nvidia-container-runtime-hook on its PATH")
        raise


# --- starts that fail, and names that are taken ---


async def test_D11_a_start_that_fails_leaves_nothing(options: DockerOptions, make: Make, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no-such-command"):
        await make(options).start(spec("no-such-command"))
    assert [] == there(options)
    assert [] == list((tmp_path / "rings").iterdir())


async def test_a_missing_image_is_told_by_its_name(options: DockerOptions, make: Make) -> None:
    with pytest.raises(BackendError, match=r"laxity-none:1 is not on"):
        await make(options).start(spec(image="laxity-none:1"))
    pulling = make(options.model_copy(update={"pull": "missing"}))
    with pytest.raises(BackendError, match=r"refused"):
        await pulling.start(spec(image="127.0.0.1:1/laxity-none:1"))
    assert [] == there(options)


async def test_an_image_that_is_there_is_not_pulled(options: DockerOptions, make: Make) -> None:
    assert "running" == (await make(options.model_copy(update={"pull": "missing"})).start(spec(image=IMAGE))).state


async def test_more_than_the_engine_can_give_is_refused_with_its_words(options: DockerOptions, make: Make) -> None:
    with pytest.raises(BackendError, match="memory"):
        await make(options).start(spec(memory=1))
    assert [] == there(options)


async def test_what_a_dead_placer_made_and_did_not_start_is_replaced(options: DockerOptions, make: Make) -> None:
    body = create_body(spec(), options, None)["Labels"]
    labels = [word for name, value in body.items() for word in ("--label", f"{name}={value}")]
    docker("create", "--name", engine_name(options), *labels, IMAGE, *SLEEP)
    before = inspect(engine_name(options))["Id"]
    backend = make(options.model_copy(update={"left_after_us": 1_000_000}))
    assert [] == await backend.list(NODE)
    assert before == inspect(engine_name(options))["Id"]  # somebody may be about to start it
    assert "running" == (await backend.start(spec())).state
    assert before != inspect(engine_name(options))["Id"]


async def test_a_slow_start_of_another_placer_is_waited_for(options: DockerOptions, make: Make) -> None:
    impatient = options.model_copy(update={"left_after_us": 100_000})
    asked = spec("sh", "-c", "echo run; exit 4", devices=("GPU-slow",), gpu={})
    slow = asyncio.create_task(start_with_gpus(make(options), asked))
    await until(lambda: there(options) != [])
    other = make(impatient)
    await asyncio.gather(*(other.start(asked) for _ in range(3)), *(other.list(NODE) for _ in range(3)))
    await slow
    assert 4 == (await exited(other)).exit_code
    assert "run" == docker("logs", engine_name(options))


async def test_what_a_dead_placer_made_is_removed_where_nobody_starts_it(options: DockerOptions, make: Make) -> None:
    body = create_body(spec(), options, None)["Labels"]
    labels = [word for name, value in body.items() for word in ("--label", f"{name}={value}")]
    docker("create", "--name", engine_name(options), *labels, IMAGE, *SLEEP)
    backend = make(options.model_copy(update={"left_after_us": 300_000}))

    async def gone() -> bool:
        return await backend.list(NODE) == [] and there(options) == []

    await until_awaited(gone)


async def test_a_name_that_something_else_left_behind_is_freed(options: DockerOptions, make: Make) -> None:
    docker("create", "--name", engine_name(options), IMAGE, *SLEEP)
    assert "running" == (await make(options).start(spec())).state
    assert [engine_name(options)] == there(options)


async def test_a_name_of_something_that_runs_and_is_not_ours_is_left_alone(options: DockerOptions, make: Make) -> None:
    foreign = docker("run", "-d", "--name", engine_name(options), IMAGE, *SLEEP)
    backend = make(options)
    try:
        with pytest.raises(BackendError, match="not ours"):
            await backend.start(spec())
        await backend.stop(NODE, BOX)
        await backend.remove(NODE, BOX)
        assert inspect(foreign)["State"]["Running"]
    finally:
        docker("rm", "-f", foreign)


async def test_labels_that_were_spoiled_are_shown_as_such_and_left_alone(options: DockerOptions, make: Make) -> None:
    scope = f"laxity.scope={options.scope}"
    docker("run", "-d", "--name", engine_name(options), "--label", scope, "--label", f"{LABELS}=x", IMAGE, *SLEEP)
    (seen,) = await make(options).list(NODE)
    assert (None, "running", engine_name(options)) == (seen.labels, seen.state, seen.container)


async def test_a_start_that_is_cancelled_leaves_nothing_or_what_runs(options: DockerOptions, make: Make) -> None:
    backend = make(options)
    for pause_s in (0.0, 0.02, 0.05, 0.1, 0.2):
        task = asyncio.create_task(backend.start(spec()))
        await asyncio.sleep(pause_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.stop(NODE, BOX)
        assert [] == await backend.list(NODE)
    assert "running" == (await backend.start(spec())).state


# --- ends ---


async def test_a_container_that_takes_too_much_memory_is_seen_as_killed(options: DockerOptions, make: Make) -> None:
    backend = make(options)
    async with watched(backend) as posts:
        await backend.start(spec("python", "-c", "bytearray(1 << 30)", memory=16))
        await until(lambda: bool(posts))
    assert [("exited", 137, Cause("OOMKilled"))] == [(seen.state, seen.exit_code, seen.cause) for seen in posts]


async def test_one_that_exits_at_once_runs_once_and_its_code_is_seen(options: DockerOptions, make: Make) -> None:
    one, other = make(options), make(options)
    asked = spec("sh", "-c", "echo run; exit 4")
    async with watched(one) as posts:
        await asyncio.gather(*(backend.start(asked) for backend in [one, other] * 3))
        await until(lambda: bool(posts))
        await asyncio.gather(*(backend.start(asked) for backend in [one, other]))
    assert [4] == [seen.exit_code for seen in posts]
    assert "run" == docker("logs", engine_name(options))


async def test_one_that_ignores_a_polite_stop_is_killed(options: DockerOptions, make: Make) -> None:
    backend = make(options)
    await backend.start(spec("sh", "-c", "trap '' TERM; while :; do sleep 1; done"))
    await backend.stop(NODE, BOX)
    assert [] == there(options)


async def test_one_that_is_paused_is_stopped_too(options: DockerOptions, make: Make) -> None:
    backend = make(options)
    await backend.start(spec())
    docker("pause", engine_name(options))
    assert ["running"] == [seen.state for seen in await backend.list(NODE)]
    await backend.stop(NODE, BOX)
    assert [] == there(options)


# --- engines that misbehave ---


async def test_D6_D7_a_cut_stream_of_events_is_followed_by_another(
    options: DockerOptions, make: Make, proxy: Proxy, tmp_path: Path
) -> None:
    backend = make(through(options, tmp_path, rescan_us=600_000_000))
    direct = make(options)
    async with watched(backend) as posts:
        for number in range(1, 4):
            await until(lambda number=number: proxy.streams == number)  # type: ignore[misc]
            await direct.start(spec("sh", "-c", f"exit {number}", container=f"box-{number}"))
            await until(lambda number=number: len(posts) == number)  # type: ignore[misc]
            proxy.cut()
    assert [1, 2, 3] == [seen.exit_code for seen in posts]


async def test_an_end_while_nothing_listened_is_posted_afterwards(
    options: DockerOptions, make: Make, proxy: Proxy, tmp_path: Path
) -> None:
    backend = make(through(options, tmp_path, rescan_us=600_000_000, call_timeout_us=300_000))
    direct = make(options)
    async with watched(backend) as posts:
        await until(lambda: proxy.streams == 1)
        proxy.silent = True
        proxy.cut()
        await direct.start(spec("true"))
        await exited(direct)
        assert [] == posts
        proxy.silent = False
        await until(lambda: len(posts) == 1)


async def test_D8_an_engine_that_does_not_answer_is_an_error_in_time(
    options: DockerOptions, make: Make, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.silent = True
    backend = make(through(options, tmp_path, call_timeout_us=200_000, start_timeout_us=200_000))
    for call in (backend.start(spec()), backend.stop(NODE, BOX), backend.list(NODE), backend.remove(NODE, BOX)):
        before = time.monotonic()
        with pytest.raises(BackendError, match="does not answer in time"):
            await call
        assert time.monotonic() - before < 5
    await until(lambda: proxy.open == 0)


async def test_an_engine_that_is_not_there_is_an_error(options: DockerOptions, make: Make, tmp_path: Path) -> None:
    backend = make(options.model_copy(update={"engines": {"*": DockerEngine(url=f"unix://{tmp_path}/none")}}))
    with pytest.raises(BackendError, match="is not reached"):
        await backend.list(NODE)
    only = make(options.model_copy(update={"engines": {"gpu-*": DockerEngine(url=engine_url())}}))
    with pytest.raises(BackendError, match="no engine"):
        await only.list(NODE)


async def test_no_connection_is_left_over(options: DockerOptions, make: Make, proxy: Proxy, tmp_path: Path) -> None:
    backend = make(through(options, tmp_path))
    async with watched(backend) as posts:
        for number in range(3):
            await backend.start(spec("false", container=f"box-{number}"))
            with pytest.raises(BackendError):
                await backend.start(spec("no-such-command", container=f"bad-{number}"))
            await until(lambda number=number: len(posts) == number + 1)  # type: ignore[misc]
            await backend.remove(NODE, f"box-{number}")
        cancelled = asyncio.create_task(backend.start(spec()))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await backend.stop(NODE, BOX)
        await until(lambda: proxy.open == 1)  # the stream of events
    await until(lambda: proxy.open == 0)
