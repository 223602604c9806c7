"""What an operator says about Kubernetes: what requests may ask, beside how its API server is reached; no I/O."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.kubernetes.options import ApiOptions

_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class KubernetesOptions(ApiOptions):
    """LAXITY_PLACER_KUBERNETES as JSON, or one by one: LAXITY_PLACER_KUBERNETES__NAMESPACE=jobs."""

    namespace: str = Field(default="laxity-pods", pattern=_NAME)
    """Of the pods that requests with an image become; clusters that share a Kubernetes have one each."""
    image: str | None = None
    """For requests that name none; without it a request must name one."""
    images: tuple[str, ...] = ("*",)
    """Patterns of images that may run, compared with the name as the request writes it."""
    pull: Literal["never", "missing", "always"] = "missing"
    pull_secrets: tuple[str, ...] = ()
    """Secrets of the namespace with logins to registries."""
    volumes: dict[str, str] = Field(default={})
    """What ``source`` of a request's volume may say, and what is mounted: a path of the node, or a volume claim."""
    runtime_class: str | None = None
    """Of the pods: ``nvidia`` where that is not the nodes' default runtime."""
    account: str = Field(default="default", pattern=_NAME)
    """Service account of the pods; none of them gets its token."""
    priority_class: str | None = None
    unreachable_s: int = Field(default=60, ge=0)
    """How long a pod stays on a node that Kubernetes does not hear of any more; Kubernetes' own default is 300."""

    stop_grace_us: int = Field(default=5_000_000, ge=0)
    """From TERM to KILL, in whole seconds, rounded up: Kubernetes counts in them."""
    stop_timeout_us: int = Field(default=60_000_000, ge=100_000)
    """For a pod to be gone once that grace is over; then it may still run, and is asked to end again later."""
    resize_timeout_us: int = Field(default=30_000_000, ge=100_000)
    """For a kubelet to carry out another size, or to say that it cannot; then the pod is given back its former one."""
    left_after_us: int = Field(default=60_000_000, ge=100_000)
    """A pod of ours that was never bound, or never ran and has ended, goes after so long: who made it has died."""
    look_us: int = Field(default=5_000_000, ge=50_000)
    """How often who waits for a pod reads it by itself, should its watch be late."""
