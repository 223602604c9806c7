"""The manifests of k8s/ without a cluster: they render, and services are told what they know."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from services.deadline_tracker.settings import TrackerSettings
from services.kube_bridge.settings import KubeBridgeSettings
from services.monitor.settings import MonitorSettings
from services.node_list.settings import NodeListSettings
from services.placer.settings import PlacerSettings
from tests.manifests import OVERLAYS, ROOT, WORKLOADS, Json, environment, named, objects, of_kind, pods, rendered

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
SETTINGS: dict[str, type[BaseSettings]] = {
    "laxity-deadline-tracker": TrackerSettings,
    "laxity-kube-bridge": KubeBridgeSettings,
    "laxity-monitor": MonitorSettings,
    "laxity-node-list": NodeListSettings,
    "laxity-placer": PlacerSettings,
}
NOT_OURS = {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
"""Read by NVIDIA's runtime."""


def image(container: Json) -> str:
    """Without its tag."""
    return str(container["image"]).rpartition(":")[0]


def known(settings: type[BaseSettings]) -> set[str]:
    """The variables that a service reads; of a nested setting its parts too, as ``NAME__PART``."""
    prefix = settings.model_config.get("env_prefix", "")
    return {str(field.validation_alias or f"{prefix}{name}").upper() for name, field in settings.model_fields.items()}


def unknown(settings: type[BaseSettings], names: set[str]) -> set[str]:
    return {name for name in names if name.partition("__")[0] not in known(settings)}


@each_overlay
def test_an_overlay_renders_each_object_once(overlay: str) -> None:
    names = [
        (found["apiVersion"], found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"])
        for found in objects(overlay)
    ]

    assert len(names) > 30
    assert sorted(set(map(str, names))) == sorted(map(str, names))


@each_overlay
def test_every_image_is_one_that_is_built_here_or_kubernetes_own(overlay: str) -> None:
    targets = re.findall(r"^FROM .* AS ([\w-]+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    images = {image(container) for pod in pods(overlay) for container in pod.all_containers}

    assert {"registry.k8s.io/kube-scheduler"} == images - {f"laxity-{target}" for target in targets}


@each_overlay
def test_every_setting_is_one_that_its_service_knows_and_takes(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = set()
    for pod in pods(overlay):
        for container in pod.containers:
            settings = SETTINGS.get(image(container))
            if settings is None:
                continue
            told = environment(overlay, pod, container)
            if "kubernetes" not in PlacerSettings.model_fields:  # a placer without that backend
                told = {name: value for name, value in told.items() if not re.search("BACKENDS|_KUBERNETES__", name)}
            assert set() == unknown(settings, set(told) - NOT_OURS), container["name"]
            with monkeypatch.context() as patched:
                for name, value in told.items():
                    patched.setenv(name, value)
                settings()
            checked.add(image(container))
    assert set(SETTINGS) == checked


def test_a_setting_that_no_service_knows_would_be_found() -> None:
    assert {"LAXITY_MONITOR_NODES"} == unknown(MonitorSettings, {"LAXITY_MONITOR_NODES", "LAXITY_MONITOR_NODE"})
    assert set() == unknown(PlacerSettings, {"LAXITY_PLACER_DOCKER__IMAGE", "LAXITY_NATS_URL", "LAXITY_REPLICAS"})


@each_overlay
def test_every_container_says_what_it_needs_and_how_to_see_that_it_lives(overlay: str) -> None:
    for pod in pods(overlay):
        for container in pod.all_containers:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), container["name"]
            # no limit of CPU: who is throttled judges late
            assert {"memory"} == container["resources"]["limits"].keys(), container["name"]
        for container in pod.containers:
            assert {"readinessProbe", "livenessProbe"} <= container.keys(), container["name"]
            ports = {port["name"] for port in container["ports"]}
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                request = container.get(probe, {}).get("httpGet")
                assert request is None or request["port"] in ports, container["name"]


@each_overlay
def test_every_pod_has_an_account_and_a_class_of_its_own_here(overlay: str) -> None:
    accounts = {(a["metadata"]["namespace"], a["metadata"]["name"]) for a in of_kind(overlay, "ServiceAccount")}
    classes = {found["metadata"]["name"] for found in of_kind(overlay, "PriorityClass")}

    assert accounts == {(pod.namespace, pod.spec["serviceAccountName"]) for pod in pods(overlay)}
    assert {pod.spec["priorityClassName"] for pod in pods(overlay)} == classes


@each_overlay
def test_what_selects_pods_selects_some_and_a_budget_each_of_the_services(overlay: str) -> None:
    def chosen(namespace: str, selector: Json) -> set[str]:
        wanted = selector.get("matchLabels", {})
        within = {e["key"]: e["values"] for e in selector.get("matchExpressions", ())}
        return {
            pod.name
            for pod in pods(overlay)
            if pod.namespace == namespace
            and wanted.items() <= pod.labels.items()
            and all(pod.labels.get(key) in values for key, values in within.items())
        }

    budgets: list[str] = []
    for found in of_kind(overlay, "PodDisruptionBudget", "NetworkPolicy", "Service", *WORKLOADS):
        spec = found["spec"]
        selector = spec.get("podSelector", spec.get("selector"))
        selector = {"matchLabels": selector} if found["kind"] == "Service" else selector
        selected = chosen(found["metadata"]["namespace"], selector)
        assert selected, found["metadata"]["name"]
        if found["kind"] == "PodDisruptionBudget":
            assert 1 == spec["maxUnavailable"]  # 0 would stop the drain of every node
            budgets.extend(selected)
    assert sorted(budgets) == sorted(pod.name for pod in pods(overlay) if pod.namespace == "laxity")


@each_overlay
def test_what_pods_mount_is_in_the_manifests_or_made_by_laxity_keys(overlay: str) -> None:
    there = {(found["metadata"]["namespace"], found["metadata"]["name"]) for found in of_kind(overlay, "ConfigMap")}
    missing = set()
    for pod in pods(overlay):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        volumes |= {"data": {}} if pod.name == "nats" else {}
        mounted = {mount["name"] for container in pod.all_containers for mount in container["volumeMounts"]}
        assert volumes.keys() == mounted, pod.name
        for volume in volumes.values():
            name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
            if name and (pod.namespace, name) not in there:
                missing.add(f"{pod.namespace}/{name}")
    services = ("deadline-tracker", "kube-bridge", "node-list", "placer")
    keys = {*(f"laxity/key-{name}" for name in services), "laxity-nodes/keys-monitors", "laxity/nats-authorization"}

    assert {"demo": set(), "gpu": keys, "ha": keys | {"laxity/nats-cluster"}}[overlay] == missing


@each_overlay
def test_KU03_KU05_KU07_the_extender_is_not_passed_over_and_sees_every_pod_and_node(overlay: str) -> None:
    configuration: dict[str, Any] = yaml.safe_load(named(overlay, "ConfigMap", "scheduler")["data"]["scheduler.yaml"])
    (profile,) = configuration["profiles"]  # extenders are asked for all profiles of their process
    (extender,) = configuration["extenders"]

    assert ("laxity", 100) == (profile["schedulerName"], profile["percentageOfNodesToScore"])
    assert {"NodeResourcesFit": ["laxity.dev"]} == {
        plugin["name"]: plugin["args"]["ignoredResourceGroups"] for plugin in profile["pluginConfig"]
    }
    assert {
        "urlPrefix": "http://127.0.0.1:10270",
        "filterVerb": "filter",
        "bindVerb": "bind",
        "nodeCacheCapable": True,
        "ignorable": False,
        "httpTimeout": "10s",
    } == extender
    assert "kube-system" != configuration["leaderElection"]["resourceNamespace"]
    if "laxity-kube-bridge" in SETTINGS:
        bridge: Any = SETTINGS["laxity-kube-bridge"]()
        assert extender["urlPrefix"] == f"http://{bridge.extender_host}:{bridge.extender_port}"
        assert max(bridge.filter_us, bridge.bind_us) < 9_000_000  # so that the scheduler hears the reason


@each_overlay
def test_KU04_what_places_pods_is_placed_by_others(overlay: str) -> None:
    for pod in pods(overlay):
        assert pod.spec.get("schedulerName", "default-scheduler") == "default-scheduler", pod.name
        for container in pod.all_containers:
            asked = container["resources"]["requests"].keys() | container["resources"]["limits"].keys()
            assert {"cpu", "memory"} == asked, pod.name
        assert not [key for key in pod.annotations if key.startswith("laxity.dev/")], pod.name


def test_three_servers_keep_three_copies_and_are_all_known() -> None:
    settings = _common("ha", "laxity")
    (nats,) = of_kind("ha", "StatefulSet")

    assert 3 == nats["spec"]["replicas"] == int(settings["LAXITY_REPLICAS"])
    assert [f"nats://nats-{n}.nats-headless.laxity.svc:4222" for n in range(3)] == settings["LAXITY_NATS_URL"].split(
        ","
    )
    assert settings == _common("ha", "laxity-nodes")
    assert "LAXITY_REPLICAS" not in _common("gpu", "laxity")
    assert {1, 2} == {found["spec"]["replicas"] for o in ("gpu", "ha") for found in of_kind(o, "Deployment")}


def _common(overlay: str, namespace: str) -> dict[str, str]:
    (found,) = (
        each["data"]
        for each in of_kind(overlay, "ConfigMap")
        if each["metadata"]["namespace"] == namespace and each["metadata"]["name"].startswith("common-")
    )
    return dict(found)


@each_overlay
def test_no_object_names_another_namespace_than_ours(overlay: str) -> None:
    made = {found["metadata"]["name"] for found in of_kind(overlay, "Namespace")}

    assert {"laxity", "laxity-nodes", "laxity-pods"} == made
    assert {"kube-system"} == {found["metadata"].get("namespace") for found in objects(overlay)} - made - {None}
    assert "TODO" not in rendered(overlay)
