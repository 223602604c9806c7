"""What an engine is told to make of a start, without an engine."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.base import StartSpec
from services.placer.backends.docker_options import DockerOptions
from services.placer.backends.docker_secrets import registry_auth
from services.placer.backends.docker_spec import create_body, engine_name, labels_of, line_of, seen_of, tagged
from services.placer.core.capabilities import Capabilities
from services.placer.core.containers import Cause
from shared.errors import BackendError
from shared.messages.ledger import ContainerLabels, Reservation
from shared.messages.place import PlaceRequest

OPTIONS = DockerOptions()


def spec(*, devices: tuple[str, ...] = (), cpu_milli: int = 0, memory_mib: int = 0, **asked: Any) -> StartSpec:
    request = PlaceRequest.model_validate({"image": "detector:3", "command": ("run",), **asked})
    held = Reservation(
        request_id="detector-7f3a",
        replica=0,
        generation=1,
        devices=devices,
        share_micro=1_000_000,
        device_memory_mib=0,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
    )
    return StartSpec(ContainerLabels(container="laxity-1", ledger_id="ledger", node="n", reservation=held), request)


def host(asked: StartSpec, options: DockerOptions = OPTIONS) -> dict[str, Any]:
    config = create_body(asked, options, None)["HostConfig"]
    assert isinstance(config, dict)
    return config


def environment(asked: StartSpec, options: DockerOptions = OPTIONS, ring: Path | None = None) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in create_body(asked, options, ring)["Env"])


def test_D1_D3_devices_are_asked_for_by_id_and_never_with_a_count() -> None:
    asked = host(spec(devices=("GPU-a", "MIG-b"), gpu={"count": 2}))["DeviceRequests"]
    assert [{"Driver": "nvidia", "DeviceIDs": ["GPU-a", "MIG-b"], "Capabilities": [["gpu"]]}] == asked


def test_D2_all_eight_devices_are_asked_for() -> None:
    devices = tuple(f"GPU-{number}" for number in range(8))
    assert list(devices) == host(spec(devices=devices, gpu={"count": 8}))["DeviceRequests"][0]["DeviceIDs"]


def test_D15_who_asked_for_no_gpu_sees_none_also_where_it_or_its_image_says_all() -> None:
    asked = spec(env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert "void" == environment(asked)["NVIDIA_VISIBLE_DEVICES"]
    assert "DeviceRequests" not in host(asked)


def test_who_asked_for_some_sees_these_also_where_it_says_all() -> None:
    asked = spec(devices=("GPU-a",), gpu={}, env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert "GPU-a" == environment(asked)["NVIDIA_VISIBLE_DEVICES"]


def test_a_container_that_must_wait_for_its_turns_is_refused_where_it_has_no_folder_to_ask_in() -> None:
    asked = replace(spec(devices=("GPU-a",), gpu={}), env={"LAXITY_GATE": "1"})
    assert "1" == environment(asked, ring=Path("/run/laxity/rings/c"))["LAXITY_GATE"]
    with pytest.raises(BackendError, match=r"realtime\.gate: .* no ring_root"):
        environment(asked)


def test_a_core_is_pinned_and_not_asked_for_as_a_gpu() -> None:
    asked = spec(devices=("CPU-m-1", "CPU-m-3"), gpu={"count": 2})
    assert "1,3" == host(asked)["CpusetCpus"]
    assert "DeviceRequests" not in host(asked)
    assert "2" == environment(asked)["OMP_NUM_THREADS"]


def test_simulated_gpus_are_not_asked_of_the_engine() -> None:
    options = OPTIONS.model_copy(update={"gpus": False})
    assert "DeviceRequests" not in host(spec(devices=("GPU-a",), gpu={}), options)
    assert "GPU-a" == environment(spec(devices=("GPU-a",), gpu={}), options)["LAXITY_DEVICES"]


def test_D12_limits_go_out_as_bytes_and_without_swap_on_top() -> None:
    config = host(spec(memory_mib=2560, cpu_milli=1500))
    assert (2560 << 20, 2560 << 20) == (config["Memory"], config["MemorySwap"])
    assert 1.5 == config["CpuQuota"] / config["CpuPeriod"]
    assert "Memory" not in host(spec())
    assert "CpuQuota" not in host(spec())


def test_D13_the_engine_restarts_nothing() -> None:
    assert {"Name": "no"} == host(spec())["RestartPolicy"]
    assert {"Name": "no"} == host(spec(restart="on_failure"))["RestartPolicy"]


def test_a_container_gets_no_privilege_and_no_path_of_the_machine() -> None:
    config = host(spec())
    assert (["ALL"], ["no-new-privileges:true"], False) == (
        config["CapDrop"],
        config["SecurityOpt"],
        config["Privileged"],
    )
    assert ([], []) == (config["Mounts"], config["Binds"])


def test_only_volumes_that_the_operator_named_are_mounted() -> None:
    options = OPTIONS.model_copy(update={"volumes": {"models": "/srv/models", "cache": "laxity-cache"}})
    volumes = ({"source": "models", "target": "/models"}, {"source": "cache", "target": "/c", "read_only": False})
    assert [
        {"Type": "bind", "Source": "/srv/models", "Target": "/models", "ReadOnly": True},
        {"Type": "volume", "Source": "laxity-cache", "Target": "/c", "ReadOnly": False},
    ] == host(spec(volumes=volumes), options)["Mounts"]
    for source in ["/etc", "/srv/models", "../models", "other"]:
        with pytest.raises(BackendError, match=r"volumes: found source .*allowed: cache, models"):
            host(spec(volumes=({"source": source, "target": "/t"},)), options)


def test_ports_are_reached_from_this_machine_only_unless_told() -> None:
    assert {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8080"}]} == host(spec(ports=(8080,)))["PortBindings"]
    wide = OPTIONS.model_copy(update={"publish_on": "0.0.0.0"})  # noqa: S104 -- what is tested
    assert "0.0.0.0" == host(spec(ports=(8080,)), wide)["PortBindings"]["8080/tcp"][0]["HostIp"]  # noqa: S104


def test_only_allowed_images_run() -> None:
    options = OPTIONS.model_copy(update={"images": ("registry.example/*",)})
    host(spec(image="registry.example/a:1"), options)
    for image in ["other.example/a:1", "registry.example", "registry.example/../a", "registry.example/a?b=c"]:
        with pytest.raises(BackendError, match="image: found"):
            host(spec(image=image), options)


def test_a_command_without_an_image_takes_the_one_of_the_cluster_or_is_refused() -> None:
    bare = spec(image=None)
    assert "base:1" == create_body(bare, OPTIONS.model_copy(update={"image": "base:1"}), None)["Image"]
    with pytest.raises(BackendError, match="image: found nothing"):
        create_body(bare, OPTIONS, None)
    can = Capabilities(images=True, needs_image=True)
    assert ("image", None) == (can.lacking(bare.request), can.lacking(spec().request))


def test_a_secret_is_the_content_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "vault").mkdir()
    (tmp_path / "vault" / "token").write_text("hunter2\n")
    (tmp_path / "vault" / "token").chmod(0o600)
    options = OPTIONS.model_copy(update={"secrets_dir": tmp_path})
    asked = spec(env={"TOKEN": {"secret": "vault/token"}})
    assert "hunter2" == environment(asked, options)["TOKEN"]
    assert "hunter2" not in asked.labels.to_json().decode()


@pytest.mark.parametrize("name", ["missing", "../outside", "/etc/passwd", ".", "vault\x00"])
def test_a_secret_that_cannot_be_read_is_told_by_its_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (tmp_path / "outside").write_text("hunter2")
    options = OPTIONS.model_copy(update={"secrets_dir": folder})
    with pytest.raises(BackendError, match="env TOKEN") as raised:
        environment(spec(env={"TOKEN": {"secret": name}}), options)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_may_read_is_refused_and_told_by_its_name(tmp_path: Path, mode: int) -> None:
    (tmp_path / "token").write_text("hunter2")
    (tmp_path / "token").chmod(mode)
    options = OPTIONS.model_copy(update={"secrets_dir": tmp_path})
    with pytest.raises(BackendError) as raised:
        environment(spec(env={"TOKEN": {"secret": "token"}}), options)
    assert "env TOKEN: secret token may be read by others than its owner" == str(raised.value)


def test_logins_that_others_may_read_are_refused_and_told_by_their_file(tmp_path: Path) -> None:
    logins = tmp_path / "config.json"
    logins.write_text("{}")
    logins.chmod(0o640)
    with pytest.raises(BackendError, match=r"config.json has mode 640, allowed: .*chmod 600"):
        registry_auth("a", logins)
    logins.chmod(0o600)
    assert {} == registry_auth("a", logins)


def test_the_ring_is_told_only_where_there_is_one(tmp_path: Path) -> None:
    assert "/run/laxity/ring" == environment(spec(), ring=tmp_path)["LAXITY_RING_DIR"]
    assert "LAXITY_RING_DIR" not in environment(spec())


def test_names_are_those_of_the_ledger_where_an_engine_takes_them() -> None:
    assert "laxity-0123" == engine_name("", "laxity-0123")
    assert "east.laxity-0123" == engine_name("east", "laxity-0123")
    odd = {engine_name("", name) for name in ["..", "-rf", "a b", "ü", "\ud800"]}
    assert 5 == len(odd)
    assert all(name.startswith("laxity-name-") for name in odd)


def test_an_image_without_a_tag_is_pulled_as_latest_and_not_with_all_tags() -> None:
    assert "a:latest" == tagged("a")
    assert "r.example:5000/a:latest" == tagged("r.example:5000/a")
    assert ["a:1", "a@sha256:0"] == [tagged("a:1"), tagged("a@sha256:0")]


def test_logins_are_those_of_the_image_s_registry(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"auths": {"r.example:5000": {"auth": base64.b64encode(b"me:pass:word").decode()}}}))
    file.chmod(0o600)
    header = registry_auth("r.example:5000/a:1", file)["X-Registry-Auth"]
    assert {"username": "me", "password": "pass:word", "serveraddress": "r.example:5000"} == json.loads(
        base64.urlsafe_b64decode(header)
    )
    assert {} == registry_auth("library/a", file) == registry_auth("a", None)
    file.write_text("{")
    with pytest.raises(BackendError, match="cannot be read"):
        registry_auth("a", file)


def test_labels_of_another_scope_or_that_cannot_be_read_are_not_ours() -> None:
    options = OPTIONS.model_copy(update={"scope": "east"})
    labels = create_body(spec(), options, None)["Labels"]
    assert spec().labels == labels_of(labels, "east")
    assert labels_of(labels, "") is None
    assert labels_of({**labels, "laxity.labels": "{"}, "east") is None
    assert labels_of(None, "") is None


def test_a_stream_that_is_cut_within_a_line_says_nothing() -> None:
    assert {"id": "1f"} == line_of(b'{"id": "1f", "Actor": {}}\n')
    assert {} == line_of(b'{"id": "1') == line_of(b"[1]") == line_of(b"\xff")


@pytest.mark.parametrize(("finished", "code"), [("2026-11-29T19:02:59.596027981Z", 0), ("0001-01-01T00:00:00Z", None)])
def test_an_exit_code_without_a_time_of_the_end_is_one_that_nobody_saw(finished: str, code: int | None) -> None:
    state = {"Running": False, "Status": "exited", "ExitCode": 0, "FinishedAt": finished}
    assert code == seen_of({"Name": "/box", "Config": {"Labels": {}}, "State": state}, "").exit_code


@pytest.mark.parametrize(
    ("code", "killed", "cause"),
    [(137, True, Cause("OOMKilled")), (1, True, Cause("OOMKilled")), (0, True, None), (137, False, None)],
)
def test_one_that_memory_ended_says_so_and_one_that_only_lost_a_child_does_not(
    code: int, killed: bool, cause: Cause | None
) -> None:
    state = {"Running": False, "ExitCode": code, "FinishedAt": "2026-11-29T19:02:59Z", "OOMKilled": killed}
    assert cause == seen_of({"Name": "/box", "Config": {"Labels": {}}, "State": state}, "").cause
