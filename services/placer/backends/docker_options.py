"""What an operator says about Docker: which engine runs which node's containers, and what requests may ask; no I/O."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DockerEngine(BaseModel):
    """One engine. ``unix:///path``, ``tcp://host:port`` (which anybody on the network may use) or ``https://…``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^(unix:///|tcp://|https://)\S+$")
    tls: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem, as Docker's own client has them; only with https. Read at the start
    of the placer; others than its owner may not read the key."""
    ring_root: Path | None = None
    """Folder on the engine's machine into which containers put their rings. Where absent: with a unix socket the
    placer's own ``ring_root``, else none, and tasks of its containers are not tracked."""

    mps_pipe_dir: Path | None = None
    """Folder on the engine's machine with the pipes of NVIDIA's MPS daemon (its CUDA_MPS_PIPE_DIRECTORY); mounted into
    containers whose devices the node declares as shared by MPS, which do not start without."""
    mps_shm_dir: Path = Path("/dev/shm")  # noqa: S108 -- a file system of the machine
    """The shared memory that the daemon sees; such containers have it as theirs, since contexts meet there."""

    @model_validator(mode="after")
    def _encrypts(self) -> Self:
        if self.tls is not None and not self.url.startswith("https://"):
            raise ValueError(f"tls: found with {self.url}, allowed: with https:// only, which encrypts")
        return self

    @property
    def local(self) -> bool:
        """Whether its machine's files are ours."""
        return self.url.startswith("unix://")


class DockerOptions(BaseModel):
    """LAXITY_PLACER_DOCKER as JSON, or one by one: LAXITY_PLACER_DOCKER__PULL=never."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: dict[str, DockerEngine] = Field(default={"*": DockerEngine(url="unix:///var/run/docker.sock")})
    """The engine of each node: the first pattern that its name matches. All placers of a cluster have the same."""
    scope: str = Field(default="", pattern=r"^([a-zA-Z0-9][a-zA-Z0-9_-]{0,62})?$")
    """Of clusters that share an engine each sees only the containers of its own scope."""

    image: str | None = None
    """For requests that name none; without it a request must name one."""
    images: tuple[str, ...] = ("*",)
    """Patterns of images that may run, compared with the name as the request writes it."""
    pull: Literal["never", "missing", "always"] = "missing"
    auth_file: Path | None = None
    """Logins to registries, in the form of Docker's config.json: read at each pull, so it may be replaced."""
    secrets_dir: Path | None = None
    """Folder with a file for each secret that environments may refer to; without it they may not."""
    volumes: dict[str, str] = Field(default={})
    """What ``source`` of a request's volume may say, and what is mounted: an absolute path or a volume's name."""
    publish_on: str = "127.0.0.1"
    """The address on which a container's ports are reached: this machine only, unless told."""
    network: str = "default"
    """Which of the engine's networks containers are in; ``none`` and ``host`` are two of them."""
    gpus: bool = True
    """False: devices that are no cores are not asked of the engine, for simulated GPUs."""
    pids: int = Field(default=4096, ge=1)
    """Processes and threads of one container: far more than any needs, far fewer than stop a machine."""
    read_only: bool = False
    """The container's root file system; /tmp stays writable, in memory."""
    log_mib: int = Field(default=10, ge=1)
    """Of each of the two files that hold a container's output."""

    stop_grace_us: int = Field(default=5_000_000, ge=0)
    """From TERM to KILL, as with processes."""
    call_timeout_us: int = Field(default=10_000_000, ge=100_000)
    """For each call to an engine; the client library waits for ever (case D8)."""
    start_timeout_us: int = Field(default=20_000_000, ge=100_000)
    """For the engine's start of one container: hooks that look for GPUs are slow."""
    left_after_us: int = Field(default=3_000_000, ge=100_000)
    """A container that another placer made and does not start for so long is left over from one that died, and is
    replaced. Who made one starts it within half of that time or not at all."""
    pull_idle_us: int = Field(default=60_000_000, ge=1_000_000)
    """A pull that reports nothing for so long has failed; how long a whole pull may take is the placer's limit."""
    rescan_us: int = Field(default=5_000_000, ge=100_000)
    """How often a watch looks by itself: for what a stream of events did not say (cases D6, D7)."""
