"""What client and gate say to each other, byte by byte (docs/gate.md); the SDK has its own copy."""

from __future__ import annotations

import struct
from typing import Final

SOCKET: Final = "gate.sock"
"""In the container's ring folder."""
VERSION: Final = 1

ASK, RELEASE = 1, 2
WELCOME, GRANT = 1, 2

MESSAGE: Final = struct.Struct("<BBxxxxxxQ")
"""Kind, version (of a welcome, else 0), and in an ASK what is left until the deadline, in microseconds."""
