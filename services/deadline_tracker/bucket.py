"""The checkpoints of all nodes as rt_deadlines has them, for whoever takes a partition, and what is being written to
it; nothing is counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from services.deadline_tracker.nodes import Node
from services.deadline_tracker.shares import Partition, partition_of
from shared.effects import Write
from shared.errors import FieldError
from shared.messages import NodeDeadlines
from shared.subjects import decode

NODE = "node."


@dataclass(frozen=True, slots=True)
class Writing:
    """What is being written: nodes with the first sequence that their last checkpoint lacks, partitions with the
    sequence that the new ones include."""

    commit: int
    nodes: Sequence[tuple[Node, int]] = ()
    kept: Sequence[tuple[Partition, int]] = ()
    layout: Sequence[Write] = ()
    lives: str = ""


class Bucket:
    """What a watch of the bucket has shown of nodes so far."""

    def __init__(self, counters: Counter[str]) -> None:
        self.revision = 0
        """Of the newest change that the watch has shown: all that were written before it were shown too."""
        self._counters = counters
        self._values: dict[str, tuple[bytes, int]] = {}

    def shown(self, key: str, value: bytes | None, revision: int) -> None:
        self.revision = revision
        if not key.startswith(NODE):
            return
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = (value, revision)

    def replayed(self, keys: frozenset[str]) -> None:
        """Keys that are not named are gone."""
        self._values = {key: found for key, found in self._values.items() if key in keys}
        self.revision = self.revision if keys else 0

    def nodes_of(self, number: int, partitions: int) -> Iterator[Node]:
        """Those of one partition, as their checkpoints say."""
        for key, (value, revision) in self._values.items():
            if numbered(key.removeprefix(NODE), partitions) != number:
                continue
            node = Node(node_of(key), number, revision=revision)
            try:
                node.restore(NodeDeadlines.trusted(value))
            except (FieldError, KeyError, TypeError, ValueError):  # not written by us: the stream is counted again
                self._counters["checkpoints_malformed"] += 1
            yield node

    def counted_seq(self) -> int:
        """All that the nodes said up to here is in checkpoints that are of no partition: of a tracker before there were
        any, which wrote all that had changed at once.
        """
        return min((self._seq(value) for value, _ in self._values.values()), default=0)

    def _seq(self, value: bytes) -> int:
        try:
            return NodeDeadlines.trusted(value).stream_seq
        except (FieldError, ValueError):
            return 0


def node_of(key: str) -> str:
    """The node whose checkpoint a key is; "" of other keys."""
    try:
        return decode(key.removeprefix(NODE)) if key.startswith(NODE) else ""
    except FieldError:
        return ""


@lru_cache(maxsize=200_000)
def numbered(token: str, partitions: int) -> int:
    """The number of a node's partition, by its token; -1 of what is no token."""
    try:
        decode(token)
    except FieldError:
        return -1
    return partition_of(token, partitions)
