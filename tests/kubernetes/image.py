"""An image made of this machine's static busybox, as a tar that containerd imports: no registry is asked."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

IMAGE = "laxity.test/box:local"
"""What pods of tests run, and what the kubelet's pods wait in."""
APPLETS = ("sh", "sleep", "cat", "env", "echo", "true", "false", "dd", "tail", "id", "ls", "mkdir", "head")
ROOT = Path(__file__).parents[2]
PROGRAMS = {"marks": ROOT / "tests" / "laxity_h" / "marks.c", "turns": ROOT / "tests" / "kubernetes" / "turns.c"}
"""By their names in the image: one writes a ring of tasks, the other takes turns at a gate."""


def pack(target: Path) -> bool:
    """Write the tar; True where it has PROGRAMS in it too."""
    layer, has_programs = _layer()
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "2147483647"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as tar:
        for path, body in [(name, config), ("layer.tar", layer), ("manifest.json", json.dumps(manifest).encode())]:
            entry = tarfile.TarInfo(path)
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body))
    return has_programs


def _layer() -> tuple[bytes, bool]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder, mode in [("bin", 0o755), ("tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755)]:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        tar.add(shutil.which("busybox") or "busybox", "bin/busybox")
        for applet in APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        programs = {name: _compiled(source) for name, source in PROGRAMS.items()}
        for name, body in programs.items():
            if body is not None:
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.mode, entry.size = 0o755, len(body)
                tar.addfile(entry, io.BytesIO(body))
    return packed.getvalue(), None not in programs.values()


def _compiled(source: Path) -> bytes | None:
    """None where there is no C compiler with a static C library."""
    if shutil.which("cc") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "program")
        include = ROOT / "sdk" / "src" / "laxity"
        command = ["cc", "-O2", "-static", "-pthread", f"-I{include}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        return made.read_bytes() if done.returncode == 0 else None
