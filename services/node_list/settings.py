"""Settings of the node-list: each with its unit, default and reason."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator
from pydantic_settings import SettingsConfigDict

from shared.errors import FieldError
from shared.settings import ServiceSettings


class DeadlineClass(BaseModel):
    """A named pair of deadline and runtime: what one more container of this kind would need."""

    name: str = Field(min_length=1, max_length=64)
    deadline_us: int = Field(gt=0)
    runtime_us: int = Field(gt=0)
    period_us: int | None = Field(default=None, gt=0)
    """The deadline where absent."""
    profile: str | None = None
    """The profile whose measured times judge the class, where they say enough; its name where absent."""
    guarantee: float = Field(default=0.99, gt=0, lt=1)
    """What the measured times have to promise."""


class NodeListSettings(ServiceSettings):
    """Read from the environment: LAXITY_NODE_LIST_GRACE_US and so on, and what all services share."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_NODE_LIST_")

    classes: tuple[DeadlineClass, ...] = (
        DeadlineClass(name="interactive", deadline_us=50_000, runtime_us=12_000),
        DeadlineClass(name="fast", deadline_us=20_000, runtime_us=5_000),
        DeadlineClass(name="relaxed", deadline_us=500_000, runtime_us=100_000),
    )
    """The first is the one that rt.nodes answers for where a query names none."""
    heartbeat_us: int = Field(default=1_000_000, gt=0)
    """How often monitors are expected to be heard."""
    grace_us: int = Field(default=3_500_000, gt=0)
    """Without a heartbeat for so long a node is unreachable; a node that beats slower gets three of its own periods."""
    lost_us: int = Field(default=30_000_000, gt=0)
    """Without a heartbeat for so long a node is lost."""
    lease_us: int = Field(default=2_500_000, gt=0)
    """A standby takes over when the lease has not been renewed for so long, so within 3 s; it looks every 250 ms."""
    tight_ratio: float = Field(default=0.1, ge=0, lt=1)
    """A device is tight where the slack left is below this part of the class's deadline."""
    return_ratio: float = Field(default=0.05, ge=0, lt=1)
    """A device returns to a better standing at once where its slack exceeds the edge by this part of the deadline."""
    return_us: int = Field(default=5_000_000, ge=0)
    """Nearer to the edge it returns once nothing worse was seen for so long; foreign work counts for so long, too."""
    foreign_context_micro: int = Field(default=20_000, ge=0)
    """Foreign device time from which it counts as one more context: 2 %, above the noise of housekeeping."""

    tolerated_taints: tuple[str, ...] = ("nvidia.com/gpu", "laxity.dev/managed")
    """Keys of Kubernetes' taints that keep nothing away which placers place by themselves: those that say that a node
    is for GPUs. Pods that Kubernetes' scheduler sends say themselves what they tolerate."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.grace_us < 3 * self.heartbeat_us:
            raise FieldError("grace_us", self.grace_us, f"at least three heartbeats: {3 * self.heartbeat_us}")
        if self.lost_us <= self.grace_us:
            raise FieldError("lost_us", self.lost_us, f"above grace_us = {self.grace_us}")
        if len({c.name for c in self.classes}) != len(self.classes) or not self.classes:
            raise FieldError("classes", [c.name for c in self.classes], "at least one class, each name once")
        return self
