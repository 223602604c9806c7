"""What the node list learns of response times: from whom, beside whom, and how it is kept in rt_learned; no I/O.

What is judged by is what the bucket has, for every instance and every placer alike. The holder of the bucket's lease
adds to it: each write is a profile with its expected revision, and the lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from services.node_list.nodes import NodeView
from services.node_list.standing import ClassTask
from shared.admission import NEVER_US, Beside, DeviceType, Learned, Profile
from shared.effects import (
    Commit,
    CommitDone,
    CommitOutcome,
    Disconnected,
    Draining,
    Effect,
    KeyChanged,
    Reconnected,
    Tick,
    WatchBegins,
    WatchReplayed,
    Write,
)
from shared.errors import FieldError
from shared.lease import Tenure
from shared.messages import ContainerRecord, LearnedProfile, Regime, Reservation, Which
from shared.subjects import LEARNED, decode, lease_key, profile_key

LEASE = lease_key("learning")
LEASE_US = 30_000_000
"""Nobody waits for what is learned: a standby may take over late, and an idle bucket is seldom written."""
PACE_US = 10_000_000
"""Between two writes, and between two judgements by what was learned: it changes slowly, and concerns many devices."""
LEAST_ADDED = 50
"""So many new times of a profile are worth a write, and more where more are known: what a crash loses is little."""
ADDED_RATIO = 0.05
MOST_WRITES = 20
"""Profiles in one write; each is well below a message's 1 MiB."""
MOST_PROFILES = 2_000
"""Profiles times types of device; further ones are not learned, and counted, until some are forgotten."""

Known = tuple[DeviceType, str]


@dataclass(slots=True)
class Kept:
    """One key of the bucket. ``growing`` is what it says and what is new since, None where nothing is."""

    revision: int = 0
    message: LearnedProfile | None = None
    growing: Profile | None = None
    added: int = 0

    @property
    def empty(self) -> bool:
        return self.message is None and self.growing is None

    def due(self) -> bool:
        return self.growing is not None and self.added >= max(LEAST_ADDED, ADDED_RATIO * self.growing.total)


@dataclass(slots=True)
class Seen:
    """What was last seen of a container: how many of its tasks were timed, and who else was on its device."""

    timed: int
    beside: frozenset[Which]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A container and who else holds some of its devices."""

    own: Reservation
    others: tuple[Reservation, ...]


@dataclass(slots=True)
class Writing:
    commit: int
    written: dict[Known, LearnedProfile] = field(default_factory=dict)


class Learning:
    """``learned`` is what the bucket says. With more foreign work on a device than so much nothing is learned there."""

    def __init__(self, holder: str, foreign_micro: int, most_profiles: int = MOST_PROFILES) -> None:
        self.learned = Learned()
        self._foreign_micro, self._most_profiles = foreign_micro, most_profiles
        self.lease = Tenure(LEASE, holder, LEASE_US)
        self.counters: Counter[str] = Counter()
        self._kept: dict[Known, Kept] = {}
        self._seen: dict[str, dict[Which, Seen]] = {}
        self._changed: set[Known] = set()
        """Since devices were last judged by it."""
        self._judged_us = self._written_us = -PACE_US
        self._writing: Writing | None = None
        self._commit = 0
        self._wall_us = 0
        self._replayed = self._stopping = False

    def handle(self, event: object, now_us: int) -> list[Effect]:
        match event:
            case KeyChanged(bucket=bucket) as change if bucket == LEARNED:
                self._heard(change, now_us)
            case WatchBegins(bucket=bucket) if bucket == LEARNED:
                self._begins()
            case WatchReplayed(bucket=bucket, keys=keys) if bucket == LEARNED:
                self._replay_done(keys)
            case CommitDone() as done:
                self._committed(done, now_us)
            case Disconnected():
                self._replayed = False
            case Reconnected(gap_us=gap_us):
                self.lease.rebase(gap_us)
            case Draining():
                return self._step_down()
            case Tick(wall_us=wall_us):
                self._wall_us = wall_us
                return self._write(now_us)
        return []

    def concerned(self, views: Iterable[NodeView], classes: Iterable[ClassTask], now_us: int) -> list[NodeView]:
        """The nodes to be judged again, by what was learned since this was last asked and answered."""
        if not self._changed or now_us - self._judged_us < PACE_US:
            return []
        of_classes = {wanted.profile for wanted in classes}
        changed, self._changed, self._judged_us = self._changed, set(), now_us
        return [view for view in views if _concerns(view, changed, of_classes)]

    # --- from whom ---

    def heard(self, view: NodeView, records: Iterable[ContainerRecord]) -> None:
        """The tracker's records of a node: what is new in them is learned beside those who were there all the time."""
        there = on_devices(view)
        before, now, fresh = self._seen.get(view.name, {}), dict[Which, Seen](), dict[Which, Sequence[int | None]]()
        for record, of in _named(records):
            if of not in there:
                continue
            now[of] = Seen(record.timed, frozenset(each.which for each in there[of].others))
            was = before.get(of)
            if was and was.beside == now[of].beside and was.timed < record.timed:
                fresh[of] = record.newest_us[-(record.timed - was.timed) :]
        self._seen[view.name] = now
        if self.lease.active:
            self._learn(view, there, fresh)

    def _learn(
        self, view: NodeView, there: Mapping[Which, OnDevice], fresh: Mapping[Which, Sequence[int | None]]
    ) -> None:
        """A neighbour that did nothing meanwhile slowed nobody down: beside it nothing is learned of the others."""
        for of, times_us in fresh.items():
            own, others = there[of].own, there[of].others
            device, profile = self._type(view, own), profile_of(own)
            beside = [profile_of(each) for each in others if each.which in fresh]
            if device and profile and None not in beside and len(beside) == len(others):
                self._add((device, profile), tuple(sorted(filter(None, beside))), times_us)

    def _type(self, view: NodeView, resident: Reservation) -> DeviceType | None:
        """The type of its devices; None where one is not there, where they differ, or where others use one too."""
        there = {device.uuid: device for device in view.metrics.devices} if view.metrics else {}
        own = [there[uuid] for uuid in resident.devices if uuid in there]
        alone = [device for device in own if (device.foreign_share_micro or 0) < self._foreign_micro]
        types = {DeviceType(device.model, device.regime) for device in alone}
        return types.pop() if len(alone) == len(resident.devices) and len(types) == 1 else None

    def _add(self, known: Known, beside: Beside, times_us: Sequence[int | None]) -> None:
        kept = self._kept.get(known, Kept())
        if kept.empty and sum(not each.empty for each in self._kept.values()) >= self._most_profiles:
            self.counters["profiles_beyond_limit"] += 1
            return
        self._kept[known] = kept
        if kept.growing is None:
            kept.growing = Profile.of(kept.message) if kept.message else Profile()
        kept.growing.add(beside, [NEVER_US if time_us is None else time_us for time_us in times_us])
        kept.added += len(times_us)

    # --- the bucket ---

    def _heard(self, change: KeyChanged, now_us: int) -> None:
        try:
            if change.key == LEASE:
                self.lease.changed(change, now_us)
            elif change.key.startswith("profile."):
                self._take_over(change)
        except FieldError:
            self.counters["malformed"] += 1

    def _take_over(self, change: KeyChanged) -> None:
        """Where somebody else wrote it, what we added to another is given up."""
        known = _known(change.key)
        message = LearnedProfile.trusted(change.value) if change.value else None
        kept = self._kept.get(known)
        if kept is not None and not kept.revision and kept.message == message:
            kept.revision = change.revision
        elif kept is None or change.revision > kept.revision:
            self._put(known, message, change.revision)

    def _put(self, known: Known, message: LearnedProfile | None, revision: int) -> None:
        self._kept[known] = Kept(revision, message)
        self._changed.add(known)
        self.learned.put(*known, Profile.of(message) if message else None)

    def _begins(self) -> None:
        """The bucket is said anew, be it older than before."""
        self._replayed = False
        self.lease.begins()
        for kept in self._kept.values():
            kept.revision = 0

    def _replay_done(self, keys: frozenset[str]) -> None:
        self._replayed = True
        for known in [known for known in self._kept if _key(known) not in keys]:
            self._put(known, None, 0)
            del self._kept[known]
        if LEASE not in keys:
            self.lease.absent()

    def _write(self, now_us: int) -> list[Effect]:
        if self._writing or self._stopping or not self._replayed or not self.lease.may_write(now_us):
            return []
        may = self.lease.active and now_us - self._written_us >= PACE_US
        due = [known for known, kept in self._kept.items() if kept.due()] if may else []
        if not due and not self.lease.due(now_us):
            return []
        self._written_us = now_us if due else self._written_us
        return [self._commit_of(due[:MOST_WRITES], self.lease.renewal())]

    def _commit_of(self, due: Sequence[Known], lease: Write) -> Commit:
        """Its numbers are below 0, so that they are nobody else's."""
        self._commit -= 1
        self._writing = Writing(self._commit)
        writes = []
        for known in due:
            kept, (device, name) = self._kept[known], known
            if kept.growing:
                message = self._writing.written[known] = kept.growing.message(device, name, self._wall_us)
                writes.append(Write(_key(known), message.to_json(), kept.revision))
        return Commit(self._commit, LEARNED, (*writes, lease))

    def _committed(self, done: CommitDone, now_us: int) -> None:
        if self._writing is None or done.commit != self._writing.commit:
            return
        written, self._writing = self._writing.written, None
        if done.outcome != CommitOutcome.WRITTEN:
            self.counters[f"write_{done.outcome}"] += 1
            for change in done.current:
                self._heard(change, now_us)
            return
        if not self._stopping:
            self.lease.renewed(done.revisions[LEASE], now_us)
        for known, message in written.items():
            self._put(known, message, done.revisions[_key(known)])

    def _step_down(self) -> list[Effect]:
        """Last words: what is new, and the lease, so that a standby need not wait."""
        self._stopping = True
        if not self.lease.active or self._writing or not self._replayed:
            return []
        added = [known for known, kept in self._kept.items() if kept.added]
        return [self._commit_of(added[:MOST_WRITES], self.lease.give_back())]


# --------------------------------------------------------------------------------------- who is beside whom


def on_devices(view: NodeView) -> dict[Which, OnDevice]:
    """Each resident with those who hold some of its devices, too."""
    return {each.which: _on_device(each, view.on_device) for each in view.residents if each.devices}


def _on_device(own: Reservation, held: Mapping[str, Sequence[Reservation]]) -> OnDevice:
    others = {other.which: other for uuid in own.devices for other in held[uuid] if other is not own}
    return OnDevice(own, tuple(others.values()))


def profile_of(reservation: Reservation) -> str | None:
    """What is learned of it is learned under this name; None where it declared no times."""
    return reservation.realtime.profile if reservation.realtime else None


def _concerns(view: NodeView, changed: Set[Known], of_classes: Set[str]) -> bool:
    there = {DeviceType(device.model, device.regime) for device in view.metrics.devices} if view.metrics else set()
    profiles = {profile_of(each) for each in view.residents} | of_classes
    return any(device in there and profile in profiles for device, profile in changed)


def _named(records: Iterable[ContainerRecord]) -> Iterator[tuple[ContainerRecord, Which]]:
    for record in records:
        if record.request_id is not None and record.replica is not None and record.generation is not None:
            yield record, (record.request_id, record.replica, record.generation)


def _key(known: Known) -> str:
    (model, regime), profile = known
    return profile_key(profile, model, regime)


def _known(key: str) -> Known:
    """Raises FieldError where the key is none of ours."""
    tokens = key.split(".")
    if len(tokens) != 4 or tokens[3] not in list(Regime):
        raise FieldError("key", key, "profile.<profile>.<model>.<regime>")
    return DeviceType(decode(tokens[2]), Regime(tokens[3])), decode(tokens[1])
