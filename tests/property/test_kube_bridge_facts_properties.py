"""Whatever happens to pods, nodes and the ledger: what was told last of a node is what is so, after a while."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kube_bridge.calls import NodeChanged, NodeGone
from services.kube_bridge.core import SOON
from services.kube_bridge.facts import GRACE_TICKS
from services.kube_bridge.seen import NodeSeen
from shared.effects import Effect, Emit
from shared.messages import KubeNodeFacts, State
from tests.kube_bridge_world import Bridge, wanting
from tests.kube_pods import node

NODES = ("n1", "n2")
UIDS = ("u-1", "u-2")
OURS = {"devices": "GPU-1"}
SHOWN = st.fixed_dictionaries(
    {
        "uid": st.sampled_from(UIDS),
        "node": st.sampled_from(["", "n1", *NODES]),
        "phase": st.sampled_from(["Running", "Running", "Failed"]),
        "cpu": st.sampled_from(["1", "250m", "a lot"]),
        "annotations": st.sampled_from([{}, OURS]),
    }
)
RECORDED = st.tuples(
    st.sampled_from(UIDS),
    st.sampled_from([State.HELD, State.STARTED, State.EXITED, State.EXPIRED]),
    st.sampled_from(NODES),
)
STEPS = st.one_of(
    st.tuples(st.just("show"), SHOWN),
    st.tuples(st.just("delete"), st.sampled_from(UIDS)),
    st.tuples(st.just("record"), RECORDED),
    st.tuples(st.just("node"), st.tuples(st.sampled_from(NODES), st.sampled_from(["4", "8"]))),
    st.tuples(st.just("gone"), st.sampled_from(NODES)),
    st.tuples(st.just("tick"), st.integers(1, GRACE_TICKS)),
)


class Heard:
    """A node list that hears all of it, and what is so."""

    def __init__(self) -> None:
        self.bridge = Bridge(*NODES)
        self.told: dict[str, KubeNodeFacts] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.reserved: dict[str, str] = {}
        self.cpu = dict.fromkeys(NODES, "8")

    def take(self, effects: list[Effect]) -> None:
        bodies = [each.body for each in effects if isinstance(each, Emit)]
        self.told |= {each.node: each for each in bodies if isinstance(each, KubeNodeFacts)}

    def do(self, what: str, how: Any) -> None:
        match what:
            case "show":
                self.pods[how["uid"]] = how
                self.bridge.show(wanting(**how))
            case "delete":
                self.pods.pop(how, None)
                self.bridge.delete(wanting(uid=how))
            case "record":
                uid, state, where = how
                self.reserved[uid] = where if state in {State.HELD, State.STARTED} else ""
                self.bridge.record(wanting(uid=uid), state, where)
            case "node":
                name, self.cpu[how[0]] = how
                self.bridge.tell(NodeChanged(NodeSeen.of(node(name, cpu=how[1]))))
            case "gone":
                self.cpu.pop(how, None)
                self.bridge.tell(NodeGone(how))
            case _:
                self.tick(how)

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.take(self.bridge.tick(SOON, 1))

    def so(self, name: str) -> tuple[int | None, int | None]:
        """What the node can give, and what pods without a reservation there take of it; None: nobody knows."""
        there = [pod for pod in self.pods.values() if pod["node"] == name and pod["phase"] != "Failed"]
        taken = [pod["cpu"] for pod in there if self.reserved.get(pod["uid"]) != name]
        known = {"1": 1000, "250m": 250}
        foreign = sum(known[each] for each in taken) if "a lot" not in taken else None
        return int(self.cpu[name]) * 1000, foreign


@settings(max_examples=300)
@given(st.lists(STEPS, min_size=5, max_size=30))
def test_what_was_told_last_is_so(steps: list[tuple[str, Any]]) -> None:
    heard = Heard()
    for what, how in steps:
        heard.do(what, how)
        heard.tick(1)
    heard.tick(GRACE_TICKS + 2)
    for name in NODES:
        told = heard.told[name]
        assert told.gone == (name not in heard.cpu)
        if not told.gone:
            assert heard.so(name) == (told.cpu_milli, told.foreign_cpu_milli)
