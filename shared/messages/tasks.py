"""Task events in columns (rt.events.task.<node>) and verdicts on them (rt.events.deadline.*, KV rt_deadlines)."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Final, Self

from pydantic import Field, model_validator

from shared.deadlines import Standing
from shared.errors import FieldError
from shared.messages.base import Message, Name


class TaskEventKind(IntEnum):
    """Codes of the ``kind`` column."""

    BEGIN = 1
    END = 2
    OVERDUE = 3
    """The deadline and the guard have passed and the end is not there; ``seq`` is that of its begin."""
    ABORTED = 4
    """Open when its writer died; ``seq`` is that of its begin."""
    LOST = 5
    """Open when its ring was overwritten unread: neither met nor missed; ``seq`` is that of its begin."""
    CLOSED = 6
    """The ring's writer is gone and everything was taken."""


class RingInfo(Message):
    """Whose tasks a ring holds. What is not known of the container is None."""

    ring: Name
    container: Name
    request_id: str | None = None
    replica: int | None = None
    generation: int | None = None
    guarantee: float | None = None
    window: tuple[int, int] | None = None


KNOWN_RINGS: Final = 16_384
"""Of so many rings it is remembered what was said of them, by its bytes: 30 MB, 60 with the longest names."""
MOST_RING_BYTES: Final = 1_024
"""More than this is not remembered; three names of the greatest length are less."""
_RINGS: Final = b',"rings":[{'
_BEHIND: Final = b'}],"names":['


@lru_cache(KNOWN_RINGS)
def _ring_info(inside: bytes) -> RingInfo:
    """``inside``: what stands between the braces. Raises ValueError, which is not remembered."""
    if len(inside) > MOST_RING_BYTES:
        raise ValueError
    return RingInfo.model_validate_json(b"{%b}" % inside)


class TaskBatch(Message):
    """Events of one node in columns: row i of each column is one event, in the order in which they were taken.

    ``ring`` indexes ``rings``, ``name`` indexes ``names``. ``deadline_us`` is relative to the begin. Stamps are
    microseconds of the node's CLOCK_MONOTONIC. Everything stamped up to ``watermark_us`` has been taken.
    Its id is (node, start_id, counter).
    """

    node: Name
    start_id: str
    counter: int
    boot_id: str
    at_us: int
    watermark_us: int
    rings: tuple[RingInfo, ...] = ()
    names: tuple[str, ...] = ()
    ring: list[int] = Field(default_factory=list)
    kind: list[int] = Field(default_factory=list)
    seq: list[int] = Field(default_factory=list)
    begin_seq: list[int] = Field(default_factory=list)
    task: list[int] = Field(default_factory=list)
    stamp_us: list[int] = Field(default_factory=list)
    deadline_us: list[int] = Field(default_factory=list)
    name: list[int] = Field(default_factory=list)
    lost_records: dict[str, int] = Field(default_factory=dict)
    """Per ring id: records overwritten before they were read, since the last batch."""

    @classmethod
    def _parsed(cls, body: bytes) -> Self:
        try:
            found = cls._with_known_rings(body)
        except ValueError:
            found = None  # said of the whole body below
        return found or super()._parsed(body)

    @classmethod
    def _with_known_rings(cls, body: bytes) -> Self | None:
        """The same with each ring read once, not once a batch: they are half of what there is to read.

        None where the body is not written as ours are. A quote behind a comma ends a text or begins one, so it begins
        a key or there is no JSON; without a brace in front it is a key of the outermost object. What is cut out is JSON
        piece by piece, or refused: half a text or object is none.
        """
        begin = body.find(_RINGS)
        end = body.find(_BEHIND, begin)
        if begin < 0 or end < 0 or body.find(b"{", 1) < begin:
            return None
        infos = tuple(map(_ring_info, body[begin + len(_RINGS) : end].split(b"},{")))
        batch = super()._parsed(body[:begin] + body[end + 2 :])
        if "rings" in batch.__pydantic_fields_set__:  # it is there twice
            return None
        batch.__dict__["rings"] = infos
        batch.__pydantic_fields_set__.add("rings")
        return batch

    @model_validator(mode="after")
    def _equal_columns(self) -> Self:
        lengths = set(map(len, map(self.__dict__.__getitem__, COLUMNS)))
        if len(lengths) > 1:
            raise FieldError("ring", f"columns of {sorted(lengths)} rows", "columns of equal length")
        return self

    @property
    def batch_id(self) -> str:
        return f"{self.node}/{self.start_id}/{self.counter}"


COLUMNS = ("ring", "kind", "seq", "begin_seq", "task", "stamp_us", "deadline_us", "name")


class CauseKind(StrEnum):
    """Why a task was late. All but ``arrived`` and ``unknown`` break what a container or a device declared."""

    OVERRAN = "overran"
    """A neighbour's task had the device for longer than the runtime that it declared."""
    ITSELF = "itself"
    """So had a task of the container itself."""
    TOO_OFTEN = "too_often"
    """A container began tasks sooner than a period after one another."""
    THROTTLED = "throttled"
    """The device is ill, or slower than declared for all."""
    ARRIVED = "arrived"
    """A container came to the device not long ago, and kept to what it declared."""
    NOISY = "noisy"
    """A neighbour slows it down: said of a container, not of one miss."""
    UNKNOWN = "unknown"


class Cause(Message):
    """One cause, with the device time that it cost. ``detail`` has the numbers behind it, in words."""

    cause: CauseKind
    container: Name | None
    """None where it is no container's doing."""
    amount_us: int | None
    detail: str | None = None


class DeadlineEvent(Message):
    """missed: one task. at_risk and recovered: the container's record crossed a bound. noisy: a neighbour slows it."""

    at_us: int
    node: Name
    container: Name
    kind: str
    task: int | None
    deadline_us: int | None
    ring: str | None = None
    seq: int | None = None
    name: str | None = None
    request_id: str | None = None
    replica: int | None = None
    generation: int | None = None
    tardiness_us: int | None = None
    """None while the task still runs."""
    judged: int = 0
    """Verdicts on this container so far, this one included; met and missed are those of the window."""
    met: int
    missed: int
    ratio: float | None
    lower: float | None
    upper: float | None
    guarantee: float
    distance_to_failure: int | None = None
    """Of a container that declared (m,k): misses in a row, from now on, that violate it; 0: it is violated."""
    because: tuple[Cause, ...] | None = None
    """Of a miss and of noisy: the causes, the most likely first; None where nobody looked."""


class ContainerRecord(Message):
    """What is known of one container's tasks: counts of its whole life, and its window with bounds."""

    container: Name
    request_id: str | None = None
    replica: int | None = None
    generation: int | None = None
    timed: int = 0
    """How many response times were put into `newest_us` so far."""
    newest_us: tuple[int | None, ...] = ()
    """The newest response times, the last one last; None of a task that was overdue and never ended."""
    guarantee: float
    met: int
    missed: int
    lost: int
    aborted: int
    invalid: int
    late_record: int
    open: int
    window_met: int
    window_missed: int
    ratio: float | None
    lower: float | None
    upper: float | None
    standing: Standing
    m_of_k: tuple[int, int] | None = None
    """At least m of the last k tasks are to be met, as the container declared it."""
    distance_to_failure: int | None = None
    """Misses in a row, from now on, that violate it; 0: it is violated."""


class NodeDeadlines(Message):
    """KV rt_deadlines, key ``node.<node>``: the records of a node and the stream sequence that they include.

    ``checkpoint`` is the tracker's own; it is written together with the sequence, so nothing is counted twice.
    """

    node: Name
    at_us: int
    stream_seq: int
    containers: tuple[ContainerRecord, ...] = ()
    checkpoint: dict[str, object] = Field(default_factory=dict)
