"""What a backend can do for a request, as plain facts that the pipeline checks; no backend lives here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.messages import PlaceRequest, Secret


@dataclass(frozen=True)
class Capabilities:
    """A request that asks for more than its node's backend can do is refused with a reason, never quietly cut down."""

    needs_command: bool = False
    """True where an image alone says nothing: the request must carry a command."""
    needs_image: bool = False
    """True where a command alone says nothing: the request must carry an image."""
    images: bool = False
    volumes: bool = False
    ports: bool = False
    secrets: bool = False
    """Whether environment values may be references to secrets."""
    user: bool = False
    shm: bool = False
    pods: bool = False
    """Whether it binds pods that exist already."""
    resize: bool = False
    """Whether CPU and memory of a running container can be changed."""

    def lacking(self, request: PlaceRequest) -> str | None:
        """The first field of the request that cannot be honoured."""
        pods, command, image, volumes, ports, secrets, user, shm = needs(request)
        asked = {
            "pods": pods and not self.pods,
            "command": self.needs_command and not command,
            "image": not self.images if image else self.needs_image and not pods,
            "volumes": volumes and not self.volumes,
            "ports": ports and not self.ports,
            "env": secrets and not self.secrets,
            "user": user and not self.user,
            "shm_mib": shm and not self.shm,
        }
        return next((field for field, refused in asked.items() if refused), None)


def needs(request: PlaceRequest) -> tuple[bool, ...]:
    """All that what a backend can do is compared with: pods, command, image, volumes, ports, secrets, user, shm."""
    return (
        request.pods is not None,
        bool(request.command),
        request.image is not None,
        bool(request.volumes),
        bool(request.ports),
        bool(request.env) and any(isinstance(value, Secret) for value in request.env.values()),
        request.user is not None,
        bool(request.shm_mib),
    )


OTHERS: Final = ""
"""In a mapping from node to Capabilities: all nodes that it does not name."""

ALL_CAN_ALL: Final[Mapping[str, Capabilities]] = {
    OTHERS: Capabilities(
        images=True, volumes=True, ports=True, secrets=True, user=True, shm=True, pods=True, resize=True
    )
}


def capabilities_of(node: str, known: Mapping[str, Capabilities]) -> Capabilities | None:
    """What the node's backend can do; None where no backend is set for it."""
    return known.get(node) or known.get(OTHERS)
