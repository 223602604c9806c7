"""What a pod asks for: its resources as Kubernetes counts them, its annotations, and what it is told is wrong."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from services.kube_bridge.asked import Terms, asked, wants
from services.kube_bridge.resources import reserves
from shared.errors import FieldError
from shared.messages import Kind, PlaceRequest
from tests.kube_pods import container, pod

TERMS = Terms(hold_us=30_000_000, strategy="deadline")


def request_of(found: dict[str, Any]) -> PlaceRequest:
    said = asked(found, TERMS)
    assert said is not None
    return said.request


def fault_of(found: dict[str, Any]) -> FieldError:
    with pytest.raises(FieldError) as raised:
        asked(found, TERMS)
    return raised.value


def test_pods_that_ask_for_the_same_ask_it_for_themselves_and_another_word_is_another_request() -> None:
    """What was read of one of them is not read again."""
    words = {"deadline": "50ms", "runtime": "12ms", "kind": "firm"}
    first, second, later = (
        asked(pod(name, uid, gpu_milli=250, cpu="250m", annotations=words | {"deadline": due}), TERMS)
        for name, uid, due in (("a", "u-1", "50ms"), ("b", "u-2", "50ms"), ("c", "u-3", "60ms"))
    )
    assert first is not None
    assert second is not None
    assert later is not None
    assert (True, False) == (first.kind == second.kind, first.kind == later.kind)
    for each, (name, uid, due) in ((first, ("a", "u-1", 50_000)), (later, ("c", "u-3", 60_000))):
        (its,) = each.request.pods or ()
        assert (uid, name, uid, name) == (each.request.request_id, each.request.name, its.uid, its.name)
        assert due == (each.request.realtime and each.request.realtime.deadline_us)
    for each in (first, second, later):
        assert each.request == PlaceRequest.from_json(each.request.to_json())
    assert 100 == request_of(pod(gpu_milli=250, cpu="100m")).cpu_milli


# --- resources ---


@pytest.mark.parametrize(
    "text, milli",
    [
        ("1", 1000),
        ("250m", 250),
        ("0.1", 100),
        ("1500u", 2),
        ("1n", 1),
        ("1e3", 1_000_000),
        ("2E0", 2000),
        ("1k", 1_000_000),
        (2, 2000),
        ("100.0001m", 101),
    ],
)
def test_cpu_is_read_as_kubernetes_does_and_rounded_up(text: object, milli: int) -> None:
    assert milli == reserves(pod(containers=[container(cpu=text)])).cpu_milli()


@pytest.mark.parametrize(
    "text, mib",
    [("1Gi", 1024), ("1G", 954), ("128974848", 123), ("129e6", 124), ("129M", 124), ("123Mi", 123), ("1", 1)],
)
def test_memory_is_in_bytes_and_rounded_up(text: str, mib: int) -> None:
    assert mib == reserves(pod(containers=[container(memory=text)])).memory_mib()


@pytest.mark.parametrize("text", ["1x", "", "1 Gi", "Ki", "1e", "--1", "1KI"])
def test_a_quantity_that_kubernetes_would_not_take_is_named(text: str) -> None:
    with pytest.raises(FieldError) as raised:
        reserves(pod(containers=[container("web", cpu=text)])).cpu_milli()

    assert "spec.containers[web].resources.requests[cpu]" == raised.value.field
    assert "a number with one of" in raised.value.allowed


def test_sidecars_add_up_and_of_other_init_containers_the_largest_counts() -> None:
    """KEP-753: an init container beside the sidecars before it, or all that runs later."""
    sidecar = container("side", cpu="100m") | {"restartPolicy": "Always"}
    late = container("late", cpu="50m") | {"restartPolicy": "Always"}
    containers = [container("a", cpu="200m"), container("b", cpu="300m")]

    assert (
        650
        == reserves(pod(containers=containers, initContainers=[sidecar, container("i", cpu="500m"), late])).cpu_milli()
    )
    assert (
        1100
        == reserves(pod(containers=containers, initContainers=[sidecar, container("i", cpu="1"), late])).cpu_milli()
    )


def test_the_resources_of_the_pod_stand_instead_and_its_overhead_comes_on_top() -> None:
    found = pod(containers=[container(cpu="2", memory="1Gi")], resources={"requests": {"cpu": "1"}})
    found["spec"]["overhead"] = {"cpu": "250m"}

    assert (1250, 1024) == (reserves(found).cpu_milli(), reserves(found).memory_mib())


def test_a_limit_without_a_request_is_both() -> None:
    found = pod(containers=[{"name": "a", "resources": {"limits": {"cpu": "3"}}}])

    assert Fraction(3) == reserves(found).requested("cpu")


# --- what it asks of us ---


def test_a_pod_without_our_resources_asks_for_nothing() -> None:
    plain = pod(containers=[container(cpu="1")])

    assert asked(plain, TERMS) is None
    assert not wants(reserves(plain))


def test_a_share_with_its_deadline_is_a_request_by_the_uid_of_the_pod() -> None:
    annotations = {"deadline": "50ms", "period": "100ms", "runtime": "12ms", "kind": "firm", "guarantee": "0.95"}
    request = request_of(
        pod(gpu_milli=250, gpu_mib=4096, annotations=annotations, priority=7, cpu="500m", memory="1Gi")
    )

    assert request.gpu is not None
    assert request.realtime is not None
    assert request.pods is not None
    assert ("u-1", 30_000_000, False, 7) == (request.request_id, request.hold_us, request.queue, request.priority)
    assert [("default", "web", "u-1")] == [(each.namespace, each.name, each.uid) for each in request.pods]
    assert (1, 0.25, 4096) == (request.gpu.count, request.gpu.share, request.gpu.memory_mib)
    assert (500, 1024) == (request.cpu_milli, request.memory_mib)
    timing = request.realtime
    assert (50_000, 100_000, 12_000) == (timing.deadline_us, timing.period_us, timing.runtime_us)
    assert (Kind.FIRM, 0.95, "image:1 12000") == (timing.kind, timing.guarantee, timing.profile)


def test_thousands_are_whole_devices() -> None:
    gpu = request_of(pod(gpu_milli=2000)).gpu

    assert gpu is not None
    assert (2, 1.0) == (gpu.count, gpu.share)


def test_pods_that_ask_for_the_same_are_of_one_kind_and_others_are_not() -> None:
    first, second, third = (
        said.kind
        for found in (
            pod(gpu_milli=250),
            pod(name="other", uid="u-2", gpu_milli=250),
            pod(gpu_milli=250, annotations={"deadline": "50ms", "kind": "soft"}),
        )
        if (said := asked(found, TERMS))
    )

    assert first == second != third


@pytest.mark.parametrize(
    "found, field, allowed",
    [
        (pod(gpu_milli=250, annotations={"deadline": "50"}), "annotations[laxity.dev/deadline]", "with its unit"),
        (pod(gpu_milli=250, annotations={"deadline": "fast"}), "annotations[laxity.dev/deadline]", "with its unit"),
        (pod(gpu_milli=250, annotations={"deadline": "0ms"}), "annotations[laxity.dev/deadline]", "above 0"),
        (pod(gpu_milli=250, annotations={"runtime": "1ms"}), "annotations[laxity.dev/deadline]", "a duration"),
        (pod(gpu_milli=250, annotations={"deadline": "50ms"}), "annotations[laxity.dev/runtime]", "kind firm needs it"),
        (
            pod(gpu_milli=250, annotations={"deadline": "50ms", "kind": "strict"}),
            "annotations[laxity.dev/kind]",
            "'hard', 'firm' or 'soft'",
        ),
        (
            pod(gpu_milli=250, annotations={"deadline": "50ms", "runtime": "1ms", "guarantee": "all"}),
            "annotations[laxity.dev/guarantee]",
            "above 0 and below 1",
        ),
        (
            pod(gpu_milli=250, annotations={"deadline": "50ms", "runtime": "1ms", "guarantee": "1.5"}),
            "annotations[laxity.dev/guarantee]",
            "below 1",
        ),
        (pod(gpu_milli=250, annotations={"deadline": "1s", "gate": "yes"}), "annotations[laxity.dev/gate]", "true or"),
        (pod(annotations={"deadline": "50ms"}), "limits[laxity.dev/gpu-milli]", "laxity.dev/deadline needs a device"),
        (pod(gpu_mib=4096), "limits[laxity.dev/gpu-milli]", "laxity.dev/gpu-mib is memory of that device"),
        (pod(extra={"laxity.dev/gpu-mili": "250"}), "limits[laxity.dev/gpu-mili]", "laxity.dev/gpu-milli"),
        (pod(gpu_milli=250, annotations={"dedline": "1s"}), "annotations[laxity.dev/dedline]", "deadline, period"),
        (pod(gpu_milli=1500), "limits[laxity.dev/gpu-milli]", "a multiple of 1000"),
        (pod(gpu_milli=250, extra={"nvidia.com/gpu": "1"}), "limits[nvidia.com/gpu]", "two systems"),
    ],
)
def test_what_cannot_be_read_or_contradicts_itself_is_named(found: dict[str, Any], field: str, allowed: str) -> None:
    fault = fault_of(found)

    assert field == fault.field
    assert allowed in fault.allowed


@pytest.mark.parametrize(
    "spec, milli",
    [
        ({"containers": [container("web", cpu="200m")]}, 200),
        ({"containers": [container("web", cpu="100m"), container("log", cpu="100m")]}, 200),
        ({"initContainers": [container("web", cpu="300m")]}, 300),
        ({"initContainers": [container("web", cpu="300m") | {"restartPolicy": "Always"}]}, 400),
        ({"resources": {"requests": {"cpu": "50m"}}}, 50),
        ({"overhead": {"cpu": "10m"}}, 110),
    ],
)
def test_pods_that_say_the_same_are_read_once_and_others_by_themselves(spec: dict[str, Any], milli: int) -> None:
    one = pod(containers=[container("web", cpu="100m")])
    assert reserves(one) is reserves(pod("other", "u-2", containers=[container("web", cpu="100m")], priority=5))
    assert (100, milli) == (reserves(one).cpu_milli(), reserves(one | {"spec": one["spec"] | spec}).cpu_milli())
