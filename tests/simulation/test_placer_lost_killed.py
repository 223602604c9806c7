"""Nodes that are lost while whoever works on that is killed: another one finishes it, and nothing is uncounted.

Each scenario is run undisturbed first, then with a death before each effect that matters, which is lost in one run and
done unheard in another. What is reserved is compared with what requests hold and with what runs after every commit and
every deed of an engine, by reading the keys as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.placer.core.containers import Start, Stop
from services.placer.core.intents import Rules
from shared.effects import Commit
from shared.messages import GoneRequest, NodeState
from tests.placer_world import SECOND
from tests.simulation.test_placer_killed import DyingWorld, place, release

GRACE_S = 4
Place = tuple[str, int, int, str]
"""Request, replica, generation, node."""


@dataclass
class LosingWorld(DyingWorld):
    """Three nodes of two devices; `recount` is made of JSON alone."""

    rules: Rules = field(default_factory=lambda: Rules(lost_grace_us=GRACE_S * SECOND))
    forgotten: set[str] = field(default_factory=set)
    """Nodes that an operator said are gone: what runs there is counted by nobody."""
    recounted: tuple[int, ...] = ()
    """How things were when they were recounted last."""

    def say(self, node: str, state: NodeState) -> None:
        self.set_facts(self.facts[node].model_copy(update={"state": state}))

    def lose(self, node: str, *, silent: bool = True) -> None:
        self.say(node, NodeState.LOST)
        self.silent_nodes |= {node} if silent else set()

    def back(self, node: str) -> None:
        self.say(node, NodeState.READY)
        self.silent_nodes.discard(node)

    def where(self, replica: int = 0) -> str:
        node = self.record("a").replicas[replica].node
        assert node is not None
        return node

    def step_task(self, index: int = 0) -> None:
        """Only what writes a request or does something to a container is counted, and is died before."""
        effect = self.tasks[index].effect
        keys = [write.key for write in effect.writes] if isinstance(effect, Commit) else []
        deed = isinstance(effect, Start) or (isinstance(effect, Stop) and effect.node not in self.silent_nodes)
        matters = deed or any(key.startswith("request.") for key in keys)
        counting, self.counting = self.counting, self.counting and matters
        super().step_task(index)
        self.counting = counting

    def check(self) -> None:
        super().check()
        now = (self.ledger.seq, sum(box.running for box in self.boxes.values()), len(self.boxes))
        if now == self.recounted:
            return
        self.recounted = now
        held, reserved = Counter(self._held()), Counter(self._reserved())
        assert held == reserved, f"held {held - reserved}, reserved {reserved - held}"
        assert all(times == 1 for times in reserved.values()), reserved
        places = Counter((request, replica) for request, replica, _, _ in reserved)
        assert all(number <= 2 for number in places.values()), places
        running = Counter(self._running())
        assert not running - reserved, f"runs and is not counted: {running - reserved}"

    def _keys(self, prefix: str) -> Iterator[Any]:
        for key, (value, _) in self.ledger.values.items():
            if key.startswith(prefix) and value is not None:
                yield json.loads(value)

    def _held(self) -> Iterator[Place]:
        for record in self._keys("request."):
            for each in record.get("replicas", ()):
                sites = [each] if each["state"] in {"held", "placed", "started", "stopping"} else []
                for site in [*sites, each.get("to"), each.get("leaving")]:
                    if site:
                        yield record["request_id"], each["replica"], site["generation"], site["node"]

    def _reserved(self) -> Iterator[Place]:
        for node in self._keys("node."):
            for each in node["reservations"]:
                yield each["request_id"], each["replica"], each["generation"], node["node"]

    def _running(self) -> Iterator[Place]:
        for box in self.boxes.values():
            held = box.labels.reservation
            if box.running and box.labels.node not in self.forgotten:
                yield held.request_id, held.replica, held.generation, box.labels.node


Script = Callable[[LosingWorld], None]


def started(world: LosingWorld, **body: Any) -> None:
    """Undisturbed."""
    world.counting = False
    place(world, restart="on_failure", **body)
    world.pass_time(2)
    world.counting = True


def lost(world: LosingWorld, replica: int = 0, **body: Any) -> str:
    """The node on which it was."""
    started(world, **body)
    node = world.where(replica)
    world.lose(node)
    world.pass_time(16)
    return node


def lost_for_good(world: LosingWorld) -> None:
    lost(world)


def lost_and_back(world: LosingWorld) -> None:
    world.back(lost(world))


def lost_and_nothing_else_fits(world: LosingWorld) -> None:
    world.back(lost(world, candidates=["n0"]))


def only_its_monitor_is_lost(world: LosingWorld) -> None:
    started(world)
    world.lose(world.where(), silent=False)
    world.pass_time(16)


def one_of_a_gang(world: LosingWorld) -> None:
    world.back(lost(world, 1, replicas=2, spread_over="node"))


def lost_and_released(world: LosingWorld) -> None:
    node = lost(world)
    release(world, "a")
    world.pass_time(2)
    world.back(node)


def lost_and_ended_elsewhere(world: LosingWorld) -> None:
    node = lost(world)
    (new,) = [name for name in world.running("a") if world.boxes[name].labels.node != node]
    world.end(new, 0)
    world.pass_time(12)
    world.back(node)


def lost_and_said_to_be_gone(world: LosingWorld) -> None:
    """And back after all."""
    started(world)
    node = world.where()
    world.lose(node)
    world.forgotten.add(node)
    world.client(GoneRequest(node=node))
    world.pass_time(12)
    world.back(node)


SCENARIOS: tuple[Script, ...] = (
    lost_for_good,
    lost_and_back,
    lost_and_nothing_else_fits,
    only_its_monitor_is_lost,
    one_of_a_gang,
    lost_and_released,
    lost_and_ended_elsewhere,
    lost_and_said_to_be_gone,
)


def run(script: Script, kill_at: int, tasks: str) -> tuple[dict[str, Any], int]:
    """How everything is in the end, and how many effects that took."""
    world = LosingWorld(kill_at=frozenset({kill_at}), tasks_then=tasks)
    for number in range(3):
        world.add_node(f"n{number}", 2)
    for _ in range(2):
        world.placer()
    world.pass_time(2)
    world.counting = True
    script(world)
    world.pass_time(12)
    if not world.silent_nodes:
        world.check_settled()
    assert world.recounted
    record = world.record("a")
    end = {
        "state": record.state,
        "code": record.exit_code,
        "replicas": [(each.state, each.generation, each.leaving is not None) for each in record.replicas],
        "reserved": sorted(generation for _, _, generation, _ in world._reserved()),
        "running": sorted(generation for _, _, generation, _ in world._running()),
    }
    return end, world.steps


@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: script.__name__)
def test_whoever_dies_while_a_node_is_lost_it_ends_the_same_and_all_is_counted(script: Script) -> None:
    undisturbed, steps = run(script, 0, "lost")
    assert steps > 3
    for point in range(1, steps + 1):
        for tasks in ("lost", "done"):
            disturbed, _ = run(script, point, tasks)
            assert undisturbed == disturbed, f"killed before effect {point}, its effects {tasks}"
