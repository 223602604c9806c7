"""What must hold of the ledger at any time, as lists of faults: for the core's check(), tests, chaos runs, the demo."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from services.placer.core.records import HOLDING, NO_STATES, holders, overall, reservation_of
from shared.messages import SHARE_WHOLE_MICRO, ReplicaRecord, RequestRecord, Reservation, State, which_of

_FROM_REPLICAS = frozenset({State.QUEUED, State.HELD, State.PLACED, State.STARTED, State.WAITING, State.STOPPING})


def record_faults(record: RequestRecord) -> Iterator[str]:
    """A request is in exactly one state, which follows from its replicas; a final one holds nothing."""
    name, final = record.request_id, record.state.final
    for each in record.replicas:
        if (each.state in HOLDING) != (each.node is not None):
            yield f"{name}: replica {each.replica} is {each.state} on {each.node}"
        if final and (each.state in HOLDING or each.leaving is not None):
            yield f"{name}: {record.state}, but replica {each.replica} is {each.state} and leaves {each.leaving}"
        if _moves_wrongly(each):
            yield f"{name}: replica {each.replica} is {each.state}, moves to {each.to} and leaves {each.leaving}"
    if record.state in _FROM_REPLICAS and overall(record, record.replicas) != record.state:
        yield f"{name}: {record.state}, but its replicas say {overall(record, record.replicas)}"
    numbers = [step.number for step in record.steps]
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        yield f"{name}: steps {numbers}"
    elif (last := _last_state(record)) is not None and last != record.state:
        yield f"{name}: {record.state}, but its last step is {last}"


def _moves_wrongly(replica: ReplicaRecord) -> bool:
    """Only what runs moves, and no replica has more than two places, each of its own generation."""
    to, leaving = replica.to, replica.leaving
    if to is not None:
        return leaving is not None or replica.state != State.STARTED or to.generation <= replica.generation
    return leaving is not None and replica.state in HOLDING and leaving.generation == replica.generation


def _last_state(record: RequestRecord) -> str | None:
    """None where the steps that are kept say no state."""
    for step in reversed(record.steps):
        if step.state not in NO_STATES:
            return step.state
    return None


def node_faults(node: str, reservations: Iterable[Reservation]) -> Iterator[str]:
    """No device is over-committed by reservations of this ledger, and nothing is reserved twice."""
    ours = [each for each in reservations if each.container is None]
    share = defaultdict[str, int](int)
    for each in ours:
        for device in each.devices:
            share[device] += each.share_micro
    if max(share.values(), default=0) > SHARE_WHOLE_MICRO:
        for device, total in share.items():
            if total > SHARE_WHOLE_MICRO:
                yield f"{node}: {device} promises {total} of {SHARE_WHOLE_MICRO}"
    held = list(map(which_of, ours))
    if len(set(held)) < len(held):
        yield from (f"{node}: {which} reserved {times} times" for which, times in Counter(held).items() if times > 1)


def ledger_faults(records: Mapping[str, RequestRecord], nodes: Mapping[str, tuple[Reservation, ...]]) -> Iterator[str]:
    """All of it, from one consistent look at the whole ledger: used = sum of reservations, on both sides."""
    held: dict[tuple[object, ...], Reservation] = {}
    for record in records.values():
        yield from record_faults(record)
        for each in holders(record):
            held[record.request_id, each.replica, each.generation, each.node] = reservation_of(record, each)
    reserved: dict[tuple[object, ...], Reservation] = {}
    for node, reservations in nodes.items():
        yield from node_faults(node, reservations)
        ours = (each for each in reservations if each.container is None)
        reserved.update({(each.request_id, each.replica, each.generation, node): each for each in ours})
    yield from (f"{key}: held, but not reserved" for key in held.keys() - reserved.keys())
    yield from (f"{key}: reserved, but not held" for key in reserved.keys() - held.keys())
    both = held.keys() & reserved.keys()
    yield from (f"{key}: reserved {reserved[key]}, held {held[key]}" for key in both if held[key] != reserved[key])
