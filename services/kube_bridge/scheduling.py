"""The scheduler's two questions. Filter: which node; the placers hold one. Bind: the placers confirm it; no I/O.

A pod that asks for nothing of ours passes everywhere and is bound as it is. Every call gets one answer, and an answer
to filter names one node at most, one that was offered.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from services.kube_bridge import sentences
from services.kube_bridge.ahead import Ahead
from services.kube_bridge.asked import Terms, asked
from services.kube_bridge.calls import (
    Answer,
    AskConfirm,
    AskPlace,
    BindAsked,
    BindPlain,
    ClaimsLooked,
    ConfirmAnswered,
    FilterAsked,
    LookAtClaims,
    LookAtPod,
    PlaceAnswered,
    PlainBound,
    PodLooked,
)
from services.kube_bridge.claims import Claims, claims_of
from services.kube_bridge.conditions import Conditions, Subject
from services.kube_bridge.gangs import Gang, Member, members, together
from services.kube_bridge.nudging import Nudging, nudge
from services.kube_bridge.releasing import Releasing
from services.kube_bridge.seen import Condition, PodSeen
from services.kube_bridge.verdicts import Key, Refusal, Verdicts
from services.kube_bridge.view import View
from shared.effects import Effect
from shared.errors import FieldError
from shared.messages import AllExcept, PlaceReply, PlaceRequest, Pod, State

REMEMBERED: Final = 10_000
"""Answers to filter that a bind may follow."""
_LATER: Final = sentences.plain("Later", sentences.LATER)
_PLACED: Final = {State.HELD, State.PLACED, State.STARTED}


@dataclass(frozen=True, slots=True)
class Hold:
    """What filter answered last for a pod, or would; generation 0: it asks for nothing of ours."""

    node: str
    generation: int
    request_id: str = ""
    until_us: int = 0
    """By then the placers may have given it to others."""
    claims: tuple[str, ...] = ()
    """Of a pod that asks for nothing of ours: what Kubernetes may have given it (DRA)."""


@dataclass(frozen=True, slots=True)
class _Filtering:
    call: FilterAsked
    """What waits for it; its token is 0 while the pod's turn has not come."""
    subject: Subject
    key: Key
    world: int
    request: PlaceRequest

    @property
    def pods(self) -> tuple[Pod, ...]:
        """For each replica."""
        return self.request.pods or ()


@dataclass(frozen=True, slots=True)
class _Binding:
    asked: BindAsked
    reply: PlaceReply | None = None


class Scheduling:
    """`holds` outlives nothing: another bridge, or the next start, reads the same from the ledger."""

    def __init__(
        self, view: View, releasing: Releasing, claims: Claims, conditions: Conditions, terms: Terms, verdict_us: int
    ) -> None:
        """`releasing` knows all pods that the API server has shown, and which nodes keep what nobody can give back."""
        self.ahead = Ahead(terms.ahead)
        self._pods: Mapping[str, PodSeen] = releasing.pods
        self._unheard, self._claims = releasing.unheard, claims
        self._view, self._conditions, self._terms = view, conditions, terms
        self._verdicts = Verdicts(verdict_us)
        self.nudging = Nudging(self._verdicts)
        self._filtering: dict[int, _Filtering] = {}
        self._binding: dict[int, _Binding] = {}
        self.counters: Counter[str] = Counter()
        self.holds: OrderedDict[str, Hold] = OrderedDict()
        self._incomplete_gangs: dict[Gang, tuple[Subject, Condition]] = {}
        self._known_last: frozenset[str] = frozenset()
        self.unfit: set[str] = set()
        """Nodes that publish our resources themselves."""

    # --- filter ---

    def filter(self, call: FilterAsked, now_us: int) -> list[Effect]:
        decided = self._decided_ahead(call, now_us)
        return self._in_its_turn(call, now_us) if decided is None else decided

    def _in_its_turn(self, call: FilterAsked, now_us: int) -> list[Effect]:
        subject = Subject.of(call.pod)
        try:
            wanted = asked(call.pod, self._terms)
            if wanted is not None:
                self._claims.check_beside(call.pod)
        except FieldError as fault:
            self.counters["filter.unreadable"] += 1
            said = self._conditions.say(subject, sentences.unreadable(fault), now_us)
            return [self._none(call.token, call.nodes, sentences.UNREADABLE), *said]
        if wanted is None:
            self.counters["filter.plain"] += 1
            self._remember(subject.uid, Hold("", 0, claims=tuple(claims_of(call.pod).values())))
            return [self._passes(call.token, call.nodes)]
        if self._claims.taking_ours:
            self.counters["filter.class_takes_ours"] += 1
            said = self._conditions.say(subject, sentences.plain("ClassTakesOurs", sentences.CLASS), now_us)
            return [self._none(call.token, call.nodes, sentences.CLASS), *said]
        if wanted.gang is not None and (node := self._with_its_gang(subject.uid, call.nodes, now_us)):
            self.counters["filter.with_its_gang"] += 1
            return [self._passes(call.token, (node,))]
        request = wanted.request if wanted.gang is None else self._whole(wanted.request, wanted.gang, subject.uid)
        if request is None:
            assert wanted.gang is not None
            return self._incomplete(call, subject, wanted.gang, now_us)
        known = self._known(call.nodes)
        key = (wanted.kind, known)
        if not known:
            return self._nothing_known(call, subject, key, now_us)
        holds = self._from_ledger(subject.uid) is not None  # then what it holds itself may do
        if not holds and (refused := self._without_asking(call, subject, key, now_us)):
            return refused
        asks = _Filtering(call, subject, key, self._view.world, request)
        return [self._ask(call.token, asks)]

    def _ask(self, token: int, asks: _Filtering) -> Effect:
        self._filtering[token] = asks
        return AskPlace(token, asks.request.model_copy(update={"candidates": self._among(asks.key[1])}))

    # --- those whose turn has not come ---

    def _decided_ahead(self, call: FilterAsked, now_us: int) -> list[Effect] | None:
        """What follows where the placers were asked about it already; None where its turn is as any pod's."""
        uid = call.pod["metadata"]["uid"]
        there, under_way = self.ahead.take(uid, call.pod)
        if not there or self._claims.taking_ours:
            return None
        if under_way:
            asks = self._filtering[under_way]
            if asks.call.token:
                return None
            self._filtering[under_way] = replace(asks, call=call)  # which that answer will be for
            return []
        hold = self.holds.get(uid)
        if hold is None or hold.until_us <= now_us or hold.node in self.unfit or hold.node not in call.nodes:
            return None
        self.counters["filter.ahead"] += 1
        return [self._passes(call.token, (hold.node,)), *self._ask_ahead(call, now_us)]

    def _ask_ahead(self, call: FilterAsked, now_us: int) -> list[Effect]:
        """Places for some that wait behind a pod that got one, on the nodes that it was offered."""
        following = self.ahead.next(call.pod, now_us)
        known = self._known(call.nodes) if following else frozenset()
        effects: list[Effect] = []
        for pod in following:
            subject = Subject.of(pod)
            try:
                wanted = asked(pod, self._terms)
            except FieldError:
                continue  # it hears of that in its turn
            if wanted is None or self._from_ledger(subject.uid) is not None:
                continue
            key, world = (wanted.kind, known), self._view.world
            if self._verdicts.get(key, world, now_us) or self.nudging.comes_after(subject, key, world, now_us):
                continue
            asks = _Filtering(FilterAsked(0, pod, call.nodes), subject, key, world, wanted.request)
            effects.append(self._ask(self.ahead.asks(subject.uid, pod), asks))
        return effects

    def _answered_ahead(self, asks: _Filtering, reply: PlaceReply | None, now_us: int) -> list[Effect]:
        """Kept for its turn. Where that has come, and this is no place that was offered, it is asked about as any."""
        pod, call = self.ahead.answered(asks.subject.uid), asks.call
        if reply is not None and _holds(reply):
            if not call.token:
                self._remember_all(asks, reply, now_us)
                if asks.subject.uid in self._pods:  # else it is given back
                    self.ahead.held(asks.subject.uid, pod, now_us + self._terms.hold_us)
            elif reply.placements[0].node in call.nodes:
                self.counters["filter.ahead"] += 1
                return self._held(asks, reply, now_us)
        elif reply is not None and reply.outcome == State.REJECTED:
            self._verdicts.put(asks.key, self._refusal(asks, reply, now_us))
        return self._in_its_turn(call, now_us) if call.token else []

    def _known(self, offered: Iterable[str]) -> frozenset[str]:
        """Those of them that can be placed on; the same object where they are the same as the last time, since to look
        a thousand names up by their hash is most of what a call costs."""
        known = self._view.nodes.intersection(offered)
        if self.unfit:
            known -= self.unfit
        if known != self._known_last:
            self._known_last = frozenset(known)
        return self._known_last

    def _among(self, known: frozenset[str]) -> tuple[str, ...] | AllExcept | None:
        """These nodes, in the fewest words: mostly all are offered, and each name travels and is stored several times.

        So a node may be chosen that only the placers know yet: it was not offered, and the scheduler asks again.
        """
        if len(known) == len(self._view.nodes):
            return None
        others = self._view.nodes - known
        if len(others) >= len(known):
            return tuple(sorted(known))
        return AllExcept(all_except=tuple(sorted(others)))

    def _without_asking(self, call: FilterAsked, subject: Subject, key: Key, now_us: int) -> list[Effect]:
        """The refusal of a pod that holds nothing, where it is known or others come first; empty where it is not."""
        verdict = self._verdicts.get(key, self._view.world, now_us)
        if verdict is not None:
            return self._known_refusal(call, subject, key, verdict, now_us)
        if self.nudging.put_off(subject, _LATER, key, self._view.world, now_us):
            self.counters["filter.later"] += 1
            return [self._none(call.token, call.nodes, sentences.LATER, key[1])]
        return []

    def _known_refusal(
        self, call: FilterAsked, subject: Subject, key: Key, verdict: Refusal, now_us: int
    ) -> list[Effect]:
        self.counters["filter.known_refusal"] += 1
        self.nudging.refused(subject, verdict.condition, key, verdict.world)
        said = self._conditions.say(subject, verdict.condition, now_us)
        return [self._none(call.token, call.nodes, verdict.sentence, key[1]), *said]

    def _with_its_gang(self, uid: str, offered: tuple[str, ...], now_us: int) -> str | None:
        """The node that it got when another of its gang was asked about: to ask again would move them all."""
        hold = self.holds.get(uid)
        if hold is None or not hold.generation or hold.until_us <= now_us:
            hold = self._from_ledger(uid)
        return hold.node if hold is not None and hold.node in offered else None

    def _whole(self, request: PlaceRequest, gang: Gang, uid: str) -> PlaceRequest | None:
        """The request for its whole gang; None while some of that are missing."""
        found = self._members(gang)
        if found is None or uid not in {each.uid for each in found}:
            return None
        return together(request, gang, found)

    def _members(self, gang: Gang) -> tuple[Member, ...] | None:
        return members(gang, (pod.member for pod in self._pods.values() if pod.member is not None))

    def tick(self, now_us: int) -> list[Effect]:
        """Pods that are to be tried again: what became free, gangs that have become whole."""
        effects = self.nudging.tick(self._view.world, now_us)
        for gang, (subject, condition) in list(self._incomplete_gangs.items()):
            if self._members(gang) is not None:
                del self._incomplete_gangs[gang]
                effects.append(nudge(subject, condition))
        return effects

    def _incomplete(self, call: FilterAsked, subject: Subject, gang: Gang, now_us: int) -> list[Effect]:
        """Whoever comes last asks for all; where that one was asked about before all were seen, it is nudged."""
        self.counters["filter.gang_incomplete"] += 1
        condition = sentences.plain("GangIncomplete", sentences.GANG)
        self._incomplete_gangs[gang] = (subject, condition)
        said = self._conditions.say(subject, condition, now_us)
        return [self._none(call.token, call.nodes, sentences.GANG), *said]

    def _nothing_known(self, call: FilterAsked, subject: Subject, key: Key, now_us: int) -> list[Effect]:
        self.counters["filter.no_node"] += 1
        condition = sentences.plain("NoNode", sentences.NOT_OURS)
        self.nudging.refused(subject, condition, key, self._view.world)
        said = self._conditions.say(subject, condition, now_us)
        return [self._none(call.token, call.nodes, sentences.NOT_OURS), *said]

    def asked_for(self, token: int) -> list[str]:
        """Uids of the pods that a call's request is for."""
        asked = self._filtering.get(token)
        return [pod.uid for pod in asked.pods] if asked is not None else []

    def place_answered(self, event: PlaceAnswered, now_us: int) -> list[Effect]:
        asked = self._filtering.pop(event.token, None)
        if asked is None:
            return []
        reply, token = event.reply, asked.call.token
        if event.token < 0:
            return self._answered_ahead(asked, reply, now_us)
        if reply is None:
            self.counters["filter.no_answer"] += 1
            return [_unfiltered(token, sentences.NO_ANSWER)]
        self.counters[f"filter.{reply.outcome}"] += 1
        if _holds(reply):
            return self._held(asked, reply, now_us)
        if reply.outcome == State.REJECTED:
            return self._rejected(asked, reply, now_us)
        return self._odd(asked, reply, now_us)

    def _held(self, asked: _Filtering, reply: PlaceReply, now_us: int) -> list[Effect]:
        self._remember_all(asked, reply, now_us)
        call, node = asked.call, self.holds[asked.subject.uid].node
        if node not in call.nodes:
            again = reply.outcome == State.HELD  # which the next filter replaces
            why = sentences.ELSEWHERE
            return [_unfiltered(call.token, why) if again else self._none(call.token, call.nodes, why)]
        return [self._passes(call.token, (node,)), *self._ask_ahead(call, now_us)]

    def _remember_all(self, asked: _Filtering, reply: PlaceReply, now_us: int) -> None:
        """Of a gang each."""
        assert reply.generation is not None
        assert reply.request_id is not None
        until_us = now_us + self._terms.hold_us // 2
        for each in reply.placements:
            uid = asked.pods[each.replica].uid
            self._remember(uid, Hold(each.node, reply.generation, reply.request_id, until_us))

    def _refusal(self, asked: _Filtering, reply: PlaceReply, now_us: int) -> Refusal:
        condition = sentences.refused(reply, len(asked.key[1]), self._unheard())
        return Refusal(sentences.sentence(reply.reasons), condition, asked.world, now_us)

    def _rejected(self, asked: _Filtering, reply: PlaceReply, now_us: int) -> list[Effect]:
        refusal = self._refusal(asked, reply, now_us)
        self._verdicts.put(asked.key, refusal)
        self.nudging.refused(asked.subject, refusal.condition, asked.key, asked.world)
        said = self._conditions.say(asked.subject, refusal.condition, now_us)
        return [self._none(asked.call.token, asked.call.nodes, refusal.sentence, asked.key[1]), *said]

    def _odd(self, asked: _Filtering, reply: PlaceReply, now_us: int) -> list[Effect]:
        """Its request has ended, was another one, or cannot be decided at all."""
        if reply.error is not None and reply.error.field == "(ledger)":
            return [_unfiltered(asked.call.token, sentences.DOUBTFUL)]
        sentence = sentences.OVER
        condition = sentences.plain("Over", f"its request is {reply.outcome}: make a new pod")
        if reply.error is not None:
            sentence = sentences.CHANGED if reply.error.field == "request_id" else sentences.UNREADABLE
            fault = FieldError(reply.error.field, reply.error.found, reply.error.allowed)
            condition = sentences.unreadable(fault)
        said = self._conditions.say(asked.subject, condition, now_us)
        return [self._none(asked.call.token, asked.call.nodes, sentence), *said]

    # --- bind ---

    def bind(self, call: BindAsked) -> list[Effect]:
        hold, pod = self.holds.get(call.uid) or self._from_ledger(call.uid), self._pods.get(call.uid)
        if hold is None and pod is not None and not pod.wants:
            hold = Hold("", 0, claims=pod.claims)
        if hold is None or (hold.generation and hold.node != call.node):
            self.counters["bind.no_hold"] += 1
            return [_failed(call.token, sentences.NO_HOLD)]
        if not hold.generation and not (hold.claims and self._claims.kinds):
            return [_plain(call)]
        self._binding[call.token] = _Binding(call)
        if not hold.generation:
            return [LookAtClaims(call.token, hold.claims)]
        return [AskConfirm(call.token, hold.request_id, hold.generation)]

    def claims_looked(self, event: ClaimsLooked) -> list[Effect]:
        """What kube-scheduler gave its claims just now, which it may not know to be reserved."""
        binding = self._binding.pop(event.token, None)
        if binding is None:
            return []
        if event.found is None:
            return [_failed(event.token, sentences.NO_ANSWER)]
        for claim in event.found:
            self._claims.changed("resourceclaims", claim)
        reserved = self._view.reserved(binding.asked.node)
        given = self._claims.of_claims(event.found)
        if any(uuid in reserved for uuid in given):
            self.counters["bind.claimed"] += 1
            return [_failed(event.token, sentences.CLAIMED)]
        return [_plain(binding.asked)]

    def _from_ledger(self, uid: str) -> Hold | None:
        """Another bridge may have answered filter, or this one before it was started anew."""
        known = self._view.of_pod(uid)
        node = known.site(uid).node if known is not None else None
        return Hold(node, known.generation, known.request_id) if known is not None and node is not None else None

    def confirm_answered(self, event: ConfirmAnswered, now_us: int) -> list[Effect]:
        binding = self._binding.pop(event.token, None)
        if binding is None:
            return []
        call, reply = binding.asked, event.reply
        if reply is not None and reply.outcome == State.STARTED and _on(reply, call.node):
            return self._bound(call, reply, now_us)
        if reply is not None and reply.outcome == State.EXPIRED and reply.reasons:
            self.counters["bind.refused"] += 1
            said = self._conditions.say(Subject(call.namespace, call.name, call.uid), _why(reply), now_us)
            return [_failed(call.token, sentences.NOT_BOUND), *said]
        # nobody said how it ended, or it ended meanwhile: the pod itself knows whether it is bound
        self.counters["bind.unclear"] += 1
        self._binding[event.token] = _Binding(call, reply)
        return [LookAtPod(call.namespace, call.name, call.uid, event.token)]

    def looked(self, event: PodLooked, now_us: int) -> list[Effect]:
        binding = self._binding.pop(event.token, None)
        if binding is None:
            return []
        if event.there and event.node == binding.asked.node:
            return self._bound(binding.asked, binding.reply, now_us)
        return [_failed(event.token, sentences.NOT_BOUND if event.there is not None else sentences.NO_ANSWER)]

    def _bound(self, call: BindAsked, reply: PlaceReply | None, now_us: int) -> list[Effect]:
        self.counters["bind.bound"] += 1
        self.holds.pop(call.uid, None)
        answer = Answer(call.token, {"Error": ""})
        if reply is None or not reply.placements:
            return [answer]
        seen = self._pods.get(call.uid)
        subject = Subject(call.namespace, call.name, call.uid, seen.says if seen is not None else None)
        return [answer, *self._conditions.bound(subject, sentences.placed(reply), now_us)]

    def plain_bound(self, event: PlainBound) -> list[Effect]:
        self.counters["bind.plain_refused" if event.error else "bind.plain"] += 1
        return [Answer(event.token, {"Error": f"laxity: {event.error}" if event.error else ""})]

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self.holds.pop(uid, None)
        self.nudging.forget(uid)
        self.ahead.forget(uid)
        for gang in [gang for gang, (subject, _) in self._incomplete_gangs.items() if subject.uid == uid]:
            del self._incomplete_gangs[gang]

    # --- answers ---

    def _remember(self, uid: str, hold: Hold) -> None:
        self.nudging.forget(uid)
        self.holds[uid] = hold
        self.holds.move_to_end(uid)
        if len(self.holds) > REMEMBERED:
            self.holds.popitem(last=False)

    def _passes(self, token: int, nodes: Iterable[str]) -> Answer:
        return Answer(token, _filtered(tuple(nodes), {}))

    def _none(self, token: int, offered: Iterable[str], sentence: str, known: frozenset[str] | None = None) -> Answer:
        """No node, each with its sentence; `known`: those that Laxity could speak of, all of them where absent."""
        unknown = {True: sentences.PUBLISHED, False: sentences.NOT_OURS}
        whys = {n: sentence if known is None or n in known else unknown[n in self.unfit] for n in offered}
        return Answer(token, _filtered((), whys))


def refuse(call: FilterAsked | BindAsked, why: str) -> Answer:
    """An answer that the scheduler takes for a fault of ours: it tries again after a while."""
    return (_failed if isinstance(call, BindAsked) else _unfiltered)(call.token, why)


def _failed(token: int, why: str) -> Answer:
    return Answer(token, {"Error": why})


def _plain(call: BindAsked) -> BindPlain:
    return BindPlain(call.token, call.namespace, call.name, call.uid, call.node)


def _unfiltered(token: int, why: str) -> Answer:
    return Answer(token, _filtered((), {}, why))


def _filtered(nodes: tuple[str, ...], whys: Mapping[str, str], error: str = "") -> dict[str, Any]:
    """Unresolvable, so that no pod is evicted for what an eviction may not mend (case KU08)."""
    return {
        "NodeNames": list(nodes),
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": dict(whys),
        "Error": error,
    }


def _holds(reply: PlaceReply) -> bool:
    """It names a place."""
    return reply.outcome in _PLACED and bool(reply.placements) and bool(reply.generation)


def _on(reply: PlaceReply, node: str) -> bool:
    return any(each.node == node for each in reply.placements)


def _why(reply: PlaceReply) -> Any:
    return sentences.refused(reply, len(reply.placements) or 1)
