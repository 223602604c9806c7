"""Whatever comes in whatever order: each call gets one answer, and nobody is asked about ahead twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.kube_bridge.calls import Answer, AskPlace, PlaceAnswered
from shared.effects import Effect
from shared.messages import PlaceReply
from tests.kube_bridge_world import SECOND, Bridge, held, rejected, wanting

PODS = [wanting(f"u-{number}", f"u-{number}", gpu_milli=250 * (1 + number % 2)) for number in range(8)]
NODES = ("n1", "n2", "n3")
STEPS = st.lists(
    st.tuples(st.sampled_from(["show", "filter", "place", "place", "refuse", "silence", "delete", "later"]),
              st.integers(0, len(PODS) - 1), st.sampled_from(NODES)),
    max_size=60,
)  # fmt: skip


@dataclass
class World:
    bridge: Bridge = field(default_factory=lambda: Bridge(ahead=3))
    calls: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Not answered yet: the nodes offered, by token."""
    questions: dict[int, str] = field(default_factory=dict)
    """To the placers, not answered yet: about which pod, by token."""
    generation: int = 0

    def take(self, effects: list[Effect]) -> None:
        for each in effects:
            if isinstance(each, Answer):
                assert set(each.body["NodeNames"]) <= set(self.calls.pop(each.token))
            elif isinstance(each, AskPlace):
                uid = each.request.request_id or ""
                assert each.token > 0 or uid not in self.questions.values(), f"{uid} is asked about already"
                self.questions[each.token] = uid

    def filter(self, place: int, node: str) -> None:
        offered = NODES if place % 2 else (node,)
        self.calls[self.bridge.tokens + 1] = offered
        self.take(self.bridge.filter(PODS[place], offered)[1])

    def reply(self, place: int, answer: str, node: str) -> None:
        if self.questions:
            token = list(self.questions)[place % len(self.questions)]
            uid = self.questions.pop(token)
            self.generation += 1
            replies: dict[str, PlaceReply | None] = {"refuse": rejected(uid), "silence": None}
            self.take(self.bridge.tell(PlaceAnswered(token, replies.get(answer, held(uid, node, self.generation)))))


@given(STEPS)
def test_each_call_gets_one_answer_among_the_nodes_that_were_offered(steps: list[tuple[str, int, str]]) -> None:
    world = World()
    for what, place, node in steps:
        if what == "show":
            world.take(world.bridge.show(PODS[place]))
        elif what == "filter":
            world.filter(place, node)
        elif what == "delete":
            world.take(world.bridge.delete(PODS[place]))
        elif what == "later":
            world.bridge.now += (place + 1) * 4 * SECOND
        else:
            world.reply(place, what, node)
    for _ in range(3 * len(steps)):
        world.reply(0, "silence", "n1")
    assert {} == world.calls
    assert {} == world.questions
