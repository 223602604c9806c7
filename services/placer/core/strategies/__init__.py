"""The strategies by name: a plain map, one file per strategy; a new one is one more file and one more entry here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, cast

from services.placer.core.strategies.base import Candidates, Compilable, Compiled, Grouped, Ranking, Strategy
from services.placer.core.strategies.bestfit import BestFit
from services.placer.core.strategies.binpack import Binpack
from services.placer.core.strategies.deadline import Deadline
from services.placer.core.strategies.dotprod import DotProd
from services.placer.core.strategies.fgd import Fgd
from services.placer.core.strategies.gpu_clustering import GpuClustering
from services.placer.core.strategies.gpu_packing import GpuPacking
from services.placer.core.strategies.laxity import Laxity
from services.placer.core.strategies.nodes import Asked
from services.placer.core.strategies.random_choice import Random
from services.placer.core.strategies.slot import Slot
from services.placer.core.strategies.spread import Spread
from shared.errors import FieldError


def registry(strategies: Iterable[Strategy]) -> Mapping[str, Strategy]:
    """By name; raises ValueError where two have the same."""
    by_name: dict[str, Strategy] = {}
    for strategy in strategies:
        if strategy.name in by_name:
            raise ValueError(f"two strategies are named {strategy.name}")
        by_name[strategy.name] = strategy
    return MappingProxyType(by_name)


STRATEGIES: Final = registry(
    (
        Deadline(),
        Binpack(),
        Spread(),
        Slot(),
        Fgd(),
        BestFit(),
        DotProd(),
        GpuPacking(),
        GpuClustering(),
        Laxity(),
        Random(),
    )
)


def strategy_named(name: str, strategies: Mapping[str, Strategy] = STRATEGIES) -> Strategy:
    """Raises FieldError for a name that is not there."""
    if name not in strategies:
        raise FieldError("strategy", name, f"one of {', '.join(sorted(strategies))}")
    return strategies[name]


def slots_of(strategy: Strategy, count: int) -> tuple[int, ...] | None:
    """The slots that a request of so many devices may go to by this strategy; None: anywhere."""
    # not isinstance: of a protocol it takes longer than the filters
    return cast("Grouped", strategy).groups(count) if hasattr(strategy, "groups") else None


def compiled(strategy: Strategy, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:
    """How its ranking is compiled for such requests, if it is."""
    return cast("Compilable", strategy).compiled(asked, resources) if hasattr(strategy, "compiled") else None


__all__ = ["STRATEGIES", "Candidates", "Ranking", "Strategy", "registry", "slots_of", "strategy_named"]
