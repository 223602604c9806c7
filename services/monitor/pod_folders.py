"""Makes the ring folders of a kubelet's pods look like those of other containers; what is in a ring is not its part.

A pod's rings lie in a volume of its own (`emptyDir` ``laxity-ring``), so that no pod has to mount a folder of the
machine, and the labels that its Binding carried in another (`downwardAPI` ``laxity-labels``), which is mounted for
reading alone. The ring root gets a link to the first, with the labels in it, named as the container is. The link goes
when the kubelet takes the labels away, which it does once all containers have ended: a gate's socket in the ring folder
would hold the folder's file system for ever.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Final

from services.monitor.links import POD_RING, of_a_pod
from shared.errors import FieldError
from shared.messages.base import MAX_BODY_BYTES
from shared.messages.ledger import ContainerLabels
from shared.messages.place import Pod
from shared.subjects import encode

LABELS: Final = "volumes/kubernetes.io~downward-api/laxity-labels/container.json"
"""Below the kubelet's folder of the pod, as the policies of k8s/ have it made; ``namespace`` and ``name`` lie beside it
and say how Kubernetes calls the pod."""
LOOK_US: Final = 250_000
"""How often pods are looked for: both volumes are there a second and more before the first container."""


class PodFolders:
    """``pods`` is the kubelet's folder of all pods. ``counts``: what could not be read or made, by reason."""

    def __init__(self, pods: Path, ring_root: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._pods, self._root = pods, ring_root
        self._links: dict[str, Path] = {}
        self._refused: set[str] = set()
        self._next_us = 0

    def look(self, clock_us: int) -> None:
        """Link the pods that came, and unlink those whose containers have ended. What is wrong with one stays with it.

        Raises OSError where the kubelet's folder cannot be read at all.
        """
        if clock_us < self._next_us:
            return
        self._next_us = clock_us + LOOK_US
        self._root.mkdir(parents=True, exist_ok=True)
        there = {entry.name for entry in os.scandir(self._pods)}
        self._refused &= there
        for uid in [uid for uid in self._links if uid not in there or not (self._pods / uid / LABELS).exists()]:
            self._links.pop(uid).unlink(missing_ok=True)
        for uid in sorted(there - self._links.keys() - self._refused):
            try:
                self._try(uid)
            except FieldError:
                self._refused.add(uid)
                self.counts["pod_labels_malformed"] += 1
            except OSError:
                self.counts["pod_os_error"] += 1
        self._forget_others()

    def _try(self, uid: str) -> None:
        """Nothing while the pod has no labels: it is not bound yet, or not by us."""
        folder = self._pods / uid / POD_RING
        try:
            text = (self._pods / uid / LABELS).read_bytes()[: MAX_BODY_BYTES + 1]
        except (FileNotFoundError, NotADirectoryError):
            return
        if not text or not folder.is_dir():
            return
        labels = ContainerLabels.from_json(text)
        token, pod = encode(labels.container), _pod(self._pods / uid / LABELS)
        _put(folder, labels.model_copy(update={"pod": pod}).to_json() if pod else text)
        link = self._root / token
        if link.is_symlink() and link.readlink() != folder:
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(folder)
        self._links[uid] = link

    def _forget_others(self) -> None:
        """Links that a monitor before us has left."""
        known = set(self._links.values())
        for entry in os.scandir(self._root):
            path = Path(entry.path)
            if entry.is_symlink() and path not in known and of_a_pod(path.readlink()):
                path.unlink(missing_ok=True)


def _pod(labels: Path) -> Pod | None:
    """The pod whose labels these are; None where its volume was made by somebody who does not tell."""
    try:
        namespace, name = ((labels.parent / file).read_text(encoding="utf-8") for file in ("namespace", "name"))
        return Pod(namespace=namespace, name=name, uid=labels.parents[3].name)
    except (FileNotFoundError, ValueError):
        return None


def _put(folder: Path, labels: bytes) -> None:
    """The labels into a folder in which a container may write too: no link of its is followed."""
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    beside = f".container.json.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=inside)
        made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=inside)
        with os.fdopen(made, "wb") as file:
            file.write(labels)
        os.rename(beside, "container.json", src_dir_fd=inside, dst_dir_fd=inside)
    finally:
        os.close(inside)
