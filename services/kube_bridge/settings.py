"""Settings of the bridge: each with its unit, default and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from shared.errors import FieldError
from shared.kubernetes.options import ApiOptions
from shared.settings import ServiceSettings

LOOPBACK: Final = {"127.0.0.1", "::1", "localhost"}


class KubeBridgeSettings(ServiceSettings):
    """Read from the environment: LAXITY_KUBE_BRIDGE_EXTENDER_PORT and so on, and what all services share."""

    model_config = SettingsConfigDict(env_prefix="LAXITY_KUBE_BRIDGE_", env_nested_delimiter="__")

    scheduler: str = Field(default="laxity", min_length=1)
    """`schedulerName` of the pods that are Laxity's: the one profile of the kube-scheduler that asks us."""
    strategy: str = Field(default="deadline", min_length=1)
    """How placers choose for pods; a strategy or one of the placers' profiles."""

    claim_drivers: tuple[str, ...] = ("gpu.nvidia.com",)
    """Drivers of dynamic resource allocation that give GPUs: what their claims have is never given again. With none of
    them claims are not looked at."""

    extender_host: str = Field(default="127.0.0.1", min_length=1)
    """Where the extender listens; elsewhere than on loopback only with certificates for both sides."""
    extender_port: int = Field(default=10_270, ge=0, le=65_535)
    """Beside kube-scheduler's own 10259, in the same pod. 0 takes a free one, which the log tells."""
    extender_cert: Path | None = None
    """Our certificate, with its chain."""
    extender_key: Path | None = None
    extender_client_ca: Path | None = None
    """Who signed kube-scheduler's certificate: nobody else is answered."""

    filter_us: int = Field(default=3_000_000, ge=100_000)
    """How long placers may take for one pod. kube-scheduler asks for one pod at a time and gives up after 5 s unless
    its `httpTimeout` says otherwise; ours has to be shorter, so that it hears a reason."""
    bind_us: int = Field(default=4_000_000, ge=100_000)
    """The same for a Binding; many are under way at a time."""
    hold_us: int = Field(default=30_000_000, ge=1_000_000, le=3_600_000_000)
    """How long a place is held for a pod between filter and bind: volumes may have to be made in between. All bridges
    of a cluster need the same."""
    ahead: int = Field(default=16, ge=0, le=256)
    """For so many pods that wait behind the one that kube-scheduler asks about places may be held before their turn:
    what is asked together is committed together. Where such a turn never comes, a place is kept in vain for `hold_us`.
    0: each pod is asked about in its turn alone."""
    verdict_us: int = Field(default=10_000_000, ge=0)
    """For so long a refusal stands while nothing becomes free: what changes without a word, such as learned times, is
    asked about anew after it."""
    condition_us: int = Field(default=30_000_000, ge=0)
    """New numbers for the same reason are written into a pod's condition at most so often: each write is one more event
    for everybody who watches pods."""
    patience_us: int = Field(default=3_000_000, ge=0)
    """So long placers may say first how a bound pod ended, since they know its exit code; and so long a difference
    between pods and ledger must last to be told."""

    kubernetes: ApiOptions = Field(default_factory=ApiOptions)
    """How the API server is reached: LAXITY_KUBE_BRIDGE_KUBERNETES__SERVER and so on, or all of them as JSON."""

    @model_validator(mode="after")
    def _closed(self) -> Self:
        files = (self.extender_cert, self.extender_key, self.extender_client_ca)
        if any(files) and not all(files):
            raise FieldError("extender_cert", "some of the three", "extender_cert, extender_key and extender_client_ca")
        if self.extender_host not in LOOPBACK and not all(files):
            raise FieldError("extender_host", self.extender_host, "127.0.0.1, or with certificates for both sides")
        return self
