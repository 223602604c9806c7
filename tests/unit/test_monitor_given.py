"""Devices that a kubelet gave to pods by device plugins: read, kept while nothing is heard, told by uuid."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given as any_of
from hypothesis import strategies as st

from services.monitor.core import METRICS, Core, Limits
from services.monitor.given import RELEASE_AFTER, Given, KubeletSaid
from services.monitor.pod_resources import Holding, holdings
from services.monitor.probes.base import Capacity
from shared.effects import Emit, Tick
from shared.errors import FieldError
from shared.messages import SOMEBODY, DeviceMetrics, Measured, NodeMetrics, Regime
from tests.wire import pod_resources, put

UNKNOWN = Measured(value=None, reason="not_supported")
ONE = (Holding("GPU-1", "nvidia.com/gpu", "shop/train"),)
TRAIN = "pod shop/train by nvidia.com/gpu"


def device(uuid: str, parent: str | None = None) -> DeviceMetrics:
    said = {"utilisation_ratio": UNKNOWN, "memory_used_mib": UNKNOWN, "memory_mib": None}
    return DeviceMetrics(uuid=uuid, index=0, model="H200", regime=Regime.EXCLUSIVE, healthy=True, parent=parent, **said)


def holders(given: Given, *devices: DeviceMetrics) -> list[str | None]:
    return [each.plugin_holder for each in given.marked(devices or (device("GPU-1"), device("GPU-2")))]


def heard(*answers: tuple[Holding, ...] | None) -> Given:
    made = Given()
    for number, answer in enumerate(answers):
        made.take(KubeletSaid(answer, "" if answer is not None else "no such file"), number)
    return made


def test_an_answer_names_who_has_which_device() -> None:
    answer = pod_resources(("shop", "train", "nvidia.com/gpu", ("GPU-1", "GPU-2")), ("shop", "web", "x/nic", ("n0",)))

    assert (
        Holding("GPU-1", "nvidia.com/gpu", "shop/train"),
        Holding("GPU-2", "nvidia.com/gpu", "shop/train"),
        Holding("n0", "x/nic", "shop/web"),
    ) == holdings(answer)
    assert () == holdings(b"")
    assert () == holdings(put(1, put(1, "idle") + put(2, "shop") + put(3, put(1, "main"))))


@pytest.mark.parametrize(
    "answer, found",
    [
        (b"\x0a\x05\x0a", "1 bytes left"),
        (b"\x0b", "kind 3"),
        (b"\xff" * 11, "number without an end"),
        (put(1, put(3, put(2, put(2, b"\xff\xfe")))), "UTF-8"),
    ],
)
def test_what_is_no_answer_is_refused_and_says_why(answer: bytes, found: str) -> None:
    with pytest.raises(FieldError, match=found):
        holdings(answer)


@any_of(st.binary(max_size=200))
def test_whatever_comes_is_read_or_refused(answer: bytes) -> None:
    with contextlib.suppress(FieldError):
        assert isinstance(holdings(answer), tuple)


def test_a_device_that_a_pod_was_given_says_so_and_the_other_one_does_not() -> None:
    assert [TRAIN, None] == holders(heard(ONE))


@pytest.mark.parametrize("name", ["GPU-1::3", "GPU-1-0", "GPU-1"])
def test_a_device_that_its_plugin_shares_is_known_by_what_stands_before_the_replica(name: str) -> None:
    assert [TRAIN, None] == holders(heard((Holding(name, "nvidia.com/gpu", "shop/train"),)))


def test_the_parts_of_a_gpu_are_held_by_themselves_or_with_the_whole() -> None:
    parts = (device("MIG-a", "GPU-1"), device("MIG-b", "GPU-1"), device("MIG-c", "GPU-2"))
    one = heard((Holding("MIG-b", "nvidia.com/mig-1g.10gb", "shop/train"),))
    whole = heard(ONE)

    assert [None, "pod shop/train by nvidia.com/mig-1g.10gb", None] == holders(one, *parts)
    assert [TRAIN, TRAIN, None] == holders(whole, *parts)


def test_a_gpu_whose_id_is_no_uuid_may_be_any_and_another_resource_is_none_of_ours() -> None:
    assert [TRAIN, TRAIN] == holders(heard((Holding("0", "nvidia.com/gpu", "shop/train"),)))
    assert [None, None] == holders(heard((Holding("0", "nvidia.com/hostdev", "shop/web"),)))
    assert [None, None] == holders(heard((Holding("GPU-gone", "nvidia.com/gpu", "shop/train"),)))


def test_before_the_first_answer_nothing_is_free() -> None:
    assert [SOMEBODY, SOMEBODY] == holders(Given()) == holders(heard(None))
    assert [None, None] == holders(heard(()))


def test_a_kubelet_that_does_not_answer_leaves_what_it_said_last_with_its_age() -> None:
    given = heard(ONE, None, None)

    assert [TRAIN, None] == holders(given)
    assert {"kubelet_age_us": 1_000, "kubelet_stale": "no such file"} == given.told(1_000)
    assert {"kubelet.answers": 1, "kubelet.failed": 2} == given.counts


def test_a_kubelet_that_was_restarted_and_tells_of_no_pods_at_first_frees_nothing() -> None:
    assert [TRAIN, None] == holders(heard(ONE, *[()] * (RELEASE_AFTER - 1)))
    assert [TRAIN, None] == holders(heard(ONE, *[()] * (RELEASE_AFTER - 1), None, ()))
    assert [TRAIN, None] == holders(heard(ONE, *[()] * (RELEASE_AFTER - 1), ONE, ()))
    assert [None, None] == holders(heard(ONE, *[()] * RELEASE_AFTER))


def test_the_heartbeat_has_it() -> None:
    core = Core("n1", "s", "b", Capacity(1, 1), limits=Limits(kubelet=True))
    assert (None, None) == said(core)
    core.handle(KubeletSaid(None, "no such file"), 1)
    assert (None, "no such file") == said(core)
    core.handle(KubeletSaid(ONE), 2)
    assert (8, None) == said(core)
    assert 1 == told(core).counters["kubelet.answers"]


def said(core: Core) -> tuple[int | None, str | None]:
    found = told(core)
    return found.kubelet_age_us, found.kubelet_stale


def told(core: Core) -> NodeMetrics:
    (emit,) = core.handle(Tick(METRICS, 10), 10)
    assert isinstance(emit, Emit)
    assert isinstance(emit.body, NodeMetrics)
    return emit.body
