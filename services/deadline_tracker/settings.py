"""Settings of the deadline-tracker: each with its unit, default and reason."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from shared.deadlines import check_window
from shared.settings import ServiceSettings


class TrackerSettings(ServiceSettings):
    """Read from the environment: LAXITY_TRACKER_GUARANTEE and so on, and what all services share."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_TRACKER_")

    guarantee: float = Field(default=0.99, gt=0, lt=1)
    """Guarantee of containers that declare none."""
    window: int = Field(default=1000, ge=1, le=100_000)
    """Verdicts in a container's sliding window. 1,000 can show up to 0.996; a longer one forgets a bad spell later."""
    lease_us: int = Field(default=2_000_000, ge=750_000)
    """Others take over when a tracker's leases have not been renewed for so long; they are at each third of it."""
    partitions: int = Field(default=8, ge=1, le=64)
    """Parts into which the nodes are divided among the trackers: at least as many as trackers, better a few times so
    many. All trackers go by what the first one wrote; it changes when one with another setting is alone."""

    @model_validator(mode="after")
    def _window_can_show_the_guarantee(self) -> Self:
        check_window(self.window, self.guarantee)
        return self
