"""How an API server is reached; the part of a service's settings that all have who talk to one. No I/O."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def _in_cluster() -> str:
    """As every pod is told; nothing elsewhere."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
    if not host:
        return ""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class ApiOptions(BaseModel):
    """Of a service's setting ``kubernetes``: as JSON, or one by one, LAXITY_KUBE_BRIDGE_KUBERNETES__SERVER=…"""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: str = Field(default_factory=_in_cluster, pattern=r"^(https://\S+)?$")
    """The API server; where absent, the one of the cluster that the service is a pod of."""
    token_file: Path = _ACCOUNT / "token"
    """Read at the start, then once a minute, and at once where the API server refuses it: clusters replace it."""
    ca_file: Path = _ACCOUNT / "ca.crt"
    """What the API server's certificate is checked with."""
    strict_ca: bool = True
    """False: a certificate authority without key identifiers is taken too, which Python refuses since 3.13."""
    call_timeout_us: int = Field(default=10_000_000, ge=100_000)
    """For each call; the client library waits for ever."""
    silent_us: int = Field(default=90_000_000, ge=500_000)
    """A watch that says nothing for so long has died without a word: an API server speaks once a minute. What it shows
    is old from then on, and the service not ready."""
