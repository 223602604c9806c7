"""The Docker engine that tests run on, the image they use, and the reason where there is none; no tests live here."""

import functools
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.placer.backends.docker_options import DockerEngine, DockerOptions

IMAGE = "laxity-base:local"
ADVICE = "make test-docker finds or starts one"


def engine_url() -> str:
    """Skips the test where there is no engine, or where it lacks the image that tests run."""
    url = os.environ.get("LAXITY_DOCKER_HOST") or os.environ.get("DOCKER_HOST")
    if not url:
        pytest.skip(f"no Docker engine: neither LAXITY_DOCKER_HOST nor DOCKER_HOST is set; {ADVICE}")
    if reason := _lacks(url):
        pytest.skip(f"{reason}; {ADVICE}")
    return url


def docker_options(folder: Path) -> DockerOptions:
    """A scope of its own for each test, so that tests share an engine, and without a network."""
    scope = f"t{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    engines = {"*": DockerEngine(url=engine_url())}
    return DockerOptions(engines=engines, scope=scope, image=IMAGE, pull="never", network="none")


def docker(*arguments: str, check: bool = True) -> str:
    """Output of Docker's own client: what an outsider sees."""
    command = ["docker", "--host", engine_url(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=check).stdout.strip()


def inspect(name: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", name))
    assert isinstance(found, dict)
    return found


@functools.cache
def _lacks(url: str) -> str | None:
    command = ["docker", "--host", url, "image", "inspect", IMAGE]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine answers at {url}: {error}"
    return f"the Docker engine at {url}: {found.stderr.strip()[:200]}" if found.returncode else None
