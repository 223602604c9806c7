"""A remote engine, reached by TLS: certificates of both sides, two engines at once, and rings on a machine whose files
the placer does not see. The engine is the test's own, in a network of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.monitor.rings import RingDirectory
from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.docker import DockerBackend
from services.placer.backends.docker_options import DockerEngine, DockerOptions
from shared.errors import BackendError, FieldError
from shared.messages import ContainerLabels, PlaceRequest, Reservation
from shared.testing.wait import eventually, until
from tests.backends import watched
from tests.docker.certificates import Authority
from tests.docker.engine import IMAGE, OwnEngine
from tests.docker.relay import relayed
from tests.docker_engine import IMAGE as OTHER_IMAGE
from tests.docker_engine import docker, docker_options, engine_url

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

FAR, NEAR = "gpu-1", "near-1"
INSIDE_PORT = 2376
"""Of a network namespace in which nobody else listens."""
BOX = "laxity-0123456789abcdef01234567"


@dataclass
class Far:
    """The remote engine, and who may use it."""

    engine: OwnEngine
    port: int
    certificates: Authority
    root: Path
    """Where containers of it put their rings."""

    def where(self, tls: Path | None = None, *, host: str = "127.0.0.1") -> DockerEngine:
        tls = tls or self.certificates.folder / "client"
        return DockerEngine(url=f"https://{host}:{self.port}", tls=tls, ring_root=self.root)

    def names(self) -> list[str]:
        return [found["Names"][0].lstrip("/") for found in self.engine.containers()]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OwnEngine, Authority]]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder / "ca")
    authority.signed("client")
    server = authority.signed("server")
    files = ("--tlscacert", server / "ca.pem", "--tlscert", server / "cert.pem", "--tlskey", server / "key.pem")
    listens = ("-H", f"tcp://127.0.0.1:{INSIDE_PORT}", "--tlsverify", *map(str, files))
    with OwnEngine(folder / "engine", *listens) as engine:
        yield engine, authority


@pytest.fixture
async def far(running: tuple[OwnEngine, Authority], tmp_path: Path) -> AsyncIterator[Far]:
    engine, authority = running
    async with relayed(engine.pid, INSIDE_PORT) as port:
        yield Far(engine, port, authority, tmp_path / "far-rings")
        if left := engine.docker("ps", "-aq").split():
            engine.docker("rm", "-f", *left)


Make = Callable[..., DockerBackend]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[DockerBackend] = []

    def backend(engines: dict[str, DockerEngine], **more: Any) -> DockerBackend:
        options = DockerOptions(engines=engines, image=IMAGE, pull="never", network="none", stop_grace_us=200_000)
        made.append(DockerBackend(options.model_copy(update=more), tmp_path / "near-rings"))
        return made[-1]

    yield backend
    for each in made:
        await each.close()


def spec(*command: str, node: str = FAR, container: str = BOX, **asked: Any) -> StartSpec:
    request = PlaceRequest.model_validate({"command": command or ("sleep", "60"), **asked})
    held = Reservation(
        request_id="r",
        replica=0,
        generation=1,
        devices=(),
        share_micro=0,
        device_memory_mib=0,
        cpu_milli=0,
        memory_mib=0,
    )
    return StartSpec(ContainerLabels(container=container, ledger_id="l", node=node, reservation=held), request)


# --- certificates ---


async def test_a_container_lives_its_life_on_an_engine_that_is_reached_by_tls(far: Far, make: Make) -> None:
    backend = make({"*": far.where()})
    async with watched(backend) as posts:
        assert "running" == (await backend.start(spec())).state
        assert [BOX] == far.names() == [seen.container for seen in await backend.list(FAR)]
        await backend.start(spec("sh", "-c", "exit 7", container="short"))
        await until(lambda: [7] == [seen.exit_code for seen in posts])
        await backend.remove(FAR, "short")
        await backend.stop(FAR, BOX)
    assert [] == far.names()


async def refused(far: Far, backend: DockerBackend) -> str:
    """The reason; nothing was started."""
    with pytest.raises(BackendError) as raised:
        await backend.start(spec())
    assert [] == far.names()
    return str(raised.value)


async def test_who_has_no_certificate_of_the_engines_authority_is_refused_and_told_so(
    far: Far, make: Make, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "foreign").signed("client")
    shutil.copy(far.certificates.folder / "ca.pem", foreign / "ca.pem")
    why = await refused(far, make({"*": far.where(foreign)}))
    assert f"engine https://127.0.0.1:{far.port} is not reached" in why
    assert "alert" in why.lower()


async def test_an_engine_that_another_authority_vouches_for_is_not_spoken_to(
    far: Far, make: Make, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "foreign").signed("client")
    assert "certificate verify failed" in await refused(far, make({"*": far.where(foreign)}))
    without = far.where().model_copy(update={"tls": None})
    assert "certificate verify failed" in await refused(far, make({"*": without}))


async def test_an_engine_under_a_name_that_its_certificate_does_not_have_is_not_spoken_to(far: Far, make: Make) -> None:
    assert "localhost" in await refused(far, make({"*": far.where(host="localhost")}))


async def test_plain_words_to_an_engine_that_wants_tls_are_an_error_with_its_answer(far: Far, make: Make) -> None:
    why = await refused(far, make({"*": DockerEngine(url=f"tcp://127.0.0.1:{far.port}")}))
    assert "HTTPS" in why


def _without(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _spoil(folder: Path, name: str) -> None:
    (folder / name).write_text("no certificate")


def _folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def _open_to_all(folder: Path, name: str) -> None:
    (folder / name).chmod(0o644)


@pytest.mark.parametrize(
    ("harm", "name", "told"),
    [
        (_without, "ca.pem", "No such file"),
        (_without, "cert.pem", "No such file"),
        (_without, "key.pem", "No such file"),
        (_folder, "key.pem", "Is a directory"),
        (_spoil, "ca.pem", "no certificate"),
        (_spoil, "key.pem", "PEM"),
        (_open_to_all, "key.pem", "mode 644"),
    ],
)
def test_certificates_that_cannot_be_used_are_told_at_the_start_by_their_path(
    tmp_path: Path, harm: Callable[[Path, str], None], name: str, told: str
) -> None:
    folder = Authority(tmp_path / "ca").signed("client")
    harm(folder, name)
    options = DockerOptions(engines={"*": DockerEngine(url="https://e:2376", tls=folder)})
    with pytest.raises(FieldError) as raised:
        DockerBackend(options, tmp_path)
    assert f"{folder / name}" in str(raised.value)
    assert told in str(raised.value)


def test_a_placer_whose_certificates_are_missing_ends_at_once_and_says_where_it_looked(tmp_path: Path) -> None:
    options = DockerOptions(engines={"*": DockerEngine(url="https://e:2376", tls=tmp_path / "nowhere")})
    env = {"LAXITY_PLACER_BACKENDS": '{"*": "docker"}', "LAXITY_PLACER_DOCKER": options.model_dump_json()}
    command = [sys.executable, "-m", "services.placer"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"{tmp_path}/nowhere/ca.pem: No such file or directory" in done.stderr


# --- two engines ---


async def test_two_engines_run_the_containers_of_their_own_nodes_only(far: Far, make: Make, tmp_path: Path) -> None:
    near = docker_options(tmp_path)
    backend = make({"gpu-*": far.where(), "*": DockerEngine(url=engine_url())}, scope=near.scope)
    name = f"{near.scope}.{BOX}"
    try:
        async with watched(backend) as posts:
            await asyncio.gather(
                backend.start(spec()), backend.start(spec(node=NEAR, image=OTHER_IMAGE)), _ended(backend, NEAR)
            )
            assert [(FAR, BOX)] == [(seen.node, seen.container) for seen in await backend.list(FAR)]
            assert {(NEAR, BOX), (NEAR, "ended")} == {(s.node, s.container) for s in await backend.list(NEAR)}
            assert [name] == far.names()
            await until(lambda: [NEAR] == [seen.node for seen in posts])
            await backend.stop(FAR, BOX)
            await until(lambda: {FAR, NEAR} == {seen.node for seen in posts})
        assert [] == far.names()
        assert name in docker("ps", "--filter", f"label=laxity.scope={near.scope}", "--format", "{{.Names}}").split()
        await backend.stop(NEAR, BOX)
    finally:
        if left := docker("ps", "-aq", "--filter", f"label=laxity.scope={near.scope}").split():
            docker("rm", "-f", *left)


async def _ended(backend: DockerBackend, node: str) -> None:
    await backend.start(spec("true", node=node, container="ended", image=OTHER_IMAGE))


# --- rings on a machine whose files are not ours ---


def files(folder: Path) -> set[str]:
    """Names of a container's ring folder on the engine's machine."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_ring_folder_there_has_the_labels_and_any_user_may_write_into_it(
    far: Far, make: Make, read_only: bool
) -> None:
    backend = make({"*": far.where()}, read_only=read_only)
    await backend.start(spec("sh", "-c", "echo x >$LAXITY_RING_DIR/x; sleep 60", user="1000:1000"))
    folder = far.root / BOX
    await until(lambda: files(folder) == {"container.json", "x"})
    assert spec().labels == ContainerLabels.from_json((folder / "container.json").read_bytes())
    assert not (far.root.parent / "near-rings").exists()


async def test_the_monitor_there_knows_the_container_and_removes_its_folder_once_it_is_stopped(
    far: Far, make: Make
) -> None:
    backend, monitor = make({"*": far.where()}), RingDirectory(far.root)
    await backend.start(spec("sh", "-c", "trap '' TERM; echo x >$LAXITY_RING_DIR/x; while :; do sleep 1; done"))
    await until(lambda: "x" in files(far.root / BOX))
    monitor.scan()
    assert ({}, {"container.json", "x"}) == (monitor.counts, files(far.root / BOX))
    await backend.stop(FAR, BOX)
    assert "ended" in files(far.root / BOX)
    await backend.stop(FAR, BOX)
    await until(lambda: _scanned(monitor) == [])
    monitor.close()


def _scanned(monitor: RingDirectory) -> list[str]:
    monitor.scan()
    return sorted(path.name for path in monitor._listing.path.iterdir())


async def ends_by_itself(backend: DockerBackend) -> None:
    await backend.start(spec("true"))
    await eventually(lambda: exited(backend))
    await backend.remove(FAR, BOX)


async def fails_to_start(backend: DockerBackend) -> None:
    with pytest.raises(BackendError, match="no-such-command"):
        await backend.start(spec("no-such-command"))


async def exited(backend: DockerBackend) -> Seen | None:
    return next((seen for seen in await backend.list(FAR) if seen.state == "exited"), None)


@pytest.mark.parametrize("end", [ends_by_itself, fails_to_start])
async def test_a_ring_folder_is_left_to_the_monitor_there_however_its_container_ends(
    far: Far, make: Make, end: Callable[[DockerBackend], Awaitable[None]]
) -> None:
    await end(make({"*": far.where()}))
    assert {"container.json", "ended"} == files(far.root / BOX)
    assert [] == far.names()


async def test_a_remote_engine_without_a_ring_root_gets_no_folder(far: Far, make: Make) -> None:
    backend = make({"*": far.where().model_copy(update={"ring_root": None})})
    await backend.start(spec())
    assert [] == far.engine.containers()[0]["Mounts"]
    await backend.stop(FAR, BOX)
    assert not far.root.exists()
