"""One decision from a request and a cluster: filters, scores, a plan; keeps nothing between two decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.placer.core.capabilities import ALL_CAN_ALL, Capabilities
from services.placer.core.cluster import Cluster
from services.placer.core.outcome import Assignment, Decision
from shared.messages import PlaceRequest

STRATEGIES: Mapping[str, Any] = {}


def decide(
    cluster: Cluster,
    request: PlaceRequest,
    now_us: int,
    *,
    capabilities: Mapping[str, Capabilities] = ALL_CAN_ALL,
    strategies: Mapping[str, Any] = STRATEGIES,
    set_aside: frozenset[str] = frozenset(),
    only_replicas: tuple[int, ...] | None = None,
    tie: str = "",
    others_of_request: tuple[Assignment, ...] = (),
    advise: bool = True,
) -> Decision:
    """Where the replicas go, all of them or none, or why not.

    `capabilities` by node, key "" for all other nodes. `only_replicas`: place these and no others;
    `others_of_request` says where the others are (for spreading and packing). `tie`: breaks ties between equals,
    by name where it is "". `advise` False leaves `would_fit_if` out, which is most of the work of a refusal.
    Raises FieldError for a strategy that does not exist. Leaves the cluster as it was.
    """
    raise NotImplementedError


def fits_more(
    cluster: Cluster,
    request: PlaceRequest,
    now_us: int,
    *,
    capabilities: Mapping[str, Capabilities] = ALL_CAN_ALL,
    set_aside: frozenset[str] = frozenset(),
    limit: int = 10_000,
) -> int:
    """How many more such requests would fit now, at most `limit`."""
    raise NotImplementedError
