"""``laxity keys --kubernetes``: what the manifests of k8s/ mount is made, and server and services take it as it is."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.main import main
from shared.bus.credentials import credentials
from shared.settings import ServiceSettings
from tests.manifests import OVERLAYS, ROOT, named, of_kind, pods

Json = dict[str, Any]


@pytest.fixture
def made(tmp_path: Path) -> dict[str, dict[str, str]]:
    """The data of each object, by namespace/name."""
    file = tmp_path / "secrets.yaml"
    nodes = ["--node", "worker-1", "--node", "ip-10-0-0-1.internal"]
    assert 0 == main(["keys", str(tmp_path / "keys"), *nodes, "--kubernetes", str(file)])
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    found = {}
    for each in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        name = f"{each['metadata']['namespace']}/{each['metadata']['name']}"
        found[name] = each["stringData"] if each["kind"] == "Secret" else each["data"]
    return found


def test_each_secret_has_what_one_service_needs(made: dict[str, dict[str, str]], tmp_path: Path) -> None:
    names = {name: sorted(data) for name, data in made.items()}
    seeds = {path.stem: path.read_text() for path in (tmp_path / "keys").glob("*.nk")}

    assert {
        "laxity/key-deadline-tracker": ["deadline-tracker.nk"],
        "laxity/key-node-list": ["node-list.nk"],
        "laxity/key-placer": ["placer.nk"],
        "laxity/key-kube-bridge": ["kube-bridge.nk"],
        "laxity-nodes/keys-monitors": ["ip-10-0-0-1.internal", "worker-1"],
        "laxity/nats-cluster": ["cluster.conf"],
        "laxity/nats-authorization": ["authorization.conf"],
    } == names
    assert seeds["placer"] == made["laxity/key-placer"]["placer.nk"]
    assert seeds["monitor-ip-10-0-0-1=2Einternal"] == made["laxity-nodes/keys-monitors"]["ip-10-0-0-1.internal"]
    assert seeds["operator"].strip() not in str(made)


def test_again_it_makes_the_same_secrets(made: dict[str, dict[str, str]], tmp_path: Path) -> None:
    assert 0 == main(["keys", str(tmp_path / "keys"), "--kubernetes", str(tmp_path / "again.yaml")])

    again = list(yaml.safe_load_all((tmp_path / "again.yaml").read_text()))
    secrets = [data for name, data in made.items() if name != "laxity/nats-authorization"]
    assert secrets == [each["stringData"] for each in again if each["kind"] == "Secret"]


def test_a_node_that_kubernetes_cannot_have_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["keys", str(tmp_path / "keys"), "--node", "GPU 1", "--kubernetes", str(tmp_path / "secrets.yaml")]

    assert 0 != main(arguments)
    assert "node GPU 1: found in the folder, allowed: the name of a Kubernetes node" in capsys.readouterr().err
    assert not (tmp_path / "secrets.yaml").exists()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_takes_its_configuration(overlay: str, made: dict[str, dict[str, str]], tmp_path: Path) -> None:
    (nats,) = (pod for pod in pods(overlay) if pod.name == "nats")
    (container,) = nats.containers
    for mount in container["volumeMounts"]:
        (volume,) = (
            (v for v in nats.spec["volumes"] if v["name"] == mount["name"]) if mount["name"] != "data" else ({},)
        )
        name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        if name:
            data = made.get(f"laxity/{name}") or named(overlay, "ConfigMap", "nats")["data"]
            folder = tmp_path / mount["mountPath"].lstrip("/")
            folder.mkdir(parents=True)
            for file, text in data.items():
                (folder / file).write_text(text)

    config = tmp_path / container["command"][-1].lstrip("/")
    server = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = [str(server), "-t", "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={"POD_NAME": "nats-0"})

    assert 0 == done.returncode, done.stderr
    assert {"demo": "nats.conf", "gpu": "keys.conf", "ha": "three.conf"}[overlay] == config.name


def steps() -> list[tuple[str, Json]]:
    """What copies a key before a service starts."""
    return [(pod.name, step) for pod in pods("gpu") for step in pod.spec.get("initContainers", ())]


@pytest.mark.parametrize("pod", [name for name, _ in steps()])
def test_a_step_leaves_a_key_that_its_service_takes(pod: str, made: dict[str, dict[str, str]], tmp_path: Path) -> None:
    step = dict(steps())[pod]
    (tmp_path / "secret").mkdir()
    (tmp_path / "copied").mkdir()
    (service,) = (c for p in pods("gpu") if p.name == pod for c in p.containers if c["name"] != "kube-scheduler")
    told = {entry["name"]: entry.get("value", "") for entry in service["env"]}
    node, name = "ip-10-0-0-1.internal", Path(told["LAXITY_NATS_SEED_FILE"]).stem
    data = made["laxity-nodes/keys-monitors" if pod == "monitor" else f"laxity/key-{name}"]
    for file_name, text in data.items():
        (tmp_path / "secret" / file_name).write_text(text)

    for _ in range(2):  # a container of a pod may start again
        words = [each.replace("/secret", f"{tmp_path}/secret") for each in step["command"]]
        words = [each.replace("/keys", f"{tmp_path}/copied") for each in words]
        words[0] = sys.executable if words[0] == "python" else words[0]
        environment = {**os.environ, "LAXITY_MONITOR_NODE": node, "PYTHONPATH": str(ROOT)}
        subprocess.run(words, check=True, timeout=30, env=environment)

    file = tmp_path / "copied" / Path(told["LAXITY_NATS_SEED_FILE"]).name
    user = "monitor-ip-10-0-0-1=2Einternal" if pod == "monitor" else name
    assert f"_INBOX.{user}" == credentials(ServiceSettings(nats_seed_file=file)).inbox_prefix
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    assert {file.resolve().name, file.name} == {path.name for path in (tmp_path / "copied").iterdir()}


def test_every_service_that_has_a_key_has_such_a_step() -> None:
    assert {"placer", "node-list", "deadline-tracker", "scheduler", "monitor"} == {name for name, _ in steps()}
    assert {"nats"} == {found["metadata"]["name"] for found in of_kind("gpu", "StatefulSet")}
