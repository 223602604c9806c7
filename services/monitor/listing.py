"""The names in a folder, looked up again only where they may have changed; what they mean is decided elsewhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_SETTLED_NS: Final = 100_000_000  # far more than one tick of the clock that stamps directories


class Listing:
    """The names in a directory, given again only after they may have changed."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self.settled_ns: int | None = None
        self.watched = False

    @property
    def told_of(self) -> bool:
        """Whether any change that is to come will be told."""
        return self.watched and self.settled_ns is not None

    def changed(self) -> set[str] | None:
        """All names, none where the directory is missing; None while they are as before. Raises other OSErrors."""
        try:
            modified_ns = os.stat(self.name).st_mtime_ns  # noqa: PTH116 - a third of Path.stat()
            if modified_ns == self.settled_ns:
                return None
            now_ns = time.time_ns()
            names = {path.name for path in self.path.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            names, modified_ns, now_ns = set(), 0, 0
        # Two changes within one tick of the clock leave one stamp: only a stamp that is clearly past says "as before".
        self.settled_ns = modified_ns if now_ns - modified_ns > _SETTLED_NS else None
        return names
