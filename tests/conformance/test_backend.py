"""What every backend must do, run on each: one behaviour, whether it is played, a process, or an engine's container."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.base import Backend, Seen, StartSpec
from services.placer.backends.docker import DockerBackend
from services.placer.backends.fake import FakeBackend
from services.placer.backends.kubernetes import KubernetesBackend
from services.placer.backends.process import ProcessBackend, ProcessOptions
from shared.errors import BackendError
from shared.messages.ledger import ContainerLabels, Reservation
from shared.messages.place import Gpu, Kind, PlaceRequest, Realtime, Secret
from shared.units import cpu_milli, memory_mib
from tests.backends import watched
from tests.docker_engine import docker_options, engine_url, inspect
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.node import Machine
from tests.kubernetes.played import PlayedKubelet
from tests.kubernetes.pods import kubernetes_options, pods_in, secret

NODE = "node-1"
BOX = "laxity-0123456789abcdef01234567"
PLAYED = "played-1"
LIMIT_S = 15
LIMITS = {"cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.max", "memory.limit_in_bytes"}
HOSTILE = ["a b", "../../escape", "a.*.>", ".", "..", "-rf", "ü/\u202e", "line\nbreak", "." * 253, "x" * 253]
REALTIME = Realtime(deadline_us=50_000, period_us=100_000, runtime_us=12_000, kind=Kind.FIRM)


class Cluster:
    """One place where containers run, and as many placers' backend objects on it as a test asks for."""

    def __init__(self, kind: str, folder: Path, kube: KubeCluster | None = None) -> None:
        self.kind = kind
        self.rings = folder / "rings"
        self.any_node = kube is None
        """Whether a node may have any name."""
        self._folder = folder
        self._kube = kube
        self._closing: list[DockerBackend | KubernetesBackend] = []

    def backend(self) -> Backend:
        if self.kind == "docker":
            # no engine has these devices; the engine's path of device requests has tests of its own
            options = docker_options(self._folder).model_copy(update={"stop_grace_us": 200_000, "gpus": False})
            return self._closed_later(DockerBackend(options, self.rings))
        if self._kube is not None:
            return self._closed_later(KubernetesBackend(kubernetes_options(self._kube, self._folder)))
        if self.kind == "fake":
            return FakeBackend(self._folder / "state", self.rings, stop_grace_us=200_000)
        options = ProcessOptions(stop_grace_us=200_000)
        return ProcessBackend(self._folder / "state", self.rings, options, work_dir=self._folder)

    def _closed_later(self, backend: DockerBackend | KubernetesBackend) -> Backend:
        self._closing.append(backend)
        return backend

    def runs(self) -> int:
        """How many times a command made by ``spec`` was executed; the fake executes none."""
        log = self._folder / "runs"
        return len(log.read_text().splitlines()) if log.exists() else 0

    async def close(self) -> None:
        for backend in self._closing:
            await backend.close()

    def labels_for_monitor(self) -> ContainerLabels:
        """As they lie beside the ring of the only container; where no kubelet is real, what it would write there."""
        if self._kube is None:
            (file,) = self.rings.rglob("container.json")
            return ContainerLabels.from_json(file.read_bytes())
        metadata = self._pod()["metadata"]
        if self.kind == "kubelet":
            assert self._kube.machine is not None
            volumes = self._kube.machine.folder / "kubelet" / "pods" / metadata["uid"] / "volumes"
            assert (volumes / "kubernetes.io~empty-dir" / "laxity-ring").is_dir()
            file = volumes / "kubernetes.io~downward-api" / "laxity-labels" / "container.json"
            return ContainerLabels.from_json(file.read_bytes())
        return ContainerLabels.from_json(metadata["annotations"]["laxity.dev/labels"].encode())

    def _pod(self) -> dict[str, Any]:
        assert self._kube is not None
        (pod,) = pods_in(self._kube, kubernetes_options(self._kube, self._folder).namespace)
        return pod

    def limits(self) -> tuple[int | None, int | None] | None:
        """What BOX may use now, as whoever enforces it has it: milli CPU and MiB; None where nothing enforces it."""
        if self.kind == "docker":
            host = inspect(f"{docker_options(self._folder).scope}.{BOX}")["HostConfig"]
            return host["CpuQuota"] * 1000 // host["CpuPeriod"], host["Memory"] >> 20
        if self._kube is not None:
            pod = self._pod()
            if self.kind == "kubelet":
                assert self._kube.machine is not None
                return self._kube.machine.limits(pod["metadata"]["uid"])
            said = pod["status"]["containerStatuses"][0]["resources"]["limits"]
            return cpu_milli(said["cpu"]), memory_mib(said["memory"])
        if self.kind == "fake":
            (file,) = (self._folder / "state").rglob("*.json")
            held = json.loads(file.read_bytes())["labels"]["reservation"]
            return held["cpu_milli"], held["memory_mib"]
        plan = json.loads((self._folder / "state" / BOX / "start.json").read_bytes())
        if any(text.startswith("not applied") for text in plan["limits"].values()):
            return None
        files = [file for group in plan["groups"] for file in Path(group).iterdir() if file.name in LIMITS]
        found = {file.name: file.read_text() for file in files}
        quota, period = found.get("cpu.max", "").split() or (found["cpu.cfs_quota_us"], found["cpu.cfs_period_us"])
        memory = found.get("memory.max") or found["memory.limit_in_bytes"]
        return int(quota) * 1000 // int(period), int(memory) >> 20

    def entries(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()}


KUBERNETES = [pytest.mark.kubernetes, pytest.mark.timeout(240)]


@pytest.fixture(
    params=[
        "fake",
        "process",
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("kubernetes", marks=KUBERNETES),
        pytest.param("kubelet", marks=KUBERNETES),
    ]
)
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """``kubernetes`` is a real API server with a kubelet that is played, ``kubelet`` has a real one too."""
    with ExitStack() as stack:
        kube = None
        if request.param == "docker":
            engine_url()
        if request.param in {"kubernetes", "kubelet"}:
            kube = request.getfixturevalue("kube")
            monkeypatch.setattr(f"{__name__}.NODE", on_kubernetes(request, kube, stack))
            secret(kube, kubernetes_options(kube, tmp_path).namespace, "vault", token="t")
        cluster = Cluster(request.param, tmp_path, kube)
        yield cluster
        backend = cluster.backend()
        for node in [NODE, *(HOSTILE if cluster.any_node else ())]:
            for seen in await backend.list(node):
                await backend.stop(seen.node, seen.container)
        await cluster.close()


def on_kubernetes(request: pytest.FixtureRequest, kube: KubeCluster, stack: ExitStack) -> str:
    """The name of the node that runs its pods."""
    if request.param == "kubelet":
        machine: Machine = request.getfixturevalue("machine")
        return machine.name
    kube.add_node(PLAYED)
    stack.callback(kube.admin.delete, f"/api/v1/nodes/{PLAYED}")
    stack.enter_context(PlayedKubelet(kube, PLAYED))
    return PLAYED


def spec(
    container: str = BOX,
    node: str | None = None,
    *,
    exits_after_s: float | None = None,
    code: int = 0,
    stubborn: bool = False,
    fails: bool = False,
    generation: int = 1,
    cpu_milli: int = 0,
    memory_mib: int = 0,
) -> StartSpec:
    """The same container for every backend: a command for those that run one, FAKE_… for the one that does not."""
    env: dict[str, str | Secret] = {}
    wait = "exec sleep 60"
    if exits_after_s is not None:
        env |= {"FAKE_EXIT_AFTER_US": str(int(exits_after_s * 1e6)), "FAKE_EXIT_CODE": str(code)}
        wait = f"sleep {exits_after_s}; exit {code}"
    if stubborn:
        env["FAKE_IGNORE_TERM"] = "1"
        wait = f"trap '' TERM; {wait}"
    if fails:
        env["FAKE_START_FAILS"] = "always"
    command = ("no-such-command",) if fails else ("sh", "-c", f"echo run >> runs; {wait}")
    request = PlaceRequest(command=command, env=env, gpu=Gpu(share=0.5), realtime=REALTIME)
    held = Reservation(
        request_id="detector-7f3a",
        replica=0,
        generation=generation,
        devices=("GPU-5f1",),
        share_micro=500_000,
        device_memory_mib=0,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
        realtime=REALTIME,
    )
    labels = ContainerLabels(
        container=container, ledger_id="ledger", node=node or NODE, reservation=held, name="detector"
    )
    return StartSpec(labels, request)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < give_up, "what the test waits for did not happen"
        await asyncio.sleep(0.01)


async def exited(backend: Backend, container: str = BOX) -> Seen:
    found: list[Seen] = []

    async def look() -> bool:
        found[:] = [s for s in await backend.list(NODE) if s.container == container and s.state == "exited"]
        return bool(found)

    await until(look)
    return found[0]


async def first(posts: list[Seen]) -> Seen:
    async def any_post() -> bool:
        return bool(posts)

    await until(any_post)
    return posts[0]


async def test_a_started_container_is_listed_as_running_with_its_labels(cluster: Cluster) -> None:
    backend = cluster.backend()
    started = await backend.start(spec())
    (seen,) = await backend.list(NODE)
    assert (NODE, BOX, "running", None) == (seen.node, seen.container, seen.state, seen.exit_code)
    assert spec().labels == seen.labels
    assert started == seen
    assert [] == await backend.list("node-2")


async def test_a_glance_shows_what_a_list_shows_or_nothing_is_known_without_asking(cluster: Cluster) -> None:
    backend = cluster.backend()
    await backend.start(spec())
    ended = await backend.start(spec("ended", exits_after_s=0, code=3))

    async def both() -> bool:
        listed, glanced = await backend.list(NODE), await backend.glance(NODE)
        over = [seen.exit_code for seen in listed if seen.container == ended.container] == [3]
        return over and (glanced is None or sorted(glanced, key=repr) == sorted(listed, key=repr))

    await until(both)
    assert not await backend.glance("node-2")


async def test_labels_lie_beside_the_ring_for_the_monitor(cluster: Cluster) -> None:
    await cluster.backend().start(spec())
    assert spec().labels == cluster.labels_for_monitor()


async def test_labels_outlive_the_placer_that_wrote_them(cluster: Cluster) -> None:
    await cluster.backend().start(spec())
    (seen,) = await cluster.backend().list(NODE)
    assert spec().labels == seen.labels


async def test_a_second_start_finds_the_first(cluster: Cluster) -> None:
    backend = cluster.backend()
    once = await backend.start(spec())
    again = await backend.start(spec())
    other = await cluster.backend().start(spec())
    assert once == again == other
    assert 1 == len(await backend.list(NODE))


async def test_starts_at_the_same_time_by_two_placers_make_one_container(cluster: Cluster) -> None:
    one, other = cluster.backend(), cluster.backend()
    seen = await asyncio.gather(*(backend.start(spec()) for backend in [one, other] * 4))
    assert {"running"} == {s.state for s in seen}
    assert 1 == len(await one.list(NODE)) == len(await other.list(NODE))
    assert len({s.pid for s in seen}) == 1
    if cluster.kind == "process":

        async def ran() -> bool:
            return cluster.runs() > 0

        await until(ran)
        assert 1 == cluster.runs()


async def test_an_exited_container_does_not_run_again_in_its_generation(cluster: Cluster) -> None:
    backend = cluster.backend()
    await backend.start(spec(exits_after_s=0, code=3))
    await exited(backend)
    runs = cluster.runs()
    again = await cluster.backend().start(spec(exits_after_s=0, code=3))
    assert ("exited", 3) == (again.state, again.exit_code)
    assert runs == cluster.runs()


async def test_a_start_that_fails_says_why_and_leaves_nothing(cluster: Cluster) -> None:
    backend = cluster.backend()
    with pytest.raises(BackendError, match=r"no-such-command|FAKE_START_FAILS"):
        await backend.start(spec(fails=True))
    assert [] == await backend.list(NODE)
    assert [] == [p for p in cluster.rings.rglob("*") if p.is_file()]
    assert "running" == (await backend.start(spec())).state


async def test_a_stopped_container_is_gone_and_forgotten(cluster: Cluster) -> None:
    backend = cluster.backend()
    await backend.start(spec())
    await backend.stop(NODE, BOX)
    assert [] == await backend.list(NODE)
    assert [] == await cluster.backend().list(NODE)


async def test_stopping_again_or_what_is_unknown_or_exited_is_no_error(cluster: Cluster) -> None:
    backend = cluster.backend()
    await backend.stop(NODE, "never-seen")
    await backend.start(spec(exits_after_s=0))
    await exited(backend)
    await backend.stop(NODE, BOX)
    await backend.stop(NODE, BOX)
    assert [] == await backend.list(NODE)


async def test_two_placers_may_stop_the_same_at_once(cluster: Cluster) -> None:
    await cluster.backend().start(spec(stubborn=True))
    await asyncio.gather(*(cluster.backend().stop(NODE, BOX) for _ in range(4)))
    assert [] == await cluster.backend().list(NODE)


async def test_one_that_ignores_a_polite_stop_is_ended_after_the_grace(cluster: Cluster) -> None:
    backend = cluster.backend()
    await backend.start(spec(stubborn=True))
    if cluster.kind == "process":  # the trap must be set before TERM comes

        async def ran() -> bool:
            return cluster.runs() == 1

        await until(ran)
    before = time.monotonic()
    await backend.stop(NODE, BOX)
    assert time.monotonic() - before >= 0.19
    assert [] == await backend.list(NODE)


async def test_an_exit_is_posted_once_and_listed_with_its_code(cluster: Cluster) -> None:
    backend = cluster.backend()
    async with watched(backend) as posts:
        await backend.start(spec(exits_after_s=0.1, code=3))
        await backend.start(spec("beside-it"))
        posted = await first(posts)
        assert ("exited", 3, BOX, NODE) == (posted.state, posted.exit_code, posted.container, posted.node)
        assert posted == await exited(backend)
        await backend.start(spec("another", exits_after_s=0))

        async def second_post() -> bool:
            return len(posts) > 1

        await until(second_post)
        assert [BOX, "another"] == [post.container for post in posts]


async def test_another_placer_sees_the_exit_of_what_it_did_not_start(cluster: Cluster) -> None:
    adopting = cluster.backend()
    async with watched(adopting) as posts:
        await cluster.backend().start(spec(exits_after_s=0.2, code=7))
        assert 7 == (await first(posts)).exit_code
    assert 7 == (await exited(adopting)).exit_code


async def test_a_placer_that_comes_later_sees_an_exit_that_nobody_watched(cluster: Cluster) -> None:
    first_one = cluster.backend()
    await first_one.start(spec(exits_after_s=0, code=9))
    await exited(first_one)
    del first_one
    async with watched(cluster.backend()) as posts:
        posted = await first(posts)
    assert ("exited", 9, spec(exits_after_s=0, code=9).labels) == (posted.state, posted.exit_code, posted.labels)


async def test_a_removed_one_is_forgotten_and_a_running_one_kept(cluster: Cluster) -> None:
    backend = cluster.backend()
    await backend.start(spec(exits_after_s=0))
    await exited(backend)
    await backend.start(spec("still-running"))
    for container in [BOX, BOX, "still-running", "never-seen"]:
        await backend.remove(NODE, container)
    assert [("still-running", "running")] == [(s.container, s.state) for s in await backend.list(NODE)]


async def test_a_name_can_be_used_again_after_it_was_removed(cluster: Cluster) -> None:
    backend = cluster.backend()
    async with watched(backend) as posts:
        for count in (1, 2):
            await backend.start(spec(exits_after_s=0, code=count))

            async def posted(count: int = count) -> bool:
                return len(posts) == count

            await until(posted)
            await backend.remove(NODE, BOX)
        assert [1, 2] == [post.exit_code for post in posts]


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_only_names(cluster: Cluster, name: str) -> None:
    if cluster.kind == "kubelet" and name not in HOSTILE[:2]:
        pytest.skip("a pod's name is made before a kubelet hears of it: two are enough")
    backend = cluster.backend()
    node = name if cluster.any_node else NODE
    if not cluster.any_node:
        with pytest.raises(BackendError, match="node: found"):
            await backend.start(spec(name, node=name))
    await backend.start(spec(name, node=node))
    (seen,) = await cluster.backend().list(node)
    assert (node, name, "running") == (seen.node, seen.container, seen.state)
    assert {"state", "rings", "runs", "token"} >= cluster.entries()
    await backend.stop(node, name)
    assert [] == await backend.list(node)


async def test_many_containers_are_kept_apart(cluster: Cluster) -> None:
    backend = cluster.backend()
    names = {f"laxity-{number}" for number in range(12)}
    await asyncio.gather(*(backend.start(spec(name)) for name in names))
    assert names == {seen.container for seen in await backend.list(NODE)}
    await backend.stop(NODE, "laxity-3")
    assert names - {"laxity-3"} == {seen.container for seen in await backend.list(NODE)}
    await asyncio.gather(*(backend.stop(NODE, name) for name in names))
    assert [] == await backend.list(NODE)


async def test_a_running_container_gets_other_limits_and_goes_on(cluster: Cluster) -> None:
    backend = cluster.backend()
    started = await backend.start(spec(cpu_milli=250, memory_mib=64))
    if cluster.limits() is None:
        with pytest.raises(BackendError, match="started without a limit of"):
            await backend.resize(NODE, BOX, cpu_milli=500, memory_mib=128)
        return
    assert (250, 64) == cluster.limits()
    for size in [(500, 128), (500, 128), (1500, 96), (250, 192)]:  # again, then both ways at once
        await cluster.backend().resize(NODE, BOX, cpu_milli=size[0], memory_mib=size[1])
        assert size == cluster.limits()
    await backend.resize(NODE, BOX, cpu_milli=0, memory_mib=256)
    assert (250, 256) == cluster.limits()
    (seen,) = await backend.list(NODE)
    assert ("running", started.pid) == (seen.state, seen.pid)


async def test_an_unknown_container_cannot_be_resized(cluster: Cluster) -> None:
    with pytest.raises(BackendError, match="is not on"):
        await cluster.backend().resize(NODE, "never-seen", cpu_milli=500, memory_mib=64)


async def test_what_it_cannot_do_is_refused_and_not_left_out(cluster: Cluster) -> None:
    backend = cluster.backend()
    asked = spec()
    request = asked.request.model_copy(update={"env": {"TOKEN": Secret(secret="vault/token")}})
    if backend.capabilities.lacking(request) is None:
        assert "running" == (await backend.start(StartSpec(asked.labels, request))).state
        return
    with pytest.raises(BackendError, match="TOKEN"):
        await backend.start(StartSpec(asked.labels, request))
    assert [] == await backend.list(NODE)
