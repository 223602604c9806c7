"""What a container is told whose devices are shared by NVIDIA's MPS, and who is not told so; without an engine."""

from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.base import StartSpec
from services.placer.backends.docker_options import DockerEngine, DockerOptions
from services.placer.backends.docker_spec import create_body
from shared.errors import BackendError
from shared.messages import ContainerLabels, PlaceRequest, Regime, Reservation

WITH = DockerEngine(url="unix:///e", mps_pipe_dir=Path("/run/mps"), mps_shm_dir=Path("/run/mps-shm"))
WITHOUT = DockerEngine(url="unix:///e")
MPS, TIMED = Regime.MPS, Regime.TIME_SLICED


def spec(
    *regimes: Regime | None, share_micro: int = 250_000, memory_mib: int = 0, core: bool = False, **asked: Any
) -> StartSpec:
    """Of one device for each regime."""
    devices = tuple(f"{'CPU-m-' if core else 'GPU-'}{number}" for number in range(len(regimes)))
    gpu = {"gpu": {"count": len(regimes)}} if regimes else {}
    request = PlaceRequest.model_validate({"image": "detector:3", "command": ("run",), **gpu, **asked})
    held = Reservation(
        request_id="r",
        replica=0,
        generation=1,
        devices=devices,
        share_micro=share_micro,
        device_memory_mib=memory_mib,
        cpu_milli=0,
        memory_mib=0,
    )
    labels = ContainerLabels(container="laxity-1", ledger_id="l", node="n", reservation=held)
    return StartSpec(labels, request, regimes=regimes)


def told(asked: StartSpec, where: DockerEngine = WITH, **options: Any) -> dict[str, str]:
    """Its variables of CUDA."""
    body = create_body(asked, DockerOptions(**options), None, where)
    pairs = (entry.split("=", 1) for entry in body["Env"])
    return {name: value for name, value in pairs if name.startswith("CUDA_")}


def mounted(asked: StartSpec, where: DockerEngine = WITH) -> dict[str, str]:
    mounts = create_body(asked, DockerOptions(), None, where)["HostConfig"]["Mounts"]
    return {mount["Target"]: mount["Source"] for mount in mounts}


def test_a_container_on_a_device_shared_by_mps_is_told_its_pipes_share_and_memory() -> None:
    assert {
        "CUDA_MPS_PIPE_DIRECTORY": "/run/laxity/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M",
    } == told(spec(MPS, memory_mib=2048))
    assert {"/run/laxity/mps": "/run/mps", "/dev/shm": "/run/mps-shm"} == mounted(spec(MPS))


def test_memory_is_limited_on_each_device_by_its_ordinal_and_only_where_it_was_asked() -> None:
    assert "0=512M,1=512M" == told(spec(MPS, MPS, memory_mib=512))["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"]
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in told(spec(MPS))


@pytest.mark.parametrize(
    ("micro", "percent"), [(1_000_000, "100"), (333_333, "33"), (999_999, "99"), (10_000, "1"), (1, "1")]
)
def test_a_share_is_told_in_whole_percents_that_are_never_over_a_hundred_together(micro: int, percent: str) -> None:
    assert percent == told(spec(MPS, share_micro=micro))["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]


def test_who_has_no_device_shared_by_mps_is_told_nothing_of_it() -> None:
    for asked in (spec(), spec(TIMED), spec(Regime.EXCLUSIVE), spec(Regime.MIG), spec(MPS, core=True)):
        assert ({}, {}) == (told(asked), mounted(asked))
    assert {} == told(spec(MPS), gpus=False)


def test_a_request_cannot_raise_its_share_by_its_own_environment() -> None:
    asked = spec(MPS, env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/other"})
    assert told(spec(MPS)) == told(asked)


def test_a_start_on_mps_without_a_pipe_directory_fails_and_names_device_and_setting() -> None:
    with pytest.raises(BackendError, match=r"GPU-1 is shared by MPS, .* unix:///e name no mps_pipe_dir"):
        told(spec(TIMED, MPS), WITHOUT)


def test_a_device_of_which_nothing_is_known_is_not_started_beside_a_daemon() -> None:
    with pytest.raises(BackendError, match="whether GPU-0 is shared by MPS is not known"):
        told(spec(None))
    assert {} == told(spec(None), WITHOUT)


def test_shared_memory_of_its_own_is_refused_where_the_daemon_has_it() -> None:
    with pytest.raises(BackendError, match="shm_mib: found 64, allowed: none, since GPU-0 is shared by MPS"):
        told(spec(MPS, shm_mib=64))
    assert {} == told(spec(TIMED, shm_mib=64))


def test_certificates_are_refused_where_nothing_would_be_encrypted() -> None:
    with pytest.raises(ValueError, match="allowed: with https:// only"):
        DockerEngine(url="tcp://e:2375", tls=Path("/etc/laxity/docker"))
