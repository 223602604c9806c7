"""What a strategy gets and gives: arrays in, arrays out; it never sees the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from services.placer.core.columns import Array, Floats, Ints

if TYPE_CHECKING:
    from services.placer.core.strategies.nodes import Asked, Nodes


class Candidates(Protocol):
    """The rows that can take one replica, and their nodes; for a request without gpu a row is a node.

    A column has an element for each row, or for each node where that is said. Rows of one node stand together, and a
    node may have none. `..._after` is with the replica placed there. What concerns a device is empty space where there
    is none. Each column is worked out when it is asked for (prospects.py): one that a strategy does not use costs
    nothing. A new column is one property here and one there; it may depend on the row's node alone.
    """

    def __len__(self) -> int: ...

    @property
    def count(self) -> int:
        """Devices that one replica takes."""
        ...

    @property
    def slot(self) -> Ints:
        """Of nodes: which fixed size the label says it takes; 0 where it says none."""
        ...

    @property
    def promises(self) -> bool:
        """The request is firm or hard."""
        ...

    @property
    def share_after(self) -> Floats:
        """Free part of the device, 0..1."""
        ...

    @property
    def memory_after(self) -> Floats:
        """Free part of the device's memory, 0..1; NaN where unknown."""
        ...

    @property
    def whole_after(self) -> Ints:
        """Devices of the node that nobody uses."""
        ...

    @property
    def slack(self) -> Floats | None:
        """Slack at the tightest point as part of the request's deadline; NaN where nothing is promised, None where it
        has no deadline.
        """
        ...

    @property
    def promised(self) -> Ints:
        """Firm and hard residents of the device."""
        ...

    @property
    def risk(self) -> Ints:
        """What the node list says: 0 guaranteed, 1 tight, 2 at risk."""
        ...

    @property
    def resources(self) -> tuple[str, ...]:
        """What the columns of `used_after` and `capacity` are of: `cpu`, `memory`, and `gpu` where it is asked for."""
        ...

    @property
    def used_after(self) -> Ints:
        """Of nodes: a line for each, a column for each resource; unknown use counts as none."""
        ...

    @property
    def capacity(self) -> Ints:
        """Of nodes, in the same units."""
        ...

    @property
    def nodes(self) -> Nodes:
        """The nodes, with all their devices, without the replica."""
        ...

    @property
    def asked(self) -> Asked:
        """What the replica takes."""
        ...


class Ranking(NamedTuple):
    """The order of the rows: smallest keys first, the first key counting most.

    `total`, 0..1, is what people see, and `by` its parts. Every value depends on its own row's node alone. Keys are
    finite, and rounded where they come from floats: what is equal must be equal, the tie-break decides among it.
    """

    keys: tuple[Array, ...]
    total: Floats
    by: Mapping[str, Floats]
    of_nodes: int = 0
    """So many of the keys, from the first on, are of nodes; if any is, the total and its parts are so too."""


class Compiled(NamedTuple):
    """The same for kernels.py: which of its rankings, the tables that this one looks at, and what is said of a row."""

    ranked: str
    tables: tuple[Array, ...]
    keys: int
    parts: tuple[str, ...] = ()
    of_nodes: int = 0


class Strategy(Protocol):
    """A frozen dataclass whose fields are its parameters.

    What it says of a node is remembered until the node changes, so it must depend on the rows of that node alone, and
    two objects of one name are told apart.
    """

    @property
    def name(self) -> str:
        """As requests say it."""
        ...

    def rank(self, rows: Candidates) -> Ranking: ...


class Compilable(Protocol):
    """A strategy that has a kernel; what that says of a row is what `rank` says."""

    def compiled(self, asked: Asked, resources: tuple[str, ...]) -> Compiled | None:
        """For such requests; None where its parameters are such that only `rank` serves."""
        ...


class Grouped(Protocol):
    """A strategy that lets requests go to some groups of nodes alone."""

    def groups(self, count: int) -> tuple[int, ...] | None:
        """The slots (docs/placement.md) that a request of so many devices may go to; None: anywhere."""
        ...


def summed(by: Mapping[str, Floats]) -> Floats:
    """The total of parts that add up; rounded, so that equals are equal whatever the order of the sum."""
    total: Floats = np.minimum(np.maximum(reduce(add, by.values()), 0.0), 1.0).round(9)
    return total
