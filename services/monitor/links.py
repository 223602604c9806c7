"""Which entries of a ring root are folders of containers; the gate needs it too, so it imports nothing that is slow."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Final

POD_RING: Final = "volumes/kubernetes.io~empty-dir/laxity-ring"
"""Below the kubelet's folder of a pod: the volume for its rings."""
_OF_A_POD: Final = re.compile(rf"/.*/[0-9a-f-]+/{POD_RING}")


def is_box(path: Path) -> bool:
    """Whether it is a container's folder: a directory, and no link but one of ours to a pod's volume."""
    return real(path) is not None


def real(path: Path) -> Path | None:
    """The folder itself, no part of which a container can have made; None where it is none."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode):
            return path
        if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():
            target = path.readlink()
            if of_a_pod(target) and stat.S_ISDIR(target.lstat().st_mode):
                return target
    return None


def of_a_pod(target: Path) -> bool:
    """Whether a link leads where a kubelet has a pod's rings."""
    return _OF_A_POD.fullmatch(str(target)) is not None and ".." not in target.parts
