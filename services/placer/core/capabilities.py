"""What a node's backend can honour of a request; which backend a node has is said by whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.messages import PlaceRequest, Secret


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which fields of a request a backend carries out; one that it cannot is refused, never ignored."""

    needs_command: bool = False
    """It starts commands: an image alone names nothing that it could run."""
    images: bool = True
    volumes: bool = True
    ports: bool = True
    secrets: bool = True
    users: bool = True
    shm: bool = True
    pods: bool = True
    """It can bind pods that exist already."""

    def lacking(self, request: PlaceRequest) -> str | None:
        """The first field of the request that the backend cannot honour."""
        asked = {
            "pods": request.pods is not None and not self.pods,
            "command": self.needs_command and not request.command,
            "image": request.image is not None and not self.images,
            "volumes": bool(request.volumes) and not self.volumes,
            "ports": bool(request.ports) and not self.ports,
            "env": not self.secrets and any(isinstance(value, Secret) for value in request.env.values()),
            "user": request.user is not None and not self.users,
            "shm_mib": bool(request.shm_mib) and not self.shm,
        }
        return next((field for field, refused in asked.items() if refused), None)


OTHERS: Final = ""
"""In a mapping from node to Capabilities: all nodes that it does not name."""

ALL_CAN_ALL: Final[Mapping[str, Capabilities]] = {OTHERS: Capabilities()}
