"""What a supervisor without NATS can look at: a file that is there while the service is ready."""

from __future__ import annotations

import json
import os
from pathlib import Path


class ReadyFile:
    """Says who is ready, to whoever reads it; ``path`` None: nobody looks."""

    def __init__(self, path: Path | None, service: str, instance: str) -> None:
        self._path = path
        self._about = {"service": service, "instance": instance, "pid": os.getpid()}
        self._said: bool | None = None

    def say(self, ready: bool) -> None:
        if self._path is None or ready == self._said:
            return
        self._said = ready
        if not ready:
            self._path.unlink(missing_ok=True)
            return
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self._about), encoding="utf-8")
        beside.replace(self._path)
