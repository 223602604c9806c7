"""A real registry of a test's own that asks for a login, and what is pushed to it; no tests."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.docker_engine import docker, engine_url

USER, PASSWORD = "robot", "correct-horse-battery"
_HTPASSWD = f"{USER}:$2y$05$abcdefghijklmnopqrstuuSnF5tLPqPFqc0z9CY0HcSLFbSRlL67u\n"
_CONFIG = """version: 0.1
log: {{level: info}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "127.0.0.1:0"}}
auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}
"""
_LISTENS = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
START_TIMEOUT_S = 20.0


class Registry:
    """Debian's docker-registry on a free port of 127.0.0.1, which engines of this machine take without TLS."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("docker-registry") is None:
            pytest.skip("no docker-registry, which Debian has a package of; make test-docker installs it")
        if not engine_url().startswith("unix://"):
            pytest.skip("the engine is not of this machine, and cannot reach a registry on its 127.0.0.1")
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def log(self) -> str:
        return (self._folder / "registry.log").read_text(errors="replace")

    def __enter__(self) -> Self:
        self._folder.mkdir()
        (self._folder / "htpasswd").write_text(_HTPASSWD)
        (self._folder / "config.yml").write_text(_CONFIG.format(folder=self._folder))
        with (self._folder / "registry.log").open("wb") as log:
            command = ["docker-registry", "serve", str(self._folder / "config.yml")]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := _LISTENS.search(self.log)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"the registry did not start: {self.log[-2000:]}")
            time.sleep(0.02)
        self.port = int(found[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def login(self, name: str = "docker") -> Path:
        """A folder with the file that Docker's own client writes at a login."""
        folder = self._folder / name
        command = ["docker", "--config", str(folder), "--host", engine_url(), "login", "-u", USER, "--password-stdin"]
        subprocess.run(
            [*command, f"127.0.0.1:{self.port}"], input=PASSWORD.encode(), capture_output=True, timeout=30, check=True
        )
        return folder

    def push(self, name: str, says: str, *, random_mib: int = 0) -> str:
        """An image that prints ``says``, pushed with the login and gone from the engine; its name here."""
        image, root = f"127.0.0.1:{self.port}/{name}", self._folder / "image"
        shutil.rmtree(root, ignore_errors=True)
        (root / "bin").mkdir(parents=True)
        shutil.copy(shutil.which("busybox") or "", root / "bin" / "busybox")
        for applet in ("sh", "sleep", "cat"):
            (root / "bin" / applet).symlink_to("busybox")
        (root / "says").write_text(f"{says}\n")  # engines show whole lines
        (root / "random").write_bytes(os.urandom(random_mib << 20))
        packed = self._folder / "image.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], check=True)
        docker("import", str(packed), image)
        docker("--config", str(self.login()), "push", "-q", image)
        docker("rmi", image)
        return image


def logins(file: Path, host: str, password: str = PASSWORD) -> Path:
    """A file of logins, as the settings name one."""
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    file.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    file.chmod(0o600)
    return file
