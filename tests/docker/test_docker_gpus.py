"""GPUs on a real engine without one: its runtime hook is ours and says what NVIDIA's would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.placer.backends.docker_options import DockerEngine, DockerOptions
from shared.errors import BackendError
from shared.messages.nodes import Regime
from tests.docker import test_docker_backend as backends
from tests.docker.test_docker_backend import Make, engine_name, spec, start_with_gpus, there
from tests.docker_engine import docker, engine_url, inspect

pytestmark = pytest.mark.docker
options = backends.options
make = backends.make


async def test_a_container_gets_the_devices_that_it_was_given(options: DockerOptions, make: Make) -> None:
    await start_with_gpus(make(options), spec(devices=("GPU-5f1", "MIG-77"), gpu={"count": 2}))
    environment = docker("exec", engine_name(options), "cat", "/proc/1/environ").split("\x00")
    visible = {entry for entry in environment if entry.startswith("NVIDIA_VISIBLE_DEVICES=")}
    assert {"NVIDIA_VISIBLE_DEVICES=GPU-5f1,MIG-77"} == visible


async def test_a_container_on_a_device_shared_by_mps_finds_the_daemons_pipes_and_its_share(
    options: DockerOptions, make: Make, tmp_path: Path
) -> None:
    pipes, shm = tmp_path / "pipes", tmp_path / "shm"
    where = DockerEngine(url=engine_url(), mps_pipe_dir=pipes, mps_shm_dir=shm)
    backend = make(options.model_copy(update={"engines": {"*": where}}))
    asked = replace(spec(devices=("GPU-5f1",), gpu={}), regimes=(Regime.MPS,))
    with pytest.raises(BackendError, match=f"{pipes}"):
        await start_with_gpus(backend, asked)
    assert [] == there(options)
    pipes.mkdir()
    shm.mkdir()
    (pipes / "control").touch()
    await start_with_gpus(backend, asked)
    environment = docker("exec", engine_name(options), "cat", "/proc/1/environ").split("\x00")
    assert {
        "NVIDIA_VISIBLE_DEVICES=GPU-5f1",
        "CUDA_MPS_PIPE_DIRECTORY=/run/laxity/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100",
    } == {entry for entry in environment if entry.startswith(("NVIDIA_VISIBLE", "CUDA_MPS"))}
    mounts = {mount["Destination"]: mount["Source"] for mount in inspect(engine_name(options))["Mounts"]}
    assert (str(pipes), str(shm)) == (mounts["/run/laxity/mps"], mounts["/dev/shm"])
    assert "control" == docker("exec", engine_name(options), "ls", "/run/laxity/mps")
    docker("exec", engine_name(options), "sh", "-c", "echo x >/dev/shm/x")
    assert "x\n" == (shm / "x").read_text()


async def test_a_device_shared_by_mps_where_the_settings_name_no_daemon_fails_the_start(
    options: DockerOptions, make: Make
) -> None:
    asked = replace(spec(devices=("GPU-5f1",), gpu={}), regimes=(Regime.MPS,))
    with pytest.raises(BackendError, match=r"GPU-5f1 is shared by MPS, .* name no mps_pipe_dir"):
        await make(options).start(asked)
    assert [] == there(options)


async def test_a_container_without_gpus_sees_none(options: DockerOptions, make: Make) -> None:
    await make(options).start(spec())
    environment = docker("exec", engine_name(options), "cat", "/proc/1/environ").split("\x00")
    assert "NVIDIA_VISIBLE_DEVICES=void" in environment
    assert inspect(engine_name(options))["HostConfig"]["DeviceRequests"] is None


async def test_a_device_that_the_hook_refuses_fails_the_start_with_its_words(
    options: DockerOptions, make: Make
) -> None:
    with pytest.raises(BackendError, match="unknown device"):
        await start_with_gpus(make(options), spec(devices=("GPU-broken",), gpu={}))
    assert [] == there(options)
