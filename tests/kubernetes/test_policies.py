"""The admission policies of k8s/ on a real API server: what is told to containers, and who may say which devices."""

from __future__ import annotations

import itertools

import pytest
import yaml

from tests.kubernetes.api import MERGE, STRATEGIC, Json
from tests.kubernetes.installed import PLACER, Installed, binding, pod
from tests.manifests import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]

PODS = "/api/v1/namespaces/shop/pods"
DEVICES = "laxity.dev/devices"
FROM_DEVICES = {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{DEVICES}']"}}}
FROM_LABEL = {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.labels['laxity.dev/container']"}}}
FROM_GATED = {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['laxity.dev/gated']"}}}
GPU = {"laxity.dev/gpu-milli": "250", "laxity.dev/gpu-mib": "4096"}
FILES = {
    "container.json": "metadata.annotations['laxity.dev/labels']",
    "namespace": "metadata.namespace",
    "name": "metadata.name",
}
numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"pod-{next(numbers)}"


def refusal(answer: tuple[int, Json]) -> str:
    """What the API server says to a request that a policy refuses."""
    status, body = answer
    assert 422 == status, body
    return str(body["message"]).rpartition("denied request: ")[2]


def entries(container: Json) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for entry in container["env"]:
        found.setdefault(entry["name"], []).append({key: value for key, value in entry.items() if key != "name"})
    return found


# --- what containers are told ---


def test_KU23_KU25_every_container_has_one_entry_and_it_is_that_of_the_annotation(
    installed: Installed, name: str
) -> None:
    body = pod(name, limits=GPU, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "b"}])
    body["spec"]["containers"].append({"name": "bare", "image": "x"})
    body["spec"]["initContainers"] = [
        {"name": "first", "image": "x", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}] * 2}
    ]

    made = installed.alice.create(PODS, body)

    for container in [*made["spec"]["containers"], *made["spec"]["initContainers"]]:
        told = entries(container)
        assert [FROM_DEVICES] == told["NVIDIA_VISIBLE_DEVICES"] == told["LAXITY_DEVICES"]
        assert [FROM_LABEL] == told["LAXITY_CONTAINER"]
        assert [{"value": "/run/laxity/ring"}] == told["LAXITY_RING_DIR"]
        mounted = {
            mount["name"]: (mount["mountPath"], mount.get("readOnly", False)) for mount in container["volumeMounts"]
        }
        assert ("/run/laxity/ring", False) == mounted["laxity-ring"]
        assert ("/run/laxity/labels", True) == mounted["laxity-labels"]
    assert [{"value": "b"}] == entries(made["spec"]["containers"][0])["A"]
    (labels,) = (volume for volume in made["spec"]["volumes"] if volume["name"] == "laxity-labels")
    assert FILES == {item["path"]: item["fieldRef"]["fieldPath"] for item in labels["downwardAPI"]["items"]}
    assert "laxity-ring" in {volume["name"] for volume in made["spec"]["volumes"]}


def test_KU24_a_pod_begins_with_void_and_the_placers_binding_says_what_it_has(installed: Installed, name: str) -> None:
    assert "void" == installed.alice.create(PODS, pod(name, limits=GPU))["metadata"]["annotations"][DEVICES]

    written = {DEVICES: "GPU-1", "laxity.dev/generation": "1", "laxity.dev/labels": "{}", "laxity.dev/gated": "1"}
    body = binding(name, "node-1", written)
    body["metadata"]["labels"] = {"laxity.dev/container": name}
    installed.kube.api_of("laxity", "placer").create(f"{PODS}/{name}/binding", body)

    found = installed.kube.admin.get(f"{PODS}/{name}")
    assert ("node-1", "GPU-1") == (found["spec"]["nodeName"], found["metadata"]["annotations"][DEVICES])
    assert written.items() <= found["metadata"]["annotations"].items()


@pytest.mark.parametrize(("gate", "told"), [("true", [FROM_GATED]), ("false", [{"value": "mine"}])])
def test_one_that_says_gate_is_told_by_its_binding_whether_its_device_has_one(
    installed: Installed, name: str, gate: str, told: list[Json]
) -> None:
    mine = [{"name": "LAXITY_GATE", "value": "mine"}]
    made = installed.alice.create(PODS, pod(name, {"laxity.dev/gate": gate}, limits=GPU, env=mine))
    assert told == entries(made["spec"]["containers"][0])["LAXITY_GATE"]


@pytest.mark.parametrize(
    ("said", "told"),
    [("50ms", "50000"), ("+1.5s", "1500000"), ("750us", "750"), ("2m", "120000000"), (".5s", "500000")],
)
def test_a_container_is_told_its_deadline_in_microseconds(
    installed: Installed, name: str, said: str, told: str
) -> None:
    made = installed.alice.create(f"{PODS}?dryRun=All", pod(name, {"laxity.dev/deadline": said}, limits=GPU))

    assert [{"value": told}] == entries(made["spec"]["containers"][0])["LAXITY_DEADLINE_US"]


def test_a_container_without_a_deadline_is_told_none(installed: Installed, name: str) -> None:
    made = installed.alice.create(f"{PODS}?dryRun=All", pod(name, limits=GPU))

    assert "LAXITY_DEADLINE_US" not in entries(made["spec"]["containers"][0])


def test_pods_of_other_schedulers_are_left_as_they_are(installed: Installed, name: str) -> None:
    made = installed.alice.create(f"{PODS}?dryRun=All", pod(name, scheduler=None))

    assert "env" not in made["spec"]["containers"][0]
    assert DEVICES not in made["metadata"].get("annotations", {})


def test_KU26_no_pod_of_any_shape_costs_its_request(installed: Installed, name: str) -> None:
    """The obvious form of the policy panics in the API server: the connection is cut."""
    full: Json = pod(
        name, env=[{"name": "A", **FROM_DEVICES}, {"name": "B"}], envFrom=[{"configMapRef": {"name": "x"}}]
    )
    full["spec"]["initContainers"] = [{"name": "side", "image": "x", "restartPolicy": "Always"}]
    full["spec"]["volumes"] = [
        {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "more", "projected": {"sources": [{"downwardAPI": {"items": []}}]}},
    ]
    full["spec"]["containers"][0]["volumeMounts"] = [{"name": "cache", "mountPath": "/cache", "readOnly": True}]

    for scheduler in ("laxity", "laxity-direct"):
        for body in (full, pod(name)):
            body["spec"]["schedulerName"] = scheduler
            assert 201 == installed.alice.ask("POST", f"{PODS}?dryRun=All", body)[0]


def test_a_container_added_to_debug_has_the_devices_of_its_pod(installed: Installed, name: str) -> None:
    installed.alice.create(PODS, pod(name, limits=GPU))
    for number in range(2):
        added = {
            "name": f"debug-{number}",
            "image": "cuda",
            "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
        }
        body = {"spec": {"ephemeralContainers": [added]}}
        found = installed.alice.patch(f"{PODS}/{name}/ephemeralcontainers", body)

    assert [FROM_DEVICES, FROM_DEVICES] == [
        entry for each in found["spec"]["ephemeralContainers"] for entry in entries(each)["NVIDIA_VISIBLE_DEVICES"]
    ]


def test_the_example_by_hand_says_what_the_policy_would_inject(installed: Installed) -> None:
    written: Json = yaml.safe_load((ROOT / "k8s/examples/by-hand.yaml").read_text(encoding="utf-8"))

    made = installed.alice.create(f"{PODS}?dryRun=All", written)

    (wanted,), (found,) = written["spec"]["containers"], made["spec"]["containers"]
    assert wanted["env"] == found["env"]
    assert wanted["volumeMounts"] == [mount for mount in found["volumeMounts"] if mount["name"].startswith("laxity-")]
    for volume in made["spec"]["volumes"]:
        volume.get("downwardAPI", {}).pop("defaultMode", None)
    assert [volume for volume in made["spec"]["volumes"] if volume["name"].startswith("laxity-")] == (
        written["spec"]["volumes"]
    )
    assert written["metadata"]["annotations"] == made["metadata"]["annotations"]


def test_the_example_of_a_deployment_is_taken(installed: Installed) -> None:
    example: Json = yaml.safe_load((ROOT / "k8s/examples/deployment.yaml").read_text(encoding="utf-8"))

    assert 201 == installed.alice.ask("POST", "/apis/apps/v1/namespaces/shop/deployments?dryRun=All", example)[0]
    template = example["spec"]["template"] | {"metadata": example["spec"]["template"]["metadata"] | {"name": "one"}}
    made = installed.alice.create("/api/v1/namespaces/laxity-pods/pods?dryRun=All", template)
    assert [{"value": "50000"}] == entries(made["spec"]["containers"][0])["LAXITY_DEADLINE_US"]


# --- who may say which devices ---


@pytest.mark.parametrize("key", [DEVICES, "laxity.dev/gated", "laxity.dev/generation", "laxity.dev/labels"])
@pytest.mark.parametrize("scheduler", ["laxity", None])
def test_KU20_no_user_makes_a_pod_with_devices(
    installed: Installed, name: str, key: str, scheduler: str | None
) -> None:
    said = refusal(installed.alice.ask("POST", PODS, pod(name, {key: "all"}, scheduler)))

    assert f"metadata.annotations: {key} may not be set or changed: Laxity writes it as it binds the pod" == said


def test_KU20_no_user_says_that_a_pod_is_a_placers(installed: Installed, name: str) -> None:
    body = pod(name)
    body["metadata"]["labels"] = {"laxity.dev/container": "x"}
    said = "metadata.labels: laxity.dev/container may not be set or changed: Laxity writes it as it binds the pod"

    assert said == refusal(installed.alice.ask("POST", PODS, body))
    installed.alice.create(PODS, pod(name))
    for path in (f"{PODS}/{name}", f"{PODS}/{name}/status"):
        assert said == refusal(installed.alice.ask("PATCH", path, {"metadata": body["metadata"]}, MERGE))


FORGED = {"metadata": {"annotations": {DEVICES: "all"}}}
REMOVED = {"metadata": {"annotations": {DEVICES: None}}}
BY = {
    "update": ("", MERGE, FORGED),
    "removal": ("", MERGE, REMOVED),
    "status": ("/status", MERGE, FORGED),
    "removal through status": ("/status", MERGE, REMOVED),
    "status with a phase": ("/status", STRATEGIC, {**FORGED, "status": {"phase": "Running"}}),
}


@pytest.mark.parametrize("way", BY)
@pytest.mark.parametrize("bound", [False, True], ids=["waiting", "bound"])
def test_KU20_KU27_no_one_changes_the_devices_of_a_pod(
    installed: Installed, name: str, way: str, *, bound: bool
) -> None:
    subresource, content_type, body = BY[way]
    installed.alice.create(PODS, pod(name, limits=GPU))
    if bound:
        installed.kube.api_of("laxity", "placer").create(
            f"{PODS}/{name}/binding", binding(name, "n", {DEVICES: "GPU-1"})
        )

    for who in (installed.alice, installed.kube.admin, installed.kube.api_as(PLACER, "system:masters")):
        said = refusal(who.ask("PATCH", f"{PODS}/{name}{subresource}", body, content_type))
        assert said.startswith(f"metadata.annotations: {DEVICES} may not be set or changed")

    found = installed.kube.admin.get(f"{PODS}/{name}")
    assert ("GPU-1" if bound else "void") == found["metadata"]["annotations"][DEVICES]


@pytest.mark.parametrize("subresource", ["resize", "ephemeralcontainers"])
def test_KU20_no_other_door_lets_devices_in(installed: Installed, name: str, subresource: str) -> None:
    """These two drop annotations, or refuse; in no case are they changed."""
    installed.alice.create(PODS, pod(name, limits=GPU))

    installed.alice.ask("PATCH", f"{PODS}/{name}/{subresource}", FORGED, STRATEGIC)

    assert "void" == installed.kube.admin.get(f"{PODS}/{name}")["metadata"]["annotations"][DEVICES]


def test_what_is_not_of_the_devices_can_be_changed(installed: Installed, name: str) -> None:
    installed.alice.create(PODS, pod(name, limits=GPU))

    changed = {"metadata": {"annotations": {"team": "a"}, "labels": {"b": "c"}}}
    assert 200 == installed.alice.ask("PATCH", f"{PODS}/{name}", changed, MERGE)[0]
    said = {"status": {"conditions": [{"type": "laxity.dev/Placed", "status": "False", "reason": "Waits"}]}}
    bridge = installed.kube.api_of("laxity", "scheduler")
    assert 200 == bridge.ask("PATCH", f"{PODS}/{name}/status", said, STRATEGIC)[0]


@pytest.mark.parametrize("door", ["pods/{}/binding", "bindings"])
@pytest.mark.parametrize("who", ["alice", "system:serviceaccount:laxity:scheduler"])
@pytest.mark.parametrize("key", [DEVICES, "laxity.dev/anything"])
def test_KU20_a_binding_of_anybody_else_carries_nothing_of_ours(
    installed: Installed, name: str, door: str, who: str, key: str
) -> None:
    installed.alice.create(PODS, pod(name, limits=GPU))
    api = installed.kube.api_as(who, "system:masters")

    path = f"/api/v1/namespaces/shop/{door.format(name)}"
    said = refusal(api.ask("POST", path, binding(name, "n", {key: "all"})))

    assert f"metadata: found laxity.dev/ in a Binding by {who}, allowed: by {PLACER} alone" == said
    labelled = binding(name, "n") | {"metadata": {"name": name, "labels": {key: "all"}}}
    assert said == refusal(api.ask("POST", path, labelled))
    assert "nodeName" not in installed.kube.admin.get(f"{PODS}/{name}")["spec"]
    assert 201 == api.ask("POST", path, binding(name, "n", {"team": "a"}))[0]  # and has no devices


# --- what a pod may ask ---


def test_KU22_what_is_ours_is_asked_of_our_scheduler_alone(installed: Installed, name: str) -> None:
    for scheduler, found in (("default-scheduler", "default-scheduler"), (None, "default-scheduler"), ("x", "x")):
        said = refusal(installed.alice.ask("POST", PODS, pod(name, scheduler=scheduler, limits=GPU)))
        assert said.startswith(f'spec.schedulerName: found "{found}", allowed: laxity, since laxity.dev/gpu-mi')


def test_two_systems_do_not_both_give_devices(installed: Installed, name: str) -> None:
    for theirs in ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb"):
        said = refusal(installed.alice.ask("POST", PODS, pod(name, limits={**GPU, theirs: "1"})))
        assert said.startswith("spec.containers[].resources: found nvidia.com/ beside laxity.dev/")
    assert 201 == installed.alice.ask("POST", f"{PODS}?dryRun=All", pod(name, None, None, {"nvidia.com/gpu": "1"}))[0]


def test_a_pod_of_ours_neither_sees_all_devices_nor_goes_past_us(installed: Installed, name: str) -> None:
    privileged = pod(name, limits=GPU, securityContext={"privileged": True})
    by_cdi = pod(name, {"cdi.k8s.io/all": "nvidia.com/gpu=all"}, limits=GPU)
    bound = pod(name, limits=GPU)
    bound["spec"]["nodeName"] = "node-1"

    assert refusal(installed.alice.ask("POST", PODS, privileged)).startswith("spec.containers[].securityContext.privil")
    assert refusal(installed.alice.ask("POST", PODS, by_cdi)).startswith("metadata.annotations: found cdi.k8s.io/")
    assert refusal(installed.alice.ask("POST", PODS, bound)).startswith("spec.nodeName: found one, allowed: none")


TEMPLATES = {
    "/apis/apps/v1/namespaces/shop/deployments": "Deployment",
    "/apis/apps/v1/namespaces/shop/statefulsets": "StatefulSet",
    "/apis/apps/v1/namespaces/shop/daemonsets": "DaemonSet",
    "/apis/apps/v1/namespaces/shop/replicasets": "ReplicaSet",
    "/apis/batch/v1/namespaces/shop/jobs": "Job",
    "/apis/batch/v1/namespaces/shop/cronjobs": "CronJob",
}


def workload(kind: str, name: str, annotations: dict[str, str]) -> Json:
    template = pod("x", annotations, limits=GPU)
    template["metadata"] = {"labels": {"app": name}, "annotations": annotations}
    if kind in {"Job", "CronJob"}:
        template["spec"]["restartPolicy"] = "Never"
        spec: Json = {"template": template}
    else:
        spec = {"template": template, "selector": {"matchLabels": {"app": name}}}
    if kind == "StatefulSet":
        spec["serviceName"] = name
    if kind == "CronJob":
        spec = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": spec}}
    return {"metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("path", TEMPLATES)
def test_a_deadline_that_cannot_be_read_is_refused_where_it_is_applied(
    installed: Installed, name: str, path: str
) -> None:
    kind = TEMPLATES[path]

    said = refusal(installed.alice.ask("POST", path, workload(kind, name, {"laxity.dev/deadline": "50"})))
    assert said.startswith(
        'metadata.annotations[laxity.dev/deadline]: found "50", allowed: a number above 0 with its unit'
    )
    assert 201 == installed.alice.ask("POST", path, workload(kind, name, {"laxity.dev/deadline": "50ms"}))[0]
    worse = workload(kind, name, {"laxity.dev/deadline": "soon"})["spec"]
    if kind not in {"Job"}:  # whose template never changes
        said = refusal(installed.alice.ask("PATCH", f"{path}/{name}", {"spec": worse}, MERGE))
        assert 'found "soon"' in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("period", "10"),
        ("runtime", "0ms"),
        ("kind", "urgent"),
        ("guarantee", "1"),
        ("guarantee", "0.0"),
        ("guarantee", "99%"),
        ("gate", "yes"),
    ],
)
def test_other_annotations_are_read_too(installed: Installed, name: str, key: str, value: str) -> None:
    said = refusal(installed.alice.ask("POST", PODS, pod(name, {f"laxity.dev/{key}": value}, limits=GPU)))

    assert said.startswith(f'metadata.annotations[laxity.dev/{key}]: found "{value}", allowed: ')


def test_a_word_that_is_misspelt_is_refused(installed: Installed, name: str) -> None:
    said = refusal(installed.alice.ask("POST", PODS, pod(name, {"laxity.dev/dedline": "50ms"}, limits=GPU)))
    assert said.startswith("laxity.dev/dedline: unknown, allowed: of annotations laxity.dev/deadline, period, ")

    limits = {"laxity.dev/gpu-mili": "250"}
    said = refusal(installed.alice.ask("POST", PODS, pod(name, limits=limits)))
    assert said.startswith("laxity.dev/gpu-mili")


def test_what_can_be_read_is_let_in(installed: Installed, name: str) -> None:
    said = {
        "deadline": "50ms",
        "period": "+1.5s",
        "runtime": "12ms",
        "kind": "hard",
        "guarantee": ".999",
        "gate": "true",
    }
    body = pod(name, {f"laxity.dev/{key}": value for key, value in said.items()}, limits=GPU)

    assert 201 == installed.alice.ask("POST", f"{PODS}?dryRun=All", body)[0]
