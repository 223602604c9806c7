"""Who may use a device next, and what becomes of who stays too long; no socket, no clock, no process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

# ------------------------------------------------------------------------------------------ what happens


@dataclass(frozen=True, slots=True)
class Terms:
    """What a container declared, as the gate needs it: with a host part H, period and deadline are T - H and D - H."""

    container: str
    device: str
    runtime_us: int
    period_us: int
    deadline_us: int
    best_effort: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """Nobody is on the device who was let in before this arbiter began, or died there: it may be given away."""

    device: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A thread of a container has come; it may want one turn at a time."""

    client: int
    terms: Terms


@dataclass(frozen=True, slots=True)
class Asked:
    """It wants a turn for a task that is due in ``left_us``."""

    client: int
    left_us: int


@dataclass(frozen=True, slots=True)
class Released:
    """Its task is done, or it wants no turn any more."""

    client: int


@dataclass(frozen=True, slots=True)
class Left:
    """It is gone, dead or not; if it was its turn, the device is given away once Opened says that it is free."""

    client: int


@dataclass(frozen=True, slots=True)
class Looked:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Spared:
    """A holder that was to be ended could not be."""

    client: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The container is gone for good."""

    container: str


@dataclass(frozen=True, slots=True)
class Inside:
    """A client that has joined was let in by a former arbiter and is on the device; it has left when it is not."""

    client: int
    since_us: int


@dataclass(frozen=True, slots=True)
class Owed:
    """What is held against a container that overran: as an effect to be kept until it is gone, as an event what a
    former arbiter had kept, said before anybody has come.

    ``until_us``: not let in before that. ``lost``: its device promises nothing because of it, and nothing to
    ``neighbours`` in particular; the rest is of its last overrun.
    """

    container: str
    device: str
    until_us: int
    held_us: int
    runtime_us: int
    touched: tuple[str, ...]
    lost: bool
    neighbours: tuple[str, ...]


Event = Opened | Joined | Asked | Released | Left | Looked | Spared | Gone | Inside | Owed


# ------------------------------------------------------------------------------------------ what to do


@dataclass(frozen=True, slots=True)
class Grant:
    """It is this client's turn."""

    client: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Say Opened as soon as nobody is on the device."""

    device: str


@dataclass(frozen=True, slots=True)
class End:
    """End the holder's process. Its turn lasts until it has Left; Spared says that it could not be ended."""

    client: int


@dataclass(frozen=True, slots=True)
class Overran:
    """A holder went beyond its runtime and the margin; said when that is seen, and again when its turn is over.

    ``touched``: the containers that waited meanwhile.
    """

    device: str
    culprit: str
    held_us: int
    runtime_us: int
    touched: tuple[str, ...]
    over: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether the device's guarantees hold; with ``gated`` false, because of whom, and whose guarantees are gone."""

    device: str
    gated: bool
    culprit: str
    neighbours: tuple[str, ...]


Effect = Grant | Watch | End | Overran | Standing | Owed


# ------------------------------------------------------------------------------------------ the arbiter


@dataclass(slots=True)
class _Account:
    """What a container has asked for so far.

    ``next_us``: the earliest arrival of its next task by its period; one that comes earlier is ordered as if it came
    then. ``barred_us``: until then it is not let in, since it has used up what it overran.
    """

    next_us: int = 0
    barred_us: int = 0


@dataclass(frozen=True, slots=True)
class _Wait:
    client: int
    terms: Terms
    account: _Account
    arrival_us: int
    due_us: int
    number: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Real-time tasks first, then by deadline, then as they came."""
        return self.terms.best_effort, self.due_us, self.number


@dataclass(slots=True)
class _Hold:
    wait: _Wait
    since_us: int
    limit_us: int
    overran: bool = False
    touched: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Device:
    opened: bool = False
    holder: _Hold | None = None
    waiting: dict[int, _Wait] = field(default_factory=dict)
    culprits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Because of whom it promises nothing, and whose guarantees went when."""


class Arbiter:
    """All devices of a node.

    A holder that runs longer than its runtime and ``margin_us`` is ended where ``end_overruns`` says so, and always if
    it is best effort; else its device loses its standing until the culprit's container is gone. Either way nobody is
    let in beside it, and the container's later tasks wait until its bandwidth C / T has paid for what it took.
    """

    def __init__(self, margin_us: int, *, end_overruns: bool) -> None:
        self._margin_us = margin_us
        self._end_overruns = end_overruns
        self._clients: dict[int, Terms] = {}
        self._devices: dict[str, _Device] = {}
        self._accounts: dict[str, _Account] = {}
        self._asked = 0

    def handle(self, event: Event, now_us: int) -> list[Effect]:
        """What to do about one event, in this order. Whoever asks twice, or is unknown, is not heard."""
        match event:
            case Asked():
                return self._ask(event, now_us)
            case Released() | Left():
                return self._release(event, now_us)
            case Looked():
                return [effect for name in self._devices for effect in self._look(name, now_us)]
            case Joined():
                return self._join(event)
            case Opened():
                self._devices[event.device].opened = True
                return self._let_in(event.device, now_us)
            case Spared():
                return self._spare(event, now_us)
            case Gone():
                return self._forget(event.container)
            case Inside() | Owed():
                return self._resume(event, now_us) if isinstance(event, Inside) else self._recall(event)

    @property
    def due_us(self) -> int | None:
        """When ``Looked`` is wanted although nothing else happens."""
        wanted = [due_us for device in self._devices.values() if (due_us := _due_us(device)) is not None]
        return min(wanted, default=None)

    def check(self) -> None:
        """Assert that each client is in one place, and that a device that could be given away was."""
        for name, device in self._devices.items():
            here = set(device.waiting)
            if device.holder:
                assert device.opened, "a device is used that was not opened"
                assert device.holder.wait.client not in here, "a client waits for what it has"
                here.add(device.holder.wait.client)
            assert all(self._clients[client].device == name for client in here), "a client at the device of another"
            assert device.holder or not device.opened or not device.waiting or _due_us(device) is not None, "forgotten"

    def story(self, id: str) -> list[str]:  # noqa: A002 - the name that every core gives it
        """What is known of a device, or of a container on any."""
        return [
            line
            for name, device in self._devices.items()
            for container, line in _told(name, device)
            if id in (name, container)
        ]

    # --- one turn ---

    def _join(self, event: Joined) -> list[Effect]:
        self._clients[event.client] = event.terms
        return self._know(event.terms.device)

    def _know(self, device: str) -> list[Effect]:
        if device in self._devices:
            return []
        self._devices[device] = _Device()
        return [Watch(device)]

    def _ask(self, event: Asked, now_us: int) -> list[Effect]:
        terms = self._clients.get(event.client)
        if terms is None:
            return []
        device = self._devices[terms.device]
        if event.client in device.waiting or (device.holder and device.holder.wait.client == event.client):
            return []
        device.waiting[event.client] = self._wait(event, terms, now_us)
        if device.holder and device.holder.overran:
            device.holder.touched.add(terms.container)
        return self._let_in(terms.device, now_us)

    def _wait(self, event: Asked, terms: Terms, now_us: int) -> _Wait:
        account = self._accounts.setdefault(terms.container, _Account())
        arrival_us = max(now_us, account.next_us)
        account.next_us = arrival_us + terms.period_us
        self._asked += 1
        due_us = arrival_us + max(event.left_us, terms.deadline_us)
        return _Wait(event.client, terms, account, arrival_us, due_us, self._asked)

    def _let_in(self, name: str, now_us: int) -> list[Effect]:
        """Whoever is next, if the device is free."""
        device = self._devices[name]
        if device.holder or not device.opened:
            return []
        able = [wait for wait in device.waiting.values() if wait.account.barred_us <= now_us]
        if not able:
            return []
        wait = min(able, key=lambda wait: wait.order)
        del device.waiting[wait.client]
        device.holder = self._hold(wait, now_us)
        return [Grant(wait.client)]

    def _hold(self, wait: _Wait, since_us: int) -> _Hold:
        return _Hold(wait, since_us, since_us + wait.terms.runtime_us + self._margin_us)

    def _release(self, event: Released | Left, now_us: int) -> list[Effect]:
        terms = self._clients.get(event.client)
        if terms is None:
            return []
        left = isinstance(event, Left)
        if left:
            del self._clients[event.client]
        device = self._devices[terms.device]
        hold = device.holder
        if hold is None or hold.wait.client != event.client:
            device.waiting.pop(event.client, None)
            return []
        device.holder, device.opened = None, not left
        effects = self._settle(device, hold, now_us) if now_us > hold.limit_us else []
        return effects + ([Watch(terms.device)] if left else self._let_in(terms.device, now_us))

    # --- a turn that lasts too long ---

    def _look(self, name: str, now_us: int) -> list[Effect]:
        device = self._devices[name]
        hold = device.holder
        if hold is None:
            return self._let_in(name, now_us)
        if hold.overran or now_us <= hold.limit_us:
            return []
        noted = self._note_overrun(name, device, hold)
        end: list[Effect] = [End(hold.wait.client)] if self._is_ended(hold) else []
        return [_owed(device, hold, now_us), _overran(hold, now_us, over=False), *noted, *end]

    def _settle(self, device: _Device, hold: _Hold, now_us: int) -> list[Effect]:
        """A turn is over that lasted too long, perhaps before anybody looked."""
        noted = [] if hold.overran else self._note_overrun(hold.wait.terms.device, device, hold)
        self._charge(hold, now_us)
        return [_owed(device, hold, now_us), _overran(hold, now_us, over=True), *noted]

    def _is_ended(self, hold: _Hold) -> bool:
        return self._end_overruns or hold.wait.terms.best_effort

    def _note_overrun(self, name: str, device: _Device, hold: _Hold) -> list[Effect]:
        hold.overran = True
        hold.touched = {wait.terms.container for wait in device.waiting.values()}
        return [] if self._is_ended(hold) else self._lose(name, device, hold)

    def _lose(self, name: str, device: _Device, hold: _Hold) -> list[Effect]:
        culprit = hold.wait.terms.container
        if culprit in device.culprits:
            return []
        others = {terms.container for terms in self._clients.values() if terms.device == name} - {culprit}
        neighbours = device.culprits[culprit] = tuple(sorted(others))
        return [Standing(name, gated=False, culprit=culprit, neighbours=neighbours)]

    def _spare(self, event: Spared, now_us: int) -> list[Effect]:
        client = event.client
        terms = self._clients.get(client)
        device = self._devices[terms.device] if terms else None
        if terms is None or device is None or device.holder is None or device.holder.wait.client != client:
            return []
        lost = self._lose(terms.device, device, device.holder)
        return [_owed(device, device.holder, now_us), *lost]

    def _charge(self, hold: _Hold, now_us: int) -> None:
        """As in a constant-bandwidth server: x times the runtime is paid for by x periods (THEORY section 3)."""
        terms, account, held_us = hold.wait.terms, hold.wait.account, now_us - hold.since_us
        account.barred_us = hold.wait.arrival_us + -(-held_us * terms.period_us // terms.runtime_us)
        account.next_us = max(account.next_us, account.barred_us)

    def _forget(self, container: str) -> list[Effect]:
        self._accounts.pop(container, None)
        effects: list[Effect] = []
        for name, device in self._devices.items():
            if container in device.culprits:
                del device.culprits[container]
                if not device.culprits:
                    effects.append(Standing(name, gated=True, culprit=container, neighbours=()))
        return effects

    # --- what a former arbiter knew ---

    def _resume(self, event: Inside, now_us: int) -> list[Effect]:
        terms = self._clients[event.client]
        device = self._devices[terms.device]
        assert device.holder is None, "two at once"
        since_us = min(event.since_us, now_us)
        device.opened, device.holder = True, self._hold(self._wait(Asked(event.client, 0), terms, since_us), since_us)
        return []

    def _recall(self, event: Owed) -> list[Effect]:
        self._accounts[event.container] = _Account(event.until_us, event.until_us)
        effects = self._know(event.device)
        if not event.lost:
            return effects
        self._devices[event.device].culprits[event.container] = event.neighbours
        overran = Overran(event.device, event.container, event.held_us, event.runtime_us, event.touched, over=False)
        return [
            *effects,
            overran,
            Standing(event.device, gated=False, culprit=event.container, neighbours=event.neighbours),
        ]


def _due_us(device: _Device) -> int | None:
    if device.holder:
        return None if device.holder.overran else device.holder.limit_us + 1
    if not device.opened:
        return None
    return min((wait.account.barred_us for wait in device.waiting.values()), default=None)


def _told(name: str, device: _Device) -> Iterator[tuple[str, str]]:
    """Each container at a device, and what it does there; the holder first, then in the order of their turns."""
    if hold := device.holder:
        container = hold.wait.terms.container
        late = ", longer than it may" if hold.overran else ""
        yield container, f"{name}: {container} since {hold.since_us} us, until at most {hold.limit_us} us{late}"
    for wait in sorted(device.waiting.values(), key=lambda wait: wait.order):
        container, account = wait.terms.container, wait.account
        yield container, f"{name}: {container} waits, due at {wait.due_us} us, not before {account.barred_us} us"


def _overran(hold: _Hold, now_us: int, *, over: bool) -> Overran:
    terms = hold.wait.terms
    return Overran(terms.device, terms.container, now_us - hold.since_us, terms.runtime_us, _touched(hold), over)


def _owed(device: _Device, hold: _Hold, now_us: int) -> Owed:
    terms = hold.wait.terms
    return Owed(
        terms.container,
        terms.device,
        hold.wait.account.barred_us,
        now_us - hold.since_us,
        terms.runtime_us,
        _touched(hold),
        terms.container in device.culprits,
        device.culprits.get(terms.container, ()),
    )


def _touched(hold: _Hold) -> tuple[str, ...]:
    return tuple(sorted(hold.touched - {hold.wait.terms.container}))
