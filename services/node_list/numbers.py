"""The node-list's numbers for /metrics: nodes by state, and per class what its list holds; not a series per device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from services.node_list.core import Core
from services.node_list.ranking import Ranking
from shared.messages import DeviceStanding, NodeState
from shared.metrics import Metric, Sample

_ACTIVE: Final = Metric("laxity_node_list_active", "gauge", "1 for the node-list that writes, 0 for a standby.")
_NODES: Final = Metric("laxity_nodes", "gauge", "Nodes by state.", ("state",))
_DEVICES: Final = Metric("laxity_list_devices", "gauge", "Devices in the list of a class.", ("class", "standing"))
_SLACK: Final = Metric(
    "laxity_list_slack_seconds",
    "gauge",
    "Slack of the guaranteed devices of a class: of the best, the middle and the last one that is known.",
    ("class", "device"),
)
_REVISION: Final = Metric("laxity_list_revision", "gauge", "Revision of the list of a class.", ("class",))
METRICS: Final = (_ACTIVE, _NODES, _DEVICES, _SLACK, _REVISION)


def numbers(core: Core) -> Iterator[Sample]:
    """By the writer alone, so that sums count each once."""
    yield from _ACTIVE.of(core.lease.active)
    if not core.lease.active:
        return
    states = Counter(view.liveness.state for view in core.nodes.values())
    for state in NodeState:
        yield from _NODES.of(states[state], state)
    for wanted, ranking in core.lists.rankings.items():
        yield from _REVISION.of(core.lists.revision(wanted), wanted)
        for standing, count in ranking.counts().items():
            yield from _DEVICES.of(count, wanted, standing)
        yield from _slack(wanted, ranking)


def _slack(wanted: str, ranking: Ranking) -> Iterator[Sample]:
    for device, slack_us in zip(("best", "middle", "last"), ranking.slacks_us(DeviceStanding.GUARANTEED), strict=False):
        yield from _SLACK.of(slack_us / 1e6, wanted, device)
