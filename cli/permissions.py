"""Who may say and hear what on the bus, as data, and the server's configuration made of it; keys are cli.keys' work.

Three accounts, because allow-lists alone do not hold: the server never asks whether a user may publish on the reply
subject of its request, so whoever may ask anything could have the answer written into a bucket. Between accounts a
reply goes back to the account that asked, and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shared.settings import ServiceSettings
from shared.streams import bucket_stream, named, wanted
from shared.subjects import DEADLINES, EVENTS_STREAM, LEARNED, LEDGER, NODES, PLACE_STREAM, encode

CORE, MONITORS, CLIENTS = "LAXITY", "LAXITY_NODES", "LAXITY_CLIENTS"
"""The accounts: services and streams; monitors; clients."""
SERVICES = ("deadline-tracker", "node-list", "placer", "kube-bridge")
OPERATOR = "operator"
ASKED = ("PING", "INFO", "STATS")
"""What the NATS services convention asks a service."""


@dataclass(frozen=True, slots=True)
class User:
    """One nkey user. What its lists do not name, the server refuses."""

    name: str
    account: str
    about: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """A subject that one account offers to another: ``service`` is asked, ``many`` may answer; ``stream`` is heard."""

    subject: str
    owner: str
    taker: str
    kind: Literal["service", "many", "stream"] = "service"


@dataclass(frozen=True)
class Rules:
    """The rules under one subject prefix."""

    prefix: str = "rt"

    def users(self, nodes: Sequence[str] = (), clients: Sequence[str] = ()) -> tuple[User, ...]:
        """All users of a cluster; the plain ``client`` is always among them."""
        tokens = [encode(node, "node") for node in nodes]
        names = ["client", *(f"client-{encode(name, 'client')}" for name in clients)]
        fixed = (self.tracker(), self.node_list(), self.placer(), self.kube_bridge(), self.operator())
        return (*fixed, *map(self.monitor, tokens), *map(self.client, names))

    # --- the services ---

    def tracker(self) -> User:
        reads = self._reads(DEADLINES, LEDGER, NODES, EVENTS_STREAM)
        says = (f"{self.prefix}.events.deadline.>", self._key(DEADLINES), *reads)
        return self._service("deadline-tracker", "judges tasks", says, (f"{self.prefix}.metrics.*",))

    def node_list(self) -> User:
        events = (f"{self.prefix}.events.node.>", f"{self.prefix}.events.list.>")
        reads = self._reads(NODES, LEDGER, DEADLINES, LEARNED, EVENTS_STREAM)
        says = (*events, self._key(NODES), self._key(LEARNED), *reads)
        hears = (f"{self.prefix}.nodes", f"{self.prefix}.metrics.*", f"{self.prefix}.metrics.*.kube")
        return self._service("node-list", "keeps the list of nodes", says, hears)

    def placer(self) -> User:
        says = (f"{self.prefix}.events.place.>", self._key(LEDGER), *self._reads(LEDGER, NODES, LEARNED))
        says = (*says, *self._works(PLACE_STREAM, "placer"), *self._makes_streams())
        asked = ("place", "confirm", "resize", "defragment", "gone", "release")
        hears = tuple(f"{self.prefix}.{word}" for word in asked)
        return self._service("placer", "decides; keeps the ledger; makes and mends the streams", says, hears)

    def kube_bridge(self) -> User:
        says = (f"{self.prefix}.metrics.*.kube", *self._asks(), *self._reads(LEDGER, NODES, EVENTS_STREAM))
        hears = (f"{self.prefix}.events.place.>", f"{self.prefix}.pods")
        return self._service("kube-bridge", "translates for Kubernetes", says, hears)

    def _service(self, name: str, about: str, says: tuple[str, ...], hears: tuple[str, ...] = ()) -> User:
        usual = (f"{self.prefix}.events.bus.{name}", *self._infos(), *self._answers(), self._inbox(name))
        return User(name, CORE, about, (*says, *usual), (*hears, *_asked_of(name), self._inbox(name)))

    # --- everybody else ---

    def operator(self) -> User:
        """Whoever runs the cluster: all that is read, streams, moves, lost nodes, the ledger's identity, forgetting."""
        words = tuple(f"{self.prefix}.{word}" for word in ("defragment", "gone", "pods"))
        keys = (f"$KV.{named(LEDGER, self.prefix)}.ledger", f"$KV.{named(LEARNED, self.prefix)}.profile.>")
        own = (*words, *keys, "$SRV.>", "$JS.>")
        says = (*self._asks(), *own, self._inbox(OPERATOR))
        about = (
            "runs the cluster: reads all, moves containers, says that a node is gone, accepts a ledger,"
            " has learned times forgotten; makes, deletes and restores streams"
        )
        return User(OPERATOR, CORE, about, says, (f"{self.prefix}.>", self._inbox(OPERATOR)))

    def monitor(self, token: str) -> User:
        """The monitor of one node, whose name is ``token`` in subjects."""
        name = f"monitor-{token}"
        own = (f"{self.prefix}.metrics.{token}", f"{self.prefix}.events.task.{token}", self._last_batch(token))
        says = (*own, f"{self.prefix}.events.bus.monitor", "_R_.>", self._inbox(name))
        return User(name, MONITORS, "speaks for its own node", says, (*_asked_of("monitor"), self._inbox(name)))

    def client(self, name: str) -> User:
        says = (*self._asks(), "$SRV.PING", "$SRV.PING.*", *self._history(), self._inbox(name))
        hears = (f"{self.prefix}.events.>", self._inbox(name))
        return User(name, CLIENTS, "asks and listens; reads the history of events", says, hears)

    # --- between the accounts ---

    def shared(self) -> tuple[Shared, ...]:
        """What crosses the border of an account; all else does not."""
        prefix = self.prefix
        to_clients = [Shared(subject, CORE, CLIENTS) for subject in self._asks()]
        to_clients += [Shared(subject, CORE, CLIENTS, "many") for subject in ("$SRV.PING", "$SRV.PING.*")]
        to_clients += [Shared(subject, CORE, CLIENTS, "many") for subject in self._history()]
        to_clients += [Shared(f"{prefix}.events.>", CORE, CLIENTS, "stream")]
        said = (f"{prefix}.metrics.*", f"{prefix}.events.task.*", f"{prefix}.events.bus.monitor", self._last_batch("*"))
        to_monitors = [Shared(subject, CORE, MONITORS) for subject in said]
        from_monitors = [Shared(subject, MONITORS, CORE, "many") for subject in _asked_of("monitor")]
        # What a monitor says is asked of CORE, so to others it is heard from the monitors' account.
        heard = [f"{prefix}.events.task.*", f"{prefix}.events.bus.monitor"]
        from_monitors += [Shared(subject, MONITORS, CLIENTS, "stream") for subject in heard]
        return (*to_clients, *to_monitors, *from_monitors)

    # --- lists ---

    def _asks(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{word}" for word in ("place", "confirm", "resize", "release", "nodes"))

    def _streams(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in wanted(ServiceSettings().model_copy(update={"prefix": self.prefix})))

    def _infos(self) -> tuple[str, ...]:
        """What ``ensure_streams`` looks at."""
        return tuple(f"$JS.API.STREAM.INFO.{stream}" for stream in self._streams())

    def _makes_streams(self) -> tuple[str, ...]:
        """The placer's alone: a stream's configuration can copy messages anywhere."""
        return tuple(f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE") for stream in self._streams())

    def _history(self) -> tuple[str, ...]:
        """Reading events without a consumer, which could be told to deliver anywhere."""
        return (f"$JS.API.DIRECT.GET.{named(EVENTS_STREAM, self.prefix)}",)

    def _last_batch(self, token: str) -> str:
        """Reading the last task events of one node."""
        return f"$JS.API.DIRECT.GET.{named(EVENTS_STREAM, self.prefix)}.{self.prefix}.events.task.{token}"

    def _reads(self, *names: str) -> tuple[str, ...]:
        """Following streams and buckets, and reading single keys."""
        return tuple(subject for name in names for subject in self._read(name))

    def _read(self, name: str) -> Iterator[str]:
        stream = named(name, self.prefix) if name == EVENTS_STREAM else bucket_stream(name, self.prefix)
        yield f"$JS.API.CONSUMER.CREATE.{stream}"
        yield f"$JS.API.STREAM.MSG.GET.{stream}"
        yield f"$JS.FC.{stream}.>"

    def _works(self, stream: str, durable: str) -> tuple[str, ...]:
        """Sharing the messages of a stream among workers."""
        path = f"{named(stream, self.prefix)}.{durable}"
        api = tuple(f"$JS.API.CONSUMER.{verb}.{path}" for verb in ("CREATE", "INFO", "MSG.NEXT"))
        return (*api, f"$JS.ACK.{path}.>")

    def _key(self, bucket: str) -> str:
        return f"$KV.{named(bucket, self.prefix)}.>"

    def _answers(self) -> tuple[str, ...]:
        """Where answers go: through an account's border, or to those of our own account who ask."""
        return ("_R_.>", self._inbox(OPERATOR), self._inbox("kube-bridge"))

    def _inbox(self, name: str) -> str:
        return f"_INBOX.{name}.>"


def _asked_of(service: str) -> tuple[str, ...]:
    return tuple(f"$SRV.{verb}{tail}" for verb in ASKED for tail in ("", f".{service}", f".{service}.*"))


# --- the server's configuration ---


def configuration(rules: Rules, users: Iterable[User], public: Mapping[str, str]) -> str:
    """The block that the server's own configuration includes; ``public``: the public key of each user."""
    users = tuple(users)
    lines = ["# Made by `laxity keys`, which writes it anew; it holds no secret. Include it in nats-server.conf.", ""]
    lines.append("accounts {")
    for account in (CORE, MONITORS, CLIENTS):
        lines += [f"  {account} {{", *(["    jetstream: enabled"] if account == CORE else [])]
        lines += _block("exports", (_export(one) for one in rules.shared() if one.owner == account))
        lines += _block("imports", (_import(one) for one in rules.shared() if one.taker == account))
        lines += _block("users", (_user(one, public[one.name]) for one in users if one.account == account))
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _block(name: str, entries: Iterable[str]) -> Iterator[str]:
    yield f"    {name}: ["
    for entry in entries:
        yield f"      {entry}"
    yield "    ]"


def _export(one: Shared) -> str:
    answers = ", response_type: stream" if one.kind == "many" else ""
    return f"{{{_word(one)}: {_text(one.subject)}, accounts: [{one.taker}]{answers}}}"


def _import(one: Shared) -> str:
    return f"{{{_word(one)}: {{account: {one.owner}, subject: {_text(one.subject)}}}}}"


def _word(one: Shared) -> str:
    return "stream" if one.kind == "stream" else "service"


def _user(user: User, public: str) -> str:
    may = ", ".join(f"{verb}: {{allow: [{_list(subjects)}]}}" for verb, subjects in _may(user))
    return f"{{nkey: {public}, permissions: {{{may}}}}}  # {user.name}"


def _may(user: User) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("publish", user.publish), ("subscribe", user.subscribe)


def _list(subjects: Iterable[str]) -> str:
    return ", ".join(_text(subject) for subject in dict.fromkeys(subjects))


def _text(subject: str) -> str:
    return json.dumps(subject)
