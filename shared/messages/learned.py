"""What the node list has learned of how long tasks take (KV rt_learned)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shared.errors import FieldError
from shared.messages.base import Message, Name
from shared.messages.nodes import Regime


class LearnedTimes(Message):
    """Response times beside one set of neighbours, in columns: a bin, how many of the newer generation, of the older.

    A bin is that of `shared.admission.ResponseTimes`: at most 1/256 of its time wide.
    """

    beside: tuple[str, ...] = ()
    """The profiles of the other containers on the device, in order."""
    bin: list[int] = Field(default_factory=list)
    newer: list[int] = Field(default_factory=list)
    older: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _equal_columns(self) -> Self:
        if len({len(self.bin), len(self.newer), len(self.older)}) > 1:
            raise FieldError("bin", f"{len(self.bin)} rows", "columns of equal length")
        return self


class LearnedProfile(Message):
    """KV rt_learned, key ``profile.<profile>.<model>.<regime>``: what was learned of a profile on one type of device.

    Written by the node-list that holds the bucket's lease; an operator deletes it to have it learned anew.
    """

    profile: Name
    model: Name
    regime: Regime
    at_us: int
    times: tuple[LearnedTimes, ...] = ()
