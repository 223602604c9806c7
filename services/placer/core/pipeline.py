"""One decision from a request and a cluster: filters, scores, a plan, or the reasons; keeps nothing in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from services.placer.core.capabilities import ALL_CAN_ALL, Capabilities
from services.placer.core.changes import changes
from services.placer.core.cluster import Cluster
from services.placer.core.demand import Demand
from services.placer.core.outcome import MAX_GANG_NODES, Assignment, Decision, Fits, Move, Never, NotNow
from services.placer.core.planners.defrag import MOST_MOVES, moves_for
from services.placer.core.planners.gang import Plan
from services.placer.core.question import Question, Tenants, nobody
from services.placer.core.room import room
from services.placer.core.rows import Ask
from services.placer.core.sieve import Sieve
from services.placer.core.strategies import STRATEGIES, Strategy, slots_of, strategy_named
from services.placer.core.strategies.slot import Slot
from shared.messages import Gpu, Kind, PlaceRequest, Reason


def decide(  # noqa: PLR0913  # what a decision depends on, all of it by name
    cluster: Cluster,
    request: PlaceRequest,
    now_us: int,  # noqa: ARG001  # part of the interface: strategies that look at time come later
    *,
    capabilities: Mapping[str, Capabilities] = ALL_CAN_ALL,
    strategies: Mapping[str, Strategy] = STRATEGIES,
    set_aside: frozenset[str] = frozenset(),
    only_replicas: tuple[int, ...] | None = None,
    tie: str = "",
    others_of_request: tuple[Assignment, ...] = (),
    advise: bool = True,
    tenants: Tenants = nobody,
) -> Decision:
    """Where the replicas go, all of them or none, or why not.

    `capabilities` by node, key "" for all other nodes. `only_replicas`: place these and no others;
    `others_of_request` says where the others are (for spreading and packing). `tie`: shuffles equals, which
    otherwise go by name. `advise` False leaves `would_fit_if` out, which is most of the work of a refusal; `tenants`
    says who could be moved.
    Raises FieldError for a strategy that does not exist. Leaves the cluster as it was.
    """
    question = Question.about(
        cluster,
        request,
        capabilities=capabilities,
        strategies=strategies,
        only=only_replicas,
        set_aside=set_aside,
        others=others_of_request,
        tie=tie,
        tenants=tenants,
    )
    return answer(question, advise=advise)


def answer(question: Question, *, advise: bool = True) -> Decision:
    """The same of a question that is put together already."""
    plan = question.plan()
    if plan.complete and not plan.wide:
        return Fits(
            plan.assignments, plan.score, plan.runner_up, plan.unproven, _measured(question, plan.assignments[0])
        )
    would_fit_if = tuple(change.text for change in changes(question, plan)) if advise else ()
    ever = _ever(question)
    kind = NotNow if ever is None or ever >= len(question.replicas) else Never
    return kind(_reasons(question, plan, ever), would_fit_if)


def fits_more(
    cluster: Cluster,
    request: PlaceRequest,
    now_us: int,  # noqa: ARG001  # part of the interface
    *,
    capabilities: Mapping[str, Capabilities] = ALL_CAN_ALL,
    strategies: Mapping[str, Strategy] = STRATEGIES,
    set_aside: frozenset[str] = frozenset(),
    limit: int = 10_000,
) -> int:
    """How many more such requests would fit now, whole gangs, at most `limit`.

    Raises FieldError for a strategy that does not exist.
    """
    demand = Demand.of(request)
    slots = slots_of(strategy_named(request.strategy, strategies), demand.count)
    ask = Ask(cluster, demand, capabilities, set_aside, slots=slots)
    nodes = np.sort(room(Sieve.of(ask).sifted(), limit * request.replicas))[::-1]
    if int(nodes[:MAX_GANG_NODES].sum()) < request.replicas:
        return 0
    return min(limit, int(nodes.sum()) // request.replicas)


def fits_by_size(
    cluster: Cluster,
    request: PlaceRequest,
    now_us: int,
    *,
    capabilities: Mapping[str, Capabilities] = ALL_CAN_ALL,
    strategies: Mapping[str, Strategy] = STRATEGIES,
) -> dict[int, int] | None:
    """How many more requests of each fixed size of its strategy would fit now: so many whole devices and nothing else.

    None where the strategy has no sizes. Raises FieldError for a strategy that does not exist.
    """
    sized = strategy_named(request.strategy, strategies)
    if not isinstance(sized, Slot):
        return None
    asked = {size: PlaceRequest(command=("",), gpu=Gpu(count=size), strategy=request.strategy) for size in sized.sizes}
    return {
        size: fits_more(cluster, each, now_us, capabilities=capabilities, strategies=strategies)
        for size, each in asked.items()
    }


def moves(  # noqa: PLR0913  # what they depend on, by name
    cluster: Cluster,
    request: PlaceRequest,
    *,
    tenants: Tenants,
    capabilities: Mapping[str, Capabilities] = ALL_CAN_ALL,
    strategies: Mapping[str, Strategy] = STRATEGIES,
    tie: str = "",
    most: int = MOST_MOVES,
    only_replicas: tuple[int, ...] | None = None,
    others_of_request: tuple[Assignment, ...] = (),
) -> tuple[Move, ...]:
    """A few moves of others after which the request fits; empty where none is needed or none was found."""
    question = Question.about(
        cluster,
        request,
        capabilities=capabilities,
        strategies=strategies,
        only=only_replicas,
        others=others_of_request,
        tie=tie,
        tenants=tenants,
    )
    return moves_for(question, most)


def _measured(question: Question, first: Assignment) -> str | None:
    """By which measured times it is admitted there; None where none say so."""
    cluster, demand = question.cluster, question.ask.demand
    if not first.devices or not cluster.measured.key(demand) or demand.kind is not Kind.FIRM:
        return None
    slot, facts = cluster.slot(first.node), cluster.facts(first.node)
    assert slot is not None and facts is not None, "it was chosen"  # noqa: PT018
    place = [device.uuid for device in facts.devices].index(first.devices[0])
    found = cluster.measured.found(demand, cluster.loads[int(cluster.nodes["first_row"][slot]) + place])
    if found is None:
        return None
    return f"explores, not proven: {found.reason}" if found.unproven else found.reason


def _ever(question: Question) -> int | None:
    """Whether all replicas would fit were every known node empty and healthy, else how many; None where a node is not
    known yet.
    """
    ask = question.ask
    if ask.strangers() or not len(ask.cluster.all_slots()):
        return None
    nodes = Sieve.of(ask).empty_room(wanted := len(question.replicas))
    return wanted if wanted == nodes.max() else int(np.sort(nodes)[::-1][:MAX_GANG_NODES].sum())


def _reasons(question: Question, plan: Plan, ever: int | None) -> tuple[Reason, ...]:
    """Why there is no place (left): first about all replicas together, then row by row, then who is not known."""
    return (*_together(question, plan, ever), *plan.reasons, *_unknown(question))


def _together(question: Question, plan: Plan, ever: int | None) -> Iterator[Reason]:
    wanted, done = len(question.replicas), len(plan.assignments)
    if plan.complete:
        text = f"needs {plan.nodes} nodes, one placement touches at most {MAX_GANG_NODES}"
        yield Reason(
            code="never.nodes" if ever is not None and ever < wanted else "not_now.nodes",
            count=plan.nodes,
            message=text,
        )
    elif ever is not None and 0 < ever < wanted:
        text = f"needs {wanted} replicas at once, {ever} would fit if everything were empty"
        yield Reason(code="never.replicas", count=wanted - ever, message=text)
    elif done:
        text = f"needs {wanted} replicas at once, {done} fit"
        yield Reason(code="not_now.replicas", count=wanted - done, message=text)


def _unknown(question: Question) -> Iterator[Reason]:
    if strangers := question.ask.strangers():
        text = f"candidates that the node list does not know: {', '.join(strangers[:3])}"
        yield Reason(code="excluded.unknown_node", count=len(strangers), message=text)
    if not len(question.cluster.all_slots()):
        yield Reason(code="excluded.no_node", count=0, message="no node is known")
