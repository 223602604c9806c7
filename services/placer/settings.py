"""Settings of the placer: each with its unit, default and reason."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.placer.backends.docker_options import DockerOptions
from services.placer.backends.kubernetes_options import KubernetesOptions
from services.placer.core.intents import Rules
from services.placer.core.strategies.profiles import with_profiles
from shared.admission import EXPLORED
from shared.settings import ServiceSettings

BEAT_US = 1_000_000
"""How often leases are renewed."""


def _state_root() -> Path:
    return Path(tempfile.gettempdir()) / "laxity"


class PlacerSettings(ServiceSettings):
    """Read from the environment: LAXITY_PLACER_GRACE_US and so on, and what all services share."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_PLACER_", env_nested_delimiter="__")

    backends: dict[str, Literal["process", "fake", "docker", "kubernetes"]] = Field(
        default={"fake-*": "fake", "*": "process"}
    )
    """Which backend runs a node's containers: the first pattern that the node's name matches. A placer's own mapping,
    never from the bus, and the same for all placers of a cluster: what one has placed any other takes over."""
    state_root: Path = Field(default_factory=_state_root)
    """Folder in which backends keep what must survive a placer; all placers of a machine share it."""
    ring_root: Path = Path("/run/laxity/rings")
    """Folder into which containers put their rings; the same as that of the machine's monitor."""
    fake_ring_root: Path | None = None
    """The same for fake nodes, with a folder for each; none of their containers runs, so they may do without."""
    work_dir: Path | None = None
    """Where commands of the process backend run; where this process runs if absent."""
    docker: DockerOptions = Field(default=DockerOptions())
    """Which engine runs which node's containers, and what requests may ask of it."""
    kubernetes: KubernetesOptions = Field(default_factory=KubernetesOptions)
    """How the API server is reached, and what requests may ask of it."""

    lease_ttl_us: int = Field(default=3 * BEAT_US, ge=3 * BEAT_US)
    """A placer that was not seen to renew for so long is dead and is taken over from; three beats, so that two
    lost ones change nothing (case T3)."""
    grace_us: int = Field(default=5_000_000, ge=0)
    """How long a stored request waits for the placer that has it live, before another one decides it: longer than
    the slowest commit, so that it is hardly ever decided by two."""
    most_tries: int = Field(default=5, ge=1)
    """Starts that may fail in a row before the request fails for good."""
    backoff_first_us: int = Field(default=1_000_000, ge=1)
    """How long a request waits after its first failed start or restart; doubled each time."""
    backoff_most_us: int = Field(default=60_000_000, ge=1)
    """The longest such wait."""
    final_ttl_s: int = Field(default=86_400, ge=3_601)
    """How long a final key stays: longer than RT_PLACE keeps copies of requests (an hour), so no copy looks new."""
    batch: int = Field(default=64, ge=1, le=500)
    """Transitions planned into one commit: one write to the disk for all of them, and few lost by one conflict."""
    defragment: Literal["off", "waiting", "widen"] = "off"
    """Whether others move (docs/placement.md) without an operator's word: for the first that waits, with `widen` also
    while none waits, so that a larger block of devices is free; off, since who moves starts anew."""
    moves_at_once: int = Field(default=1, ge=1, le=64)
    """Containers that are being started elsewhere at a time: each has two reservations meanwhile."""
    move_rest_us: int = Field(default=600_000_000, ge=0)
    """How long who has moved stays where it is, unless an operator asks: ten minutes, much longer than most starts."""
    lost_grace_us: int = Field(default=60_000_000, ge=0)
    """How long a node is lost, or a device, before who is there is placed again: a host that starts anew is mostly back
    by then, and who was placed again meanwhile starts from nothing."""
    lost_at_once: int = Field(default=10, ge=0, le=1_000)
    """How many are placed again in a second, so that many lost nodes are no storm; 0: nobody is."""
    lost_most_ratio: float = Field(default=0.5, ge=0, le=1)
    """Where a larger part of all nodes cannot be reached nobody is placed again: it is more likely that the placers are
    cut off than that so many have died."""
    start_timeout_us: int = Field(default=300_000_000, ge=1_000_000)
    """A start that takes longer counts as failed: five minutes pull a large image."""

    queue_age_us: int = Field(default=600_000_000, ge=1)
    """A request that has waited for so long counts one priority higher, for two such times three, then seven, so that
    nothing starves. All placers of a cluster need the same; so for the next two."""
    queue_heads: int = Field(default=4, ge=0)
    """For how many of those that wait first room is kept that later ones may not take; 0 keeps none."""
    queue_patience_us: int = Field(default=600_000_000, ge=0)
    """Room that comes no nearer to being enough is kept at least so long, then others may have it."""

    explored_ratio: float = Field(default=EXPLORED, ge=0, le=1)
    """The part of the firm requests that may go where their deadlines are likely to be kept and not proven to be, so
    that more is learned (docs/deadlines.md); 0 is none."""

    profiles: dict[str, dict[str, Any]] = Field(default={})
    """Strategies with other parameters under names of their own, for the `strategy` of requests, as JSON:
    `{"tight": {"strategy": "binpack", "gpu": 10}}`. All placers of a cluster need the same ones."""

    @field_validator("profiles")
    @classmethod
    def _profiles_are_strategies(cls, profiles: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        with_profiles(profiles)
        return profiles

    def rules(self) -> Rules:
        """What the core needs of it."""
        return Rules(
            lease_ttl_us=self.lease_ttl_us,
            grace_us=self.grace_us,
            most_tries=self.most_tries,
            backoff_first_us=self.backoff_first_us,
            backoff_most_us=self.backoff_most_us,
            final_ttl_s=self.final_ttl_s,
            batch=self.batch,
            age_us=self.queue_age_us,
            heads=self.queue_heads,
            patience_us=self.queue_patience_us,
            defragment=self.defragment,
            explored_ratio=self.explored_ratio,
            moves_at_once=self.moves_at_once,
            move_rest_us=self.move_rest_us,
            lost_grace_us=self.lost_grace_us,
            lost_at_once=self.lost_at_once,
            lost_most_ratio=self.lost_most_ratio,
            strategies=with_profiles(self.profiles),
        )
