"""Images from a real registry that asks for a login: pulled, told about while it lasts, refused with its words."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from services.placer.backends.docker import DockerBackend
from services.placer.backends.docker_options import DockerOptions
from shared.errors import BackendError
from shared.testing.wait import until
from tests.docker.registry import PASSWORD, USER, Registry, logins
from tests.docker.relay import slowly
from tests.docker.test_docker_backend import BOX, NODE, engine_name, spec, there
from tests.docker_engine import docker, docker_options, inspect
from tests.integration import test_placer as placers

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]
stack = placers.stack
cluster = placers.cluster

TELLS = ("sh", "-c", "cat /says; sleep 60")
SIZED = re.compile(r"image \S+: (\S+) of (\d+) MiB, (\d) of 1 layers")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry") / "r") as running:
        yield running


@pytest.fixture
def options(tmp_path: Path) -> Iterator[DockerOptions]:
    made = docker_options(tmp_path).model_copy(update={"stop_grace_us": 100_000, "pull": "missing"})
    yield made
    if left := docker("ps", "-aq", "--filter", f"label=laxity.scope={made.scope}").split():
        docker("rm", "-f", *left)
    if pulled := docker("images", "-q", f"127.0.0.1:*/{made.scope}").split():
        docker("rmi", "-f", *pulled)


Make = Callable[[DockerOptions], DockerBackend]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[DockerBackend] = []

    def backend(options: DockerOptions) -> DockerBackend:
        made.append(DockerBackend(options, tmp_path / "rings"))
        return made[-1]

    yield backend
    for each in made:
        await each.close()


def with_login(options: DockerOptions, file: Path) -> DockerOptions:
    return options.model_copy(update={"auth_file": file})


async def says(options: DockerOptions, container: str = BOX) -> str:
    """What the image printed."""
    await until(lambda: docker("logs", engine_name(options, container)) != "")
    return docker("logs", engine_name(options, container))


async def refused(backend: DockerBackend, options: DockerOptions, image: str) -> str:
    """The reason; nothing is left of the try."""
    heard: list[str] = []
    asked = spec(*TELLS, image=image)
    with pytest.raises(BackendError) as raised:
        await backend.start(replace(asked, progress=heard.append))
    assert ([], "") == (there(options), docker("images", "-q", image))
    assert str(raised.value) == heard[-1]
    return str(raised.value)


async def test_without_a_login_or_with_a_wrong_one_the_registrys_words_are_the_reason(
    registry: Registry, options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    image = await asyncio.to_thread(registry.push, f"{options.scope}:1", "one")
    host = image.partition("/")[0]
    wrong = logins(tmp_path / "wrong.json", host, "hunter2")
    unknown = with_login(options, logins(tmp_path / "right.json", host))
    assert "cannot be pulled: manifest for" in await refused(make(unknown), options, f"{image}-none")
    for other in (options, with_login(options, logins(tmp_path / "elsewhere.json", "r.example:5000"))):
        assert "no basic auth credentials" in await refused(make(other), options, image)
    why = await refused(make(with_login(options, wrong)), options, image)
    assert f"image {image} cannot be pulled: unauthorized: authentication required" == why


async def test_logins_that_others_may_read_fail_the_start_before_anything_is_sent(
    registry: Registry, options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    image = await asyncio.to_thread(registry.push, f"{options.scope}:1", "one")
    file = logins(tmp_path / "logins.json", image.partition("/")[0])
    file.chmod(0o644)
    before = registry.log
    assert f"{file} has mode 644" in await refused(make(with_login(options, file)), options, image)
    assert before == registry.log


async def test_with_the_login_of_dockers_own_client_the_image_is_pulled_and_runs_and_nobody_learns_it(
    registry: Registry, options: DockerOptions, make: Make
) -> None:
    image = await asyncio.to_thread(registry.push, f"{options.scope}:1", "one")
    file = await asyncio.to_thread(registry.login) / "config.json"
    backend = make(with_login(options, file))
    heard: list[str] = []
    asked = spec(*TELLS, image=image)
    await backend.start(replace(asked, progress=heard.append))
    assert "one" == await says(options)
    assert f"image {image}: unknown size, unknown layers" == heard[0]
    assert re.fullmatch(rf"image {image}: .*, 1 of 1 layers, pulled", heard[-1])
    login = json.loads(file.read_bytes())["auths"][image.partition("/")[0]]["auth"]
    seen = repr((heard, await backend.list(NODE), inspect(engine_name(options))))
    assert [] == [text for text in (PASSWORD, login, USER) if text in seen]


async def test_all_who_wait_for_one_pull_hear_how_far_it_is_at_most_once_a_second(
    registry: Registry, options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    pushed = await asyncio.to_thread(lambda: registry.push(f"{options.scope}:1", "one", random_mib=24))
    loop = asyncio.get_running_loop()
    async with slowly(registry.port, 8) as port:
        image = pushed.replace(f":{registry.port}/", f":{port}/")
        backend = make(with_login(options, logins(tmp_path / "logins.json", f"127.0.0.1:{port}")))
        heard: dict[str, list[tuple[float, str]]] = {"a": [], "b": []}

        async def start(name: str) -> None:
            asked = spec(*TELLS, image=image, container=name)
            listen = heard[name]
            hear = lambda text: listen.append((loop.time(), text))  # noqa: E731
            await backend.start(replace(asked, progress=hear))

        await asyncio.gather(start("a"), start("b"))
        assert {"one"} == {await says(options, name) for name in heard}
    told = {name: [text for _, text in lines if "unknown layers" not in text] for name, lines in heard.items()}
    assert told["a"] == told["b"]  # but for the first: one may have come before the other
    sized = [found for text in told["a"] if (found := SIZED.match(text))]
    assert {24, 25} & {int(found[2]) for found in sized}
    between = [float(found[1]) for found in sized if 0 < float(found[1]) < int(found[2])]
    assert between == sorted(between) != []
    times = [at for at, _ in heard["a"]][:-1]
    assert all(after - before > 0.95 for before, after in pairwise(times))


async def test_who_waits_for_a_pull_that_is_given_up_pulls_by_himself_and_hears_on(
    registry: Registry, options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    pushed = await asyncio.to_thread(lambda: registry.push(f"{options.scope}:1", "one", random_mib=8))
    async with slowly(registry.port, 8) as port:
        image = pushed.replace(f":{registry.port}/", f":{port}/")
        backend = make(with_login(options, logins(tmp_path / "logins.json", f"127.0.0.1:{port}")))
        first: list[str] = []
        second: list[str] = []
        asked = spec(*TELLS, image=image, container="first")
        given_up = asyncio.create_task(backend.start(replace(asked, progress=first.append)))
        await until(lambda: len(first) == 1)
        asked = spec(*TELLS, image=image)
        kept = asyncio.create_task(backend.start(replace(asked, progress=second.append)))
        await until(lambda: len(second) > 0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        heard = len(first)
        assert "running" == (await kept).state
    assert (heard, True) == (len(first), second[-1].endswith(", 1 of 1 layers, pulled"))
    assert {} == backend._pulls._under_way  # names that anybody may ask for


async def test_always_pulls_what_was_pushed_since_and_missing_does_not(
    registry: Registry, options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    image = await asyncio.to_thread(registry.push, f"{options.scope}:1", "one")
    told = with_login(options, logins(tmp_path / "logins.json", image.partition("/")[0]))
    always, missing = make(told.model_copy(update={"pull": "always"})), make(told)
    await always.start(spec(*TELLS, image=image, container="a"))
    docker("tag", image, f"{image}-kept")  # the push takes its own name away
    await asyncio.to_thread(registry.push, f"{options.scope}:1", "two")
    docker("tag", f"{image}-kept", image)
    await missing.start(spec(*TELLS, image=image, container="b"))
    await always.start(spec(*TELLS, image=image, container="c"))
    assert ["one", "one", "two"] == [await says(options, name) for name in "abc"]


async def test_a_pull_is_heard_on_the_bus_and_the_login_is_in_no_event_record_or_log(
    registry: Registry, options: DockerOptions, cluster: placers.Cluster, tmp_path: Path
) -> None:
    image = await asyncio.to_thread(registry.push, f"{options.scope}:1", "one")
    file = logins(tmp_path / "logins.json", image.partition("/")[0])
    told = with_login(options, file).model_copy(update={"gpus": False})
    env = {"LAXITY_PLACER_BACKENDS": '{"*": "docker"}', "LAXITY_PLACER_DOCKER": told.model_dump_json()}
    placer = cluster.placer("p0", LAXITY_LOG_LEVEL="debug", **env)
    await cluster.place(command=list(TELLS), image=image)
    record = await cluster.reach("a", "started")
    await until(lambda: cluster.states("a")[-1:] == ["started"])
    assert ["accepted", "placed", "pulling", "started"] == [state for state, _ in groupby(cluster.states("a"))]
    assert ["accepted", "placed", "started"] == [step.state for step in record.steps]
    details = [event.detail or "" for event in cluster.events if event.state == "pulling"]
    assert f"image {image}: unknown size, unknown layers" == details[0]
    assert details[-1].endswith(", 1 of 1 layers, pulled")
    login = json.loads(file.read_bytes())["auths"][image.partition("/")[0]]["auth"]
    said = "".join((placer.log, record.model_dump_json(), *(event.model_dump_json() for event in cluster.events)))
    assert [] == [text for text in (PASSWORD, login) if text in said]
