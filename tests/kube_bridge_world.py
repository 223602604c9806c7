"""A bridge's core with everything around it in the hands of the test: calls, answers, pods, the ledger, time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.kube_bridge.asked import Terms
from services.kube_bridge.calls import (
    Answer,
    AskPlace,
    BindAsked,
    ClaimsListed,
    FilterAsked,
    Listed,
    PlaceAnswered,
    PodChanged,
    PodGone,
    WriteCondition,
)
from services.kube_bridge.core import Core
from services.kube_bridge.seen import NodeSeen, PodSeen
from shared.effects import Effect, KeyChanged, Tick, WatchReplayed
from shared.messages import (
    NodeReservations,
    Placement,
    PlaceReply,
    PlaceRequest,
    Reason,
    ReplicaRecord,
    RequestRecord,
    Reservation,
    State,
)
from shared.subjects import LEDGER, NODES, Subjects, node_key, request_key
from tests.kube_pods import node, pod
from tests.placer_world import facts

SECOND = 1_000_000


class Bridge:
    """Loaded unless told otherwise, with three nodes that Laxity knows."""

    def __init__(self, *nodes: str, loaded: bool = True, drivers: tuple[str, ...] = (), ahead: int = 0) -> None:
        self.core = Core(
            "b1",
            Subjects(),
            Terms(30 * SECOND, "deadline", ahead),
            verdict_us=10 * SECOND,
            condition_us=30 * SECOND,
            patience_us=3 * SECOND,
            drivers=drivers,
        )
        self.now = 1_000 * SECOND
        self.revision = 0
        self.tokens = 0
        self.nodes = nodes or ("n1", "n2", "n3")
        if loaded:
            self.load()

    def load(self) -> None:
        for name in self.nodes:
            self.key(NODES, node_key(name), facts(name).to_json())
        self.tell(WatchReplayed(NODES, frozenset(map(node_key, self.nodes))))
        self.tell(WatchReplayed(LEDGER, frozenset()))
        self.tell(Listed(pods=()))
        self.tell(Listed(nodes=tuple(NodeSeen.of(node(name)) for name in self.nodes)))
        for kind in self.core.claims.kinds:
            self.tell(ClaimsListed(kind, ()))

    def tell(self, event: object) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def key(self, bucket: str, key: str, value: bytes | None) -> list[Effect]:
        self.revision += 1
        return self.tell(KeyChanged(bucket, key, value, self.revision))

    def tick(self, name: str, seconds: float = 0) -> list[Effect]:
        self.now += int(seconds * SECOND)
        return self.tell(Tick(name, self.now))

    # --- the scheduler ---

    def filter(self, found: dict[str, Any], nodes: Iterable[str] | None = None) -> tuple[int, list[Effect]]:
        self.tokens += 1
        return self.tokens, self.tell(FilterAsked(self.tokens, found, tuple(nodes or self.nodes)))

    def hold(self, found: dict[str, Any], where: str, generation: int = 1) -> dict[str, Any]:
        """Filter, answered by the placers with a hold; the answer to the scheduler."""
        token, effects = self.filter(found)
        asked(effects)
        return answer(self.tell(PlaceAnswered(token, held(found["metadata"]["uid"], where, generation))))

    def bind(self, found: dict[str, Any], where: str) -> tuple[int, list[Effect]]:
        self.tokens += 1
        meta = found["metadata"]
        return self.tokens, self.tell(BindAsked(self.tokens, meta["namespace"], meta["name"], meta["uid"], where))

    # --- the API server and the ledger ---

    def show(self, found: dict[str, Any]) -> list[Effect]:
        return self.tell(PodChanged(PodSeen.of(found, "laxity")))

    def delete(self, found: dict[str, Any]) -> list[Effect]:
        return self.tell(PodGone(found["metadata"]["uid"]))

    def record(self, found: dict[str, Any], state: State, where: str = "n1", generation: int = 1) -> list[Effect]:
        """The ledger's record of the request for a pod."""
        meta = found["metadata"]
        mine = {name: meta[name] for name in ("namespace", "name", "uid")}
        request = PlaceRequest.model_validate(
            {"request_id": meta["uid"], "pods": (mine,), "gpu": {"share": 0.25}, "hold_us": 30 * SECOND}
        )
        holds = state in {State.HELD, State.PLACED, State.STARTED, State.STOPPING}
        replica = ReplicaRecord(
            replica=0,
            state=state,
            generation=generation,
            node=where if holds else None,
            devices=(f"{where}-gpu-0",) if holds else (),
        )
        final = state in {State.EXITED, State.RELEASED}
        record = RequestRecord(
            request_id=meta["uid"],
            body=request,
            body_hash="",
            state=state,
            owner="p1",
            replicas=(replica,),
            final=final,
        )
        return self.key(LEDGER, request_key(meta["uid"]), record.to_json())

    def reserve(self, where: str, *request_ids: str) -> None:
        """All that is reserved on a node."""
        held = tuple(
            Reservation(
                request_id=request_id,
                replica=0,
                generation=1,
                devices=(f"{where}-gpu-0",),
                share_micro=250_000,
                device_memory_mib=0,
                cpu_milli=0,
                memory_mib=0,
            )
            for request_id in request_ids
        )
        self.key(LEDGER, node_key(where), NodeReservations(node=where, reservations=held).to_json())


def wanting(name: str = "web", uid: str = "u-1", **more: Any) -> dict[str, Any]:
    return pod(name, uid, **({"gpu_milli": 250} | more))


def held(uid: str, where: str, generation: int = 1, outcome: str = "held") -> PlaceReply:
    placement = Placement(replica=0, node=where, devices=(f"{where}-gpu-0",), share=0.25, generation=generation)
    return PlaceReply(outcome=outcome, request_id=uid, generation=generation, placements=(placement,))


def rejected(uid: str, code: str = "not_now.share", message: str = "needs 0.25, largest free is 0.1") -> PlaceReply:
    return PlaceReply(outcome="rejected", request_id=uid, reasons=(Reason(code=code, count=3, message=message),))


def answer(effects: list[Effect]) -> dict[str, Any]:
    """The one answer among them."""
    (found,) = [each for each in effects if isinstance(each, Answer)]
    return dict(found.body)


def asked(effects: list[Effect]) -> PlaceRequest:
    (found,) = [each for each in effects if isinstance(each, AskPlace)]
    return found.request


def written(effects: list[Effect]) -> list[WriteCondition]:
    return [each for each in effects if isinstance(each, WriteCondition)]
