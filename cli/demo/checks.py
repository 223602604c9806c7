"""What should have happened in the demo, each with what was seen; the demo succeeded if all of it was seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from cli.demo.recorder import Recorder
from cli.demo.script import QUIET, VICTIM, Played, position
from shared.messages import DeviceStanding, PlaceReply

LEAST_MET: Final = 20
REJECTED: Final = {
    "impossible": "never.deadline",
    "hard-on-core": "never.guarantee",
    "too-big": "never.memory",
    "crowd": "would_break.deadline",
}


@dataclass(frozen=True)
class Check:
    name: str
    holds: bool
    expected: str
    seen: str


def judge(played: Played, recorder: Recorder) -> list[Check]:
    """All checks, in the order of the demo."""
    return [
        *_placements(played, recorder),
        *_refusals(played),
        _queue(played, recorder),
        *_tasks(recorder),
        _detected(recorder),
        *_disturbed(played, recorder),
        _ended(recorder),
        *_invariants(recorder),
    ]


def _check(name: str, expected: str, seen: str, holds: bool) -> Check:
    return Check(name, holds, expected, seen)


def _outcome(played: Played, name: str) -> str:
    reply = played.replies.get(name)
    return reply.outcome if reply else "no answer"


# --- placing ---


def _placements(played: Played, recorder: Recorder) -> Iterator[Check]:
    for name in (VICTIM, *QUIET, "guarded"):
        states = recorder.states(name)
        good = _outcome(played, name) == "placed" and states[:3] == ["accepted", "placed", "started"]
        yield _check(
            f"{name} is placed and started", "placed; accepted, placed, started", _told(played, states, name), good
        )
    yield _gang(played, recorder)
    states, record = recorder.states("report"), recorder.ledger.records.get("request.report")
    code = record.exit_code if record else None
    yield _check(
        "report runs and exits",
        "exited with code 0",
        f"{states[-1] if states else 'no event'}, code {code}",
        states[-1:] == ["exited"] and code == 0,
    )
    yield _duplicate(played, recorder)


def _told(played: Played, states: list[str], name: str) -> str:
    return f"{_outcome(played, name)}; {', '.join(states[:4]) or 'no event'}"


def _gang(played: Played, recorder: Recorder) -> Check:
    reply = played.replies.get("gang")
    nodes = sorted({each.node for each in reply.placements}) if reply else []
    started = "started" in recorder.states("gang")
    seen = f"{_outcome(played, 'gang')} on {', '.join(nodes) or 'no node'}, {'started' if started else 'not started'}"
    return _check("the gang is placed whole", "placed on 3 nodes, started", seen, len(nodes) == 3 and started)


def _duplicate(played: Played, recorder: Recorder) -> Check:
    first, again = played.replies.get(VICTIM), played.replies.get("duplicate")
    same = bool(first and again and again.duplicate and _where(first) == _where(again) and first.placements)
    starts = recorder.states(VICTIM).count("started")
    expected = "marked as duplicate, the same placement, started once"
    seen = f"duplicate {again.duplicate if again else None}, same placement {same}, started {starts} times"
    return _check("the same id again changes nothing", expected, seen, same and starts == 1)


def _where(reply: PlaceReply) -> list[tuple[Any, ...]]:
    return [(each.replica, each.node, each.devices, each.generation, each.container) for each in reply.placements]


def _refusals(played: Played) -> Iterator[Check]:
    reply = played.replies.get("malformed")
    fault = reply.error if reply else None
    seen = f"{fault.field}: found {fault.found}, allowed: {fault.allowed}" if fault else _outcome(played, "malformed")
    good = fault is not None and (fault.field, fault.found) == ("gpu.share", "1.5")
    yield _check("the malformed one is explained", "error at gpu.share, found 1.5", seen, good)
    for name, code in REJECTED.items():
        reply = played.replies.get(name)
        reasons = reply.reasons if reply else ()
        found = next((each for each in reasons if each.code == code), None)
        seen = f"{_outcome(played, name)}: {found.message if found else [each.code for each in reasons]}"
        yield _check(
            f"{name} is rejected", f"rejected, {code}", seen, _outcome(played, name) == "rejected" and bool(found)
        )


def _queue(played: Played, recorder: Recorder) -> Check:
    states = recorder.states("evaluator")
    good = _outcome(played, "evaluator") == "queued" and states[:4] == ["accepted", "queued", "placed", "started"]
    expected = "queued; accepted, queued, placed, started once trainer left"
    return _check("the queue moves", expected, _told(played, states, "evaluator"), good)


# --- running ---


def _counts(recorder: Recorder, name: str) -> dict[str, int]:
    """Verdicts on a request's tasks, recounted from the batches."""
    containers = {each.container for event in recorder.events.states[name].values() for each in event.placements}
    totals: dict[str, int] = {}
    for container in containers:
        for verdict, count in recorder.events.counts.get(container or "", {}).items():
            totals[verdict] = totals.get(verdict, 0) + count
    return totals


def _tasks(recorder: Recorder) -> Iterator[Check]:
    for name in (VICTIM, *QUIET):
        counts = _counts(recorder, name)
        seen = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "none judged"
        yield _check(f"tasks of {name} are judged", f"{LEAST_MET} met or more", seen, counts.get("met", 0) >= LEAST_MET)


def _detected(recorder: Recorder) -> Check:
    """Known at its deadline is known before the task's own end; how long after the deadline is printed, not judged.

    The neighbours keep a task from its core for long, so on any machine most of the missed ones run on.
    """
    name, expected = "misses are known at their deadline", "most of them while the task still runs"
    delays = recorder.delays_us()
    running = sum(event.tardiness_us is None for event in recorder.events.missed.values())
    if not delays:
        return _check(name, expected, "no miss", holds=False)
    middle, last, late = median(delays), delays[-1], recorder.wake_delay_us()
    told = f"median {middle / 1000:.1f} ms, at most {last / 1000:.1f} ms after the deadline"
    seen = f"{len(delays)} misses, {running} while running; {told} (a wake here: {late / 1000:.1f} ms late)"
    return _check(name, expected, seen, running * 2 > len(delays))


def _disturbed(played: Played, recorder: Recorder) -> Iterator[Check]:
    warned = sorted({str(each.event.request_id) for each in recorder.warnings if each.event.kind == "at_risk"})
    seen = f"warned about: {', '.join(warned) or 'nobody'} ({played.neighbours} busy neighbours)"
    yield _check("the disturbed one is warned about", f"{VICTIM} and nobody else", seen, warned == [VICTIM])
    before, after = position(played.before, played.device), position(played.after, played.device)
    sank = bool(before and after and after[0] > before[0] and after[1] == DeviceStanding.AT_RISK)
    seen = f"from {_placed_in(before)} to {_placed_in(after)} of {len(played.after)}"
    yield _check("its device sinks in the list", "further down, at_risk", seen, sank)


def _placed_in(found: tuple[int, DeviceStanding] | None) -> str:
    return f"place {found[0]} ({found[1]})" if found else "nowhere"


# --- the whole ---


def _ended(recorder: Recorder) -> Check:
    records = recorder.ledger.records.values()
    open_ones = [f"{record.request_id} {record.state}" for record in records if not record.final]
    seen = ", ".join(open_ones) or f"{len(records)} final"
    return _check("everybody leaves", "all requests final", seen, bool(records) and not open_ones)


def _invariants(recorder: Recorder) -> Iterator[Check]:
    ledger, events = recorder.ledger, recorder.events
    expected = "no device over-committed, used = sum of reservations, final is final, generations grow"
    seen = "; ".join(ledger.faults[:3]) or f"no fault in {ledger.commits} commits"
    yield _check("the ledger is sound at every commit", expected, seen, not ledger.faults and ledger.commits > 0)
    faults = events.finish()
    expected = "one verdict a task, the same by recount; steps without gaps; no container started twice"
    seen = "; ".join(faults[:3]) or f"no fault in {events.events} events ({events.repeated} came again)"
    yield _check("the events are sound", expected, seen, not faults and events.events > 0)
