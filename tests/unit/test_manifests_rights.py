"""What the manifests of k8s/ may do: rights at the API server and on the machine, each one written down here too."""

from __future__ import annotations

import pytest

from tests.manifests import OVERLAYS, Json, Pod, objects, of_kind, pods, rules

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

RIGHTS = {
    "laxity/placer": {
        ("", "", "nodes", "get"),
        ("", "", "pods", "get list watch"),
        ("", "", "pods/binding", "create"),
        ("", "", "pods/eviction", "create"),
        ("laxity-pods", "", "pods", "create delete"),
        ("laxity-pods", "", "pods/resize", "patch"),
    },
    "laxity/scheduler": {
        ("", "", "nodes", "list watch"),
        ("", "", "pods", "get list watch"),
        ("", "", "pods/binding", "create"),
        ("", "", "pods/status", "patch"),
        ("", "resource.k8s.io", "deviceclasses", "list watch"),
        ("", "resource.k8s.io", "resourceclaims", "get list watch"),
        ("", "resource.k8s.io", "resourceslices", "list watch"),
        ("laxity", "coordination.k8s.io", "leases", "create"),
        ("laxity", "coordination.k8s.io", "leases", "get update"),
    },
}
"""Of each account: where ("" is everywhere), API group, resource, verbs."""
KUBERNETES_OWN = {"system:kube-scheduler", "system:volume-scheduler", "extension-apiserver-authentication-reader"}
TOKENS = {"placer", "scheduler"}
RESTRICTED_VOLUMES = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
MONITOR_NEEDS = {
    "hostPID",
    "hostPath /run/laxity/rings",
    "hostPath /sys/fs/cgroup",
    "hostPath /var/lib/kubelet/pod-resources",
    "hostPath /var/lib/kubelet/pods",
    "key: may be root",
    "monitor: capability DAC_OVERRIDE",
    "monitor: capability SYS_PTRACE",
    "monitor: may be root",
}


@each_overlay
def test_KU15_every_account_has_the_rights_written_here_and_no_other(overlay: str) -> None:
    found: dict[str, set[tuple[str, str, str, str]]] = {}
    for account, where, rule in rules(overlay):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault(account, set()).add((where, group, resource, " ".join(rule["verbs"])))

    assert RIGHTS == found
    roles = {b["roleRef"]["name"] for b in of_kind(overlay, "RoleBinding", "ClusterRoleBinding")}
    ours = {role["metadata"]["name"] for role in of_kind(overlay, "Role", "ClusterRole")}
    assert KUBERNETES_OWN == roles - ours


@each_overlay
def test_KU15_nobody_is_an_administrator(overlay: str) -> None:
    for _, _, rule in rules(overlay):
        assert not {"*"} & {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & {*rule["verbs"]}
        assert "nonResourceURLs" not in rule
        assert not {"secrets", "serviceaccounts/token", "pods/exec", "nodes/proxy"} & {*rule["resources"]}


@each_overlay
def test_only_who_talks_to_the_api_server_has_a_token(overlay: str) -> None:
    assert TOKENS == {pod.name for pod in pods(overlay) if pod.spec["automountServiceAccountToken"]}
    assert {False} == {account["automountServiceAccountToken"] for account in of_kind(overlay, "ServiceAccount")}


def beyond_restricted(pod: Pod) -> set[str]:
    """What the level `restricted` of Kubernetes' Pod Security Standards would refuse."""
    found = {host for host in ("hostPID", "hostIPC", "hostNetwork") if pod.spec.get(host)}
    for volume in pod.spec.get("volumes", ()):
        (kind,) = volume.keys() - {"name"}
        if kind not in RESTRICTED_VOLUMES:
            found.add(f"{kind} {volume[kind].get('path', '')}")
    for container in pod.all_containers:
        found |= {f"{container['name']}: {each}" for each in _wide(container, pod.spec["securityContext"])}
    return found


def _wide(container: Json, of_pod: Json) -> set[str]:
    own = container["securityContext"]
    found = {f"capability {name}" for name in own["capabilities"].get("add", ()) if name != "NET_BIND_SERVICE"}
    checks = {
        "privileged": own.get("privileged", False),
        "may gain privileges": own["allowPrivilegeEscalation"],
        "keeps capabilities": own["capabilities"]["drop"] != ["ALL"],
        "may be root": not {**of_pod, **own}.get("runAsNonRoot", False),
        "no seccomp": {**of_pod, **own}["seccompProfile"]["type"] != "RuntimeDefault",
        "a host port": any("hostPort" in port for port in container.get("ports", ())),
    }
    return found | {name for name, wide in checks.items() if wide}


@each_overlay
def test_all_pods_are_restricted_but_the_monitor_which_needs_what_it_says(overlay: str) -> None:
    beyond = {pod.name: found for pod in pods(overlay) if (found := beyond_restricted(pod))}

    assert {"monitor": MONITOR_NEEDS - ({"key: may be root"} if overlay == "demo" else set())} == beyond
    levels = {
        found["metadata"]["name"]: found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for found in of_kind(overlay, "Namespace")
    }
    assert {"laxity": "restricted", "laxity-nodes": "privileged", "laxity-pods": "baseline"} == levels
    assert ["laxity-nodes"] == [pod.namespace for pod in pods(overlay) if pod.name == "monitor"]


@each_overlay
def test_no_container_writes_to_its_own_image(overlay: str) -> None:
    for pod in pods(overlay):
        for container in pod.all_containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, container["name"]


@each_overlay
def test_a_key_is_seen_by_the_step_that_copies_it_and_by_its_service_alone(overlay: str) -> None:
    secrets = {
        volume["secret"]["secretName"]: [each["name"] for each in pod.all_containers if _mounts(each, volume["name"])]
        for pod in pods(overlay)
        for volume in pod.spec["volumes"]
        if "secret" in volume and pod.name != "nats"
    }

    assert ([] if overlay == "demo" else [["key"]] * 5) == [*secrets.values()]


def _mounts(container: Json, volume: str) -> bool:
    return any(mount["name"] == volume for mount in container["volumeMounts"])


@each_overlay
def test_nothing_is_reached_that_no_policy_names(overlay: str) -> None:
    """Port and whether anybody may come, of each way in that a policy opens."""
    policies = of_kind(overlay, "NetworkPolicy")
    (closed,) = (found for found in policies if found["metadata"]["name"] == "nothing-else")
    ways = {
        (found["metadata"]["namespace"], found["metadata"]["name"], port["port"], "from" in way)
        for found in policies
        for way in found["spec"].get("ingress", ())
        for port in way["ports"]
    }

    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} == closed["spec"]
    assert {
        ("laxity", "metrics", 9464, True),
        ("laxity", "nats", 4222, True),
        ("laxity", "nats", 6222, True),
        ("laxity-nodes", "metrics", 9464, True),
    } == ways


@each_overlay
def test_policies_bind_and_leave_out_who_must_not_wait_for_them(overlay: str) -> None:
    policies = [found for found in objects(overlay) if found["kind"].endswith("AdmissionPolicy")]
    bindings = [found for found in objects(overlay) if found["kind"].endswith("AdmissionPolicyBinding")]

    assert {found["metadata"]["name"] for found in policies} == {found["spec"]["policyName"] for found in bindings}
    assert {"Fail"} == {found["spec"]["failurePolicy"] for found in policies}
    for found in policies:
        if found["metadata"]["name"] in {"pods.laxity.dev", "injection.laxity.dev", "debugging.laxity.dev"}:
            (left_out,) = found["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
            assert ("NotIn", ["kube-system", "laxity", "laxity-nodes"]) == (left_out["operator"], left_out["values"])
