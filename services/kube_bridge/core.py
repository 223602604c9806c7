"""The bridge's core: the scheduler's calls, what the API server and the ledger show, and what follows; no I/O.

It keeps nothing that another one could not read again: any number of bridges can answer, each killed at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from services.kube_bridge import sentences
from services.kube_bridge.asked import Terms
from services.kube_bridge.calls import (
    AskRelease,
    BindAsked,
    ClaimsChanged,
    ClaimsGone,
    ClaimsListed,
    ClaimsLooked,
    ConfirmAnswered,
    FilterAsked,
    Listed,
    LookAtPod,
    NodeChanged,
    NodeGone,
    PlaceAnswered,
    PlainBound,
    PodChanged,
    PodGone,
    PodLooked,
    ReleaseAnswered,
    Silent,
)
from services.kube_bridge.claims import Claims
from services.kube_bridge.conditions import Conditions, Subject
from services.kube_bridge.facts import Facts
from services.kube_bridge.questions import about
from services.kube_bridge.releasing import Drift, Releasing
from services.kube_bridge.scheduling import Scheduling, refuse
from services.kube_bridge.seen import NodeSeen, PodSeen
from services.kube_bridge.view import View
from shared.effects import Disconnected, Effect, KeyChanged, Publish, Received, Reply, Tick, WatchReplayed
from shared.messages import BusEvent, PodsQuery
from shared.subjects import LEDGER, NODES, Subjects

SOON, COMPARE = "soon", "compare"
"""Ticks: what is due and node facts; pods against the ledger."""
MOST_LOOKS: Final = 100
_NEEDED: Final = ("pods", "nodes", LEDGER, NODES)


class Core:
    """One bridge. `instance` names it in what it tells; the times are settings."""

    def __init__(
        self,
        instance: str,
        subjects: Subjects,
        terms: Terms,
        *,
        verdict_us: int,
        condition_us: int,
        patience_us: int,
        drivers: Collection[str] = (),
    ) -> None:
        """`drivers`: those of DRA that give GPUs."""
        self._instance, self._subjects = instance, subjects
        self.view = View()
        self.conditions = Conditions(condition_us)
        self.facts = Facts(subjects, self.view)
        self.claims = Claims(drivers)
        self.releasing = Releasing(
            self.view,
            self.facts.nodes,
            patience_us,
            claimed=lambda: self.facts.claimed,
            taking_ours=lambda: self.claims.taking_ours,
        )
        self.scheduling = Scheduling(self.view, self.releasing, self.claims, self.conditions, terms, verdict_us)
        self.shown: set[str] = set()
        """Kinds that the API server has listed."""
        self.now_us = 0
        self._told = 0
        self._claims_seen = -1
        self._handlers: dict[type, Callable[[Any], list[Effect]]] = {
            FilterAsked: self._filter,
            BindAsked: self._bind,
            PlaceAnswered: self._place_answered,
            ConfirmAnswered: lambda event: self.scheduling.confirm_answered(event, self.now_us),
            PlainBound: self.scheduling.plain_bound,
            ClaimsLooked: self.scheduling.claims_looked,
            ClaimsListed: self._claims_listed,
            ClaimsChanged: self._claims_changed,
            ClaimsGone: self._claims_gone,
            PodLooked: self._looked,
            ReleaseAnswered: self._released,
            Listed: self._listed,
            PodChanged: lambda event: self._pod(event.pod),
            PodGone: lambda event: self._pod_gone(event.uid),
            NodeChanged: lambda event: self._node(event.node),
            NodeGone: self._node_gone,
            Silent: self._silent,
            KeyChanged: self._key_changed,
            WatchReplayed: self._replayed,
            Disconnected: self._disconnected,
            Tick: self._tick,
            Received: self._pods_asked,
        }

    def handle(self, event: object, now_us: int) -> list[Effect]:
        self.now_us = now_us
        handler = self._handlers.get(type(event))
        return handler(event) if handler is not None else []

    @property
    def counters(self) -> Counter[str]:
        return self.view.counters + self.scheduling.counters + self.releasing.counters

    @property
    def missing(self) -> list[str]:
        """What has to be loaded before anything is answered."""
        loaded = self.shown | self.view.loaded
        return [each for each in (*_NEEDED, *self.claims.kinds) if each not in loaded]

    @property
    def health(self) -> str:
        return f"not loaded: {', '.join(self.missing)}" if self.missing else "ok"

    def check(self) -> None:
        """A hold is of a pod that asks for something; nobody is on two nodes."""
        for uid, hold in self.scheduling.holds.items():
            assert bool(hold.node) == bool(hold.generation), f"{uid} is held on {hold.node!r}, generation {hold}"
        for uid, pod in self.releasing.pods.items():
            assert uid == pod.uid, f"{uid} is known as {pod.uid}"

    def story(self, id: str) -> list[str]:  # noqa: A002  # the word of the interface
        """What is known of one pod, by its uid."""
        pod, known, hold = self.releasing.pods.get(id), self.view.of_pod(id), self.scheduling.holds.get(id)
        return [f"{word}: {each}" for word, each in (("pod", pod), ("ledger", known), ("held", hold)) if each]

    # --- the scheduler ---

    def _filter(self, call: FilterAsked) -> list[Effect]:
        if self.missing:
            return [refuse(call, sentences.NOT_LOADED)]
        return self.scheduling.filter(call, self.now_us)

    def _bind(self, call: BindAsked) -> list[Effect]:
        if self.missing:
            return [refuse(call, sentences.NOT_LOADED)]
        return self.scheduling.bind(call)

    def _place_answered(self, event: PlaceAnswered) -> list[Effect]:
        pods, reply = self.scheduling.asked_for(event.token), event.reply
        effects = self.scheduling.place_answered(event, self.now_us)
        if reply is not None and reply.request_id is not None and any(self.releasing.is_over(uid) for uid in pods):
            effects.append(AskRelease(reply.request_id))
        return effects

    def _looked(self, event: PodLooked) -> list[Effect]:
        if event.token:
            return self.scheduling.looked(event, self.now_us)
        return self.releasing.looked(event, self.now_us)

    def _released(self, event: ReleaseAnswered) -> list[Effect]:
        self.releasing.answered(event)
        return []

    # --- people ---

    def _pods_asked(self, event: Received) -> list[Effect]:
        assert isinstance(event.message, PodsQuery)
        return [Reply(event.reply, about(event.message, self.releasing.pods, self.view, self.missing))]

    # --- the API server ---

    def _listed(self, event: Listed) -> list[Effect]:
        effects: list[Effect] = []
        if event.pods is not None:
            there = {pod.uid for pod in event.pods}
            for uid in [uid for uid in self.releasing.pods if uid not in there]:
                effects += self._pod_gone(uid)
            for pod in event.pods:
                effects += self._pod(pod)
            self.shown.add("pods")
        if event.nodes is not None:
            listed = {node.name for node in event.nodes}
            for name in [name for name in self.facts.nodes if name not in listed]:
                self._node_gone(NodeGone(name))
            for node in event.nodes:
                self._node(node)
            self.shown.add("nodes")
        return effects

    def _pod(self, pod: PodSeen) -> list[Effect]:
        self.facts.pod(pod.uid, pod)
        self.scheduling.ahead.seen(pod.uid, pod.waits)
        return self.releasing.changed(pod, self.now_us)

    def _pod_gone(self, uid: str) -> list[Effect]:
        self.facts.pod(uid, None)
        self.conditions.forget(uid)
        self.scheduling.forget(uid)
        return self.releasing.gone(uid, self.now_us)

    def _node(self, node: NodeSeen) -> list[Effect]:
        unfit = self.scheduling.unfit
        (unfit.add if node.publishes_ours else unfit.discard)(node.name)
        self.facts.node(node)
        return []

    def _node_gone(self, event: NodeGone) -> list[Effect]:
        self.facts.node_gone(event.name)
        self.scheduling.unfit.discard(event.name)
        return []

    def _claims_listed(self, event: ClaimsListed) -> list[Effect]:
        self.claims.listed(event.kind, event.found)
        self.shown.add(event.kind)
        return []

    def _claims_changed(self, event: ClaimsChanged) -> list[Effect]:
        self.claims.changed(event.kind, event.found)
        return []

    def _claims_gone(self, event: ClaimsGone) -> list[Effect]:
        self.claims.gone(event.kind, event.name)
        return []

    def _silent(self, event: Silent) -> list[Effect]:
        """Until it is listed again; calls go on being answered by what is known, since the scheduler asks the same
        server for its pods and nodes."""
        self.scheduling.counters[f"silent.{event.kind}"] += 1
        return []

    # --- the bus ---

    def _key_changed(self, change: KeyChanged) -> list[Effect]:
        self.view.changed(change)
        return []

    def _replayed(self, event: WatchReplayed) -> list[Effect]:
        self.view.replayed(event)
        return []

    def _disconnected(self, _: Disconnected) -> list[Effect]:
        self.view.lost()
        return []

    # --- time ---

    def _tick(self, tick: Tick) -> list[Effect]:
        if self.missing:
            return []
        if tick.name == SOON:
            if self._claims_seen != (seen := self.claims.changes + self.facts.changes):
                self._claims_seen = seen
                self.facts.claims(self.claims.by_node(self.facts.nodes))
            nudges = self.scheduling.tick(self.now_us)
            told = self.facts.tick(tick.wall_us)
            return [*self.releasing.tick(self.now_us), *nudges, *told]
        effects, new = self.releasing.compare(self.now_us)
        told = [effect for drift in new for effect in (self._tell(drift, tick.wall_us), *self._said_on_pod(drift))]
        return [*_few_looks(effects), *told, *self._mended()]

    def _mended(self) -> Iterator[Effect]:
        """Pods that are bound and say that they have no place."""
        for pod in self.releasing.pods.values():
            if pod.says is not None and pod.says.status == "False" and pod.bound_by_us and not pod.ended:
                subject = Subject(pod.namespace, pod.name, pod.uid, pod.says)
                yield from self.conditions.still_refused(subject, sentences.bound(pod), self.now_us)

    def _said_on_pod(self, drift: Drift) -> list[Effect]:
        """Where whoever looks at it would not understand what they see."""
        pod = self.releasing.pods.get(drift.uid)
        condition = sentences.OF_DRIFTS.get(drift.kind)
        if pod is None or condition is None or (condition.status == "False" and not pod.bound_by_others):
            return []
        return self.conditions.say(Subject(pod.namespace, pod.name, pod.uid, pod.says), condition, self.now_us)

    def _tell(self, drift: Drift, wall_us: int) -> Effect:
        self._told += 1
        name = "kube-bridge"
        body = BusEvent(
            at_us=wall_us, service=name, instance=self._instance, kind=f"drift_{drift.kind}", detail=drift.text
        )
        event_id = f"bus/{name}/{self._instance}/drift/{drift.kind}/{drift.uid}/{self._told}"
        return Publish(self._subjects.bus_event(name), body, event_id, f"bus.drift_{drift.kind}")


def _few_looks(effects: list[Effect]) -> list[Effect]:
    """No more reads of the API server than one comparison may cost; the next one goes on."""
    looks = [each for each in effects if isinstance(each, LookAtPod)]
    return [*(each for each in effects if not isinstance(each, LookAtPod)), *looks[:MOST_LOOKS]]
