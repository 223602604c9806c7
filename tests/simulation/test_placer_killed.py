"""Each row of the life of a request with its mover killed in the middle: another placer finishes it, the same way.

Every scenario is run undisturbed first. Then once for each slow effect that it carries out: just before that effect
the placer whose effect it is dies, and what it had asked for is lost in one run and done, unheard, in another. In the
end every request must be where it is in the undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.placer.core.ledger import LEADER
from services.placer.core.telling import Deliver
from shared.effects import Commit, Publish, Received
from shared.messages import ConfirmRequest, DefragmentRequest, PlaceRequest, ReleaseRequest, ResizeRequest
from tests.placer_world import SECOND, WALL, World, request


@dataclass
class DyingWorld(World):
    """Kills the placers of the effects with the numbers `kill_at`, just before these effects."""

    kill_at: frozenset[int] = frozenset()
    tasks_then: str = "lost"
    steps: int = 0
    counting: bool = False
    copies: int = 0

    def step_task(self, index: int = 0) -> None:
        if self.counting:
            self.steps += 1
            if self.steps in self.kill_at:
                victim = self.tasks[index].placer
                self.kill(victim, tasks=self.tasks_then)
                if not self.placers:
                    self.placer(f"{victim}-again")
                return
        super().step_task(index)

    def client(self, message: Any) -> None:
        """A client that repeats what was not answered; requests to place are also stored, as on the bus."""
        reply = ""
        for _ in range(3):
            first = next(iter(self.placers))
            reply = self.ask(first, message)
            if isinstance(message, PlaceRequest):
                self.copies += 1
                last = list(self.placers)[-1]
                self.tell(last, Received("rt.place", message, seq=self.copies, ack=self.copies))
            self.settle()
            if self.replies[reply]:
                return
            self.pass_time(1)
        raise AssertionError("no placer answered")


Script = Callable[[DyingWorld], None]


def place(world: DyingWorld, **body: Any) -> None:
    world.client(request(**body))


def release(world: DyingWorld, request_id: str) -> None:
    world.client(ReleaseRequest(request_id=request_id))


def fits(world: DyingWorld) -> None:
    place(world)


def gang(world: DyingWorld) -> None:
    place(world, replicas=4)


def queued_then_placed(world: DyingWorld) -> None:
    place(world, replicas=4)
    place(world, request_id="b", queue=True)
    world.pass_time(1)
    release(world, "a")
    world.pass_time(1)


def queued_then_expired(world: DyingWorld) -> None:
    place(world, replicas=4)
    place(world, request_id="b", queue=True, place_by_us=WALL + 1_012 * SECOND)
    world.pass_time(12)


def queued_then_released(world: DyingWorld) -> None:
    place(world, replicas=4)
    place(world, request_id="b", queue=True)
    release(world, "b")


def rejected(world: DyingWorld) -> None:
    place(world, gpu={"count": 8})


def held_and_confirmed(world: DyingWorld) -> None:
    place(world, request_id="h", hold_us=600 * SECOND)
    generation = max(each.generation for each in world.record("h").replicas)
    world.client(ConfirmRequest(request_id="h", generation=generation))


def hold_runs_out(world: DyingWorld) -> None:
    place(world, request_id="h", hold_us=3 * SECOND)
    world.pass_time(4)


def hold_released(world: DyingWorld) -> None:
    place(world, request_id="h", hold_us=600 * SECOND)
    release(world, "h")


def start_fails_once(world: DyingWorld) -> None:
    world.generations_fail["a"] = 1
    place(world)
    world.pass_time(3)


def start_fails_for_good(world: DyingWorld) -> None:
    world.generations_fail["a"] = 99
    place(world)
    world.pass_time(40)


def exits(world: DyingWorld) -> None:
    place(world)
    world.pass_time(10)
    world.end(world.running("a")[0], 3)


def exits_and_restarts(world: DyingWorld) -> None:
    place(world, restart="on_failure")
    world.pass_time(10)
    world.end(world.running("a")[0], 3)
    world.pass_time(3)


def runs_and_is_released(world: DyingWorld) -> None:
    place(world, replicas=2)
    world.pass_time(3)
    release(world, "a")


def runs_and_grows(world: DyingWorld) -> None:
    place(world, cpu_milli=1_000, memory_mib=64, replicas=2)
    world.pass_time(3)
    world.client(ResizeRequest(request_id="a", cpu_milli=2_000))


def runs_and_may_not_grow(world: DyingWorld) -> None:
    """A client that had no answer asks again, so how often it is refused depends on who dies."""
    world.most_memory_mib = 64
    place(world, cpu_milli=1_000, memory_mib=64)
    world.pass_time(3)
    world.client(ResizeRequest(request_id="a", memory_mib=128))


def shrinks_and_restarts(world: DyingWorld) -> None:
    place(world, restart="on_failure", cpu_milli=1_000)
    world.pass_time(3)
    world.client(ResizeRequest(request_id="a", cpu_milli=500))
    world.pass_time(10)
    world.end(world.running("a")[0], 3)
    world.pass_time(3)


def fragmented(world: DyingWorld, **body: Any) -> None:
    """Undisturbed until half of each node is free, and `wide` waits for a whole one: `a` can move to the other."""
    world.counting = False
    place(world, request_id="b", candidates=["n1"])
    place(world, strategy="spread", **body)
    place(world, request_id="wide", gpu={"share": 1.0}, queue=True)
    world.pass_time(1)
    world.counting = True


def others_move(world: DyingWorld) -> None:
    fragmented(world)
    world.client(DefragmentRequest(request_id="wide"))
    world.pass_time(3)


def moved(world: DyingWorld, **body: Any) -> None:
    """`a` runs at its new place, and its old one does not answer."""
    fragmented(world, **body)
    world.silent_nodes.add("n0")
    world.client(DefragmentRequest(request_id="wide"))
    for _ in range(20):
        if world.record("a").replicas[0].node == "n1":
            return
        world.pass_time(1)
    raise AssertionError("not moved")


def moves_and_is_released(world: DyingWorld) -> None:
    moved(world)
    release(world, "a")
    world.silent_nodes.clear()


def ends_while_it_moves(world: DyingWorld) -> None:
    """It is done while its old place does not answer yet."""
    moved(world)
    (new,) = [name for name in world.running("a") if world.boxes[name].labels.node == "n1"]
    world.end(new, 3)
    world.pass_time(5)
    world.silent_nodes.clear()
    world.pass_time(8)


SCENARIOS: tuple[Script, ...] = (
    fits,
    gang,
    queued_then_placed,
    queued_then_expired,
    queued_then_released,
    rejected,
    held_and_confirmed,
    hold_runs_out,
    hold_released,
    start_fails_once,
    start_fails_for_good,
    exits,
    exits_and_restarts,
    runs_and_is_released,
    runs_and_grows,
    runs_and_may_not_grow,
    shrinks_and_restarts,
    others_move,
    moves_and_is_released,
    ends_while_it_moves,
)


@dataclass
class Outcome:
    """Where everything is in the end, generations of holds aside: a repeat of a hold makes a new one."""

    states: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, list[tuple[str, int, int | None]]] = field(default_factory=dict)
    running: int = 0
    reserved: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """CPU and memory by request."""


def run(script: Script, kill_at: set[int], tasks: str, placers: int) -> tuple[Outcome, int]:
    world = DyingWorld(kill_at=frozenset(kill_at), tasks_then=tasks)
    for number in range(2):
        world.add_node(f"n{number}")
    for _ in range(placers):
        world.placer()
    world.pass_time(2)
    world.counting = True
    script(world)
    world.pass_time(12)
    steps = world.steps
    world.check_settled()
    outcome = Outcome(running=len(world.running()))
    for request_id, record in world.records().items():
        outcome.states[request_id] = record.state
        held = request_id == "h"
        outcome.replicas[request_id] = [
            (each.state, 0 if held else each.generation, each.exit_code) for each in record.replicas
        ]
    for each in (each for node in world.reservations().values() for each in node):
        outcome.reserved.setdefault(each.request_id, []).append((each.cpu_milli, each.memory_mib))
    return outcome, steps


@pytest.mark.parametrize("placers", [1, 2])
@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: script.__name__)
def test_whoever_dies_in_the_middle_it_ends_the_same(script: Script, placers: int) -> None:
    undisturbed, steps = run(script, set(), "lost", placers)
    # what matters comes early, and leases and lists go on for ever: the later ones are thinned out
    points = [point for point in range(1, steps + 1) if point <= 10 or point % 13 == 0]
    for point in points:
        for tasks in ("lost", "done"):
            disturbed, _ = run(script, {point}, tasks, placers)
            assert undisturbed == disturbed, f"killed before effect {point}, its effects {tasks}"


# --- what was told ---


@dataclass
class ForgetfulWorld(DyingWorld):
    """Events take a while, and die with their placer. Only what writes and what tells is counted."""

    slow_events: bool = True

    def settle(self, limit: int = 20_000) -> None:
        """Events only every two seconds, after everything else."""
        self._do_all_but(Publish | Deliver)
        if self.now % (2 * SECOND) == 0:
            self._do_all_but(())

    def _do_all_but(self, slow: Any) -> None:
        while True:
            quick = (at for at, task in enumerate(self.tasks) if not isinstance(task.effect, slow))
            if (index := next(quick, None)) is not None:
                self.step_task(index)
            elif not any(self.step_watch(name) for name in list(self.placers)):
                return

    def step_task(self, index: int = 0) -> None:
        counting, self.counting = self.counting, self.counting and self._counts(index)
        super().step_task(index)
        self.counting = counting

    def _counts(self, index: int) -> bool:
        return isinstance(self.tasks[index].effect, Commit | Publish)

    def dead(self) -> set[str]:
        """Who has a lease and is no more: something that they wrote may be untold."""
        keys = self.ledger.keys()
        leases = {key.removeprefix("lease.") for key in keys if key.startswith("lease.")}
        return leases - {LEADER, *self.placers}

    def telling(self) -> set[str]:
        return {task.placer for task in self.tasks if isinstance(task.effect, Publish)}

    def turn(self) -> None:
        """From now on clients ask another placer."""
        self.placers = dict(reversed(self.placers.items()))


def ends_of_all_kinds(world: ForgetfulWorld) -> None:
    """Some are written by who owns the record, some by another one."""
    place(world, request_id="rejected", gpu={"count": 8})
    place(world, request_id="h", hold_us=1 * SECOND)
    place(world, replicas=2)
    world.turn()
    place(world, request_id="queued", gpu={"count": 2}, queue=True)
    world.pass_time(2)
    release(world, "queued")
    world.turn()
    world.pass_time(4)
    release(world, "h")
    release(world, "a")


def with_kills(*kill_at: int) -> ForgetfulWorld:
    world = ForgetfulWorld(kill_at=frozenset(kill_at), checking=False)
    for number in range(2):
        world.add_node(f"n{number}")
    for _ in range(2):
        world.placer()
    world.pass_time(2)
    world.counting = True
    ends_of_all_kinds(world)
    for _ in range(40):
        if world.steps >= max(kill_at, default=0) and not world.dead() | world.telling():
            return world
        world.pass_time(1)
    raise AssertionError(f"leases of the dead: {world.dead()}, not told everything: {world.telling()}")


def test_a_step_is_told_whoever_dies_and_whoever_dies_while_it_makes_up_for_that() -> None:
    """A seventh of all pairs: of each first death, and of each second one."""
    steps = with_kills().steps
    pairs = [(one, two) for one in range(1, steps) for two in range(one + 1, steps + 1) if (one + two) % 7 == 0]
    for pair in pairs:
        world = with_kills(*pair)
        for record in world.records().values():
            told = {step.number: step.state for step in record.steps}
            assert told == world.told(record.request_id), f"killed before effects {pair}"
