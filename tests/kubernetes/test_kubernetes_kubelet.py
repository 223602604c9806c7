"""Pods on a real kubelet: what their containers are given, and what the kubelet says of those that it will not run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.placer.backends.base import Seen, StartSpec
from services.placer.backends.kubernetes import KubernetesBackend
from shared.errors import BackendError
from shared.messages.place import PlaceRequest, Volume
from shared.testing.wait import eventually
from tests.conformance import test_backend as conformance
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.node import Machine
from tests.kubernetes.pods import kubernetes_options, pods_in, secret

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

BOX = conformance.BOX


@pytest.fixture
async def backend(kube: KubeCluster, machine: Machine, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    tmp_path.chmod(0o755)  # noqa: ASYNC240 -- of the test's own folder
    options = kubernetes_options(kube, tmp_path, volumes={"data": str(tmp_path)}, images=("*",))
    backend = KubernetesBackend(options)
    yield backend
    for seen in await backend.list(machine.name):
        await backend.stop(seen.node, seen.container)
    await backend.close()


def spec(machine: Machine, **request: object) -> StartSpec:
    """With the limits that stand in the request."""
    asked = {"command": ("sleep", "60"), **request}
    cpu_milli, memory_mib = asked.get("cpu_milli", 0), asked.get("memory_mib", 0)
    made = conformance.spec(node=machine.name, cpu_milli=cpu_milli, memory_mib=memory_mib)  # type: ignore[arg-type]
    return StartSpec(made.labels, PlaceRequest.model_validate({"gpu": {"share": 0.5}, **asked}), env=made.env)


async def test_KU27_the_first_process_has_the_devices_that_the_binding_named(
    kube: KubeCluster, backend: KubernetesBackend, machine: Machine, tmp_path: Path
) -> None:
    namespace = kubernetes_options(kube, tmp_path).namespace
    secret(kube, namespace, "vault", token="hidden")
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "PLAIN": "$(HOME) $$", "TOKEN": {"secret": "vault/token"}}
    (tmp_path / "file").write_text("found")
    volumes = (Volume(source="data", target="/data"),)
    command = ("sh", "-c", "id -u; cat /data/file; echo >/run/laxity/ring/mine && echo written '$(PLAIN)'; sleep 60")
    asked = spec(machine, env=env, command=command, volumes=volumes, user="1000:1000", shm_mib=16)
    await backend.start(asked)
    (pod,) = pods_in(kube, namespace)
    found = machine.environment(pod["metadata"]["uid"])
    assert "GPU-5f1" == found["NVIDIA_VISIBLE_DEVICES"] == found["LAXITY_DEVICES"]
    assert ("$(HOME) $$", "hidden", BOX) == (found["PLAIN"], found["TOKEN"], found["LAXITY_CONTAINER"])
    assert "1000\nfound" in machine.until_logged(namespace, BOX, "written $(PLAIN)")


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"image": "laxity.test/none:here"}, "ErrImageNeverPull"),
        ({"cpu_milli": 1_000_000}, "OutOfcpu"),
        ({"env": {"TOKEN": {"secret": "nowhere/token"}}}, "CreateContainerConfigError.*nowhere"),
        ({"command": ("no-such-command",)}, "StartError.*no-such-command"),
    ],
)
async def test_what_the_kubelet_will_not_run_is_a_failed_start_in_its_words(
    kube: KubeCluster, backend: KubernetesBackend, machine: Machine, more: dict[str, object], reason: str
) -> None:
    with pytest.raises(BackendError, match=reason):
        await backend.start(spec(machine, **more))
    assert [] == await backend.list(machine.name)


async def test_a_container_that_takes_more_memory_than_it_may_is_ended_and_others_run_on(
    backend: KubernetesBackend, machine: Machine
) -> None:
    hungry = ("sh", "-c", "dd if=/dev/zero of=/dev/null bs=512M count=1; exit $?")
    await backend.start(spec(machine, command=hungry, memory_mib=32))

    async def ended() -> Seen | None:
        return next((each for each in await backend.list(machine.name) if each.state == "exited"), None)

    seen = await eventually(ended)
    assert seen.exit_code in {1, 137}
    assert seen.cause is not None
    assert seen.cause.reason in {"OOMKilled", "Error"}, "only a child was killed: kubelets differ in whose end that is"
    print(f"exit code {seen.exit_code}, {seen.cause}")


async def test_a_kubelet_that_is_killed_comes_back_to_the_same_containers(
    kube: KubeCluster, backend: KubernetesBackend, machine: Machine, tmp_path: Path
) -> None:
    await backend.start(spec(machine))
    (pod,) = pods_in(kube, kubernetes_options(kube, tmp_path).namespace)
    pid = machine.pid(pod["metadata"]["uid"])
    machine.kubelet.restart()
    assert pid == machine.pid(pod["metadata"]["uid"])
    await backend.stop(machine.name, BOX)
    assert [] == await backend.list(machine.name)
