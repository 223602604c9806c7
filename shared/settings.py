"""The settings that every service has; what only one service needs lives in that service's own settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

SECOND_US = 1_000_000


def _instance() -> str:
    return f"{socket.gethostname()[:200]}-{os.getpid()}"


class ServiceSettings(BaseSettings):
    """Read from the environment: common fields as LAXITY_<FIELD>; a service's own under its own ``env_prefix``."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_", populate_by_name=True, extra="ignore", frozen=True)

    nats_url: str = Field(default="nats://127.0.0.1:4222", validation_alias="LAXITY_NATS_URL")
    """One URL, or several of one cluster separated by commas; ``tls://`` insists on encryption."""
    nats_seed_file: Path | None = Field(default=None, validation_alias="LAXITY_NATS_SEED_FILE")
    """The nkey seed of our user, as ``laxity keys`` makes it; only its owner may read it."""
    nats_inbox_prefix: str | None = Field(
        default=None, pattern=r"^[^.*>\s]+(\.[^.*>\s]+)*$", validation_alias="LAXITY_NATS_INBOX_PREFIX"
    )
    """Where our answers come; absent: ``_INBOX.`` and the name of the seed file, which ``laxity keys`` permits."""
    nats_ca: Path | None = Field(default=None, validation_alias="LAXITY_NATS_CA")
    """The authority that signed the server's certificate; absent: the system's."""
    nats_cert: Path | None = Field(default=None, validation_alias="LAXITY_NATS_CERT")
    """Our own certificate, where the server verifies clients."""
    nats_key: Path | None = Field(default=None, validation_alias="LAXITY_NATS_KEY")
    """The key of that certificate; only its owner may read it."""
    prefix: str = Field(default="rt", pattern=r"^[A-Za-z0-9_-]+$", validation_alias="LAXITY_PREFIX")
    """First token of every subject and bucket, so that several clusters can share a server."""
    instance: str = Field(default_factory=_instance, min_length=1, max_length=253, validation_alias="LAXITY_INSTANCE")
    """Name of this process among those of the same service; host and pid, since that is unique and tells where."""
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", validation_alias="LAXITY_LOG_LEVEL")
    log_format: Literal["json", "console"] = Field(default="json", validation_alias="LAXITY_LOG_FORMAT")
    """json for machines (one object a line), console for people."""
    ready_file: Path | None = Field(default=None, validation_alias="LAXITY_READY_FILE")
    """Written once the service is ready, removed when it drains: what a supervisor without NATS can look at."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535, validation_alias="LAXITY_METRICS_PORT")
    """Port of /metrics for Prometheus; absent: not served. 0 takes a free one, which $SRV.STATS and the log tell."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1, validation_alias="LAXITY_METRICS_HOST")
    """Where /metrics listens. It asks nobody who they are: open it to the network of your Prometheus alone."""
    check: bool = Field(default=False, validation_alias="LAXITY_CHECK")
    """Assert the core's invariants after every event: for tests and chaos runs, too dear for big clusters."""

    storage: Literal["file", "memory"] = Field(default="file", validation_alias="LAXITY_STORAGE")
    """Where streams that do not exist yet are kept; memory forgets everything when the server restarts."""
    replicas: int = Field(default=1, ge=1, le=5, validation_alias="LAXITY_REPLICAS")
    """Copies of each stream; 3 wants a cluster of three servers."""
    events_max_age_s: int = Field(default=7 * 86_400, ge=60, validation_alias="LAXITY_EVENTS_MAX_AGE_S")
    """How long events are kept: a week, so that Monday can look at Saturday."""
    events_max_mib: int = Field(default=512, ge=1, validation_alias="LAXITY_EVENTS_MAX_MIB")
    """Size at which the oldest events go first: about 40 million tasks in batches."""
    place_max_mib: int = Field(default=64, ge=1, validation_alias="LAXITY_PLACE_MAX_MIB")
    """Size of the recovery copy of requests: 64 MiB is 256 of the largest, 60,000 of the usual ones."""

    ping_interval_us: int = Field(default=2 * SECOND_US, ge=50_000, validation_alias="LAXITY_PING_INTERVAL_US")
    """A dead link is noticed after three of these; the client's own default takes six minutes (case B4)."""
    ack_timeout_us: int = Field(default=5 * SECOND_US, ge=100_000, validation_alias="LAXITY_ACK_TIMEOUT_US")
    """How long a write may go unanswered before its outcome counts as unknown."""
