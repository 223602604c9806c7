"""A real node of the tests' own on this machine: containerd and a kubelet, with folders and cgroups of its own."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.kubernetes.api import Api, Json
from tests.kubernetes.image import IMAGE, pack
from tests.kubernetes.parts import Part, free_port, kill_all, program

CGROUPS = Path("/sys/fs/cgroup")


class Machine:
    """``name`` is its node's. Ready when ``start`` returns."""

    def __init__(self, folder: Path, name: str, kubeconfig: Path, admin: Api) -> None:
        folder.mkdir()
        self.folder, self.name = folder, name
        self._admin = admin
        self._key = folder.parent.name
        self.logs = folder / "pod-logs"
        self.has_programs = False
        self._socket = folder / "c.sock"
        self.containerd = Part("containerd", ["containerd", "--config", str(self._containerd())], folder, self._serves)
        config = self._kubelet()
        command = [
            *(program("kubelet"), f"--config={config}", f"--kubeconfig={kubeconfig}", f"--hostname-override={name}"),
            *(f"--root-dir={folder}/kubelet", f"--cert-dir={folder}/pki"),
        ]
        self.kubelet = Part("kubelet", command, folder, self._is_ready)

    def start(self) -> None:
        _make_groups(self._key)
        self.containerd.start()
        packed = self.folder / "box.tar"
        self.has_programs = pack(packed)
        self._ctr("images", "import", str(packed))
        self.kubelet.start()
        # no controller manager may be there to take away the taint that a new node has
        self._admin.patch(f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}})

    def end(self) -> None:
        """Nothing of it is left, whatever was done to it."""
        for part in (self.kubelet, self.containerd):
            part.kill()
        kill_all(f"{self.folder}/")
        for mounted in self._mounts():
            subprocess.run(["umount", "-l", mounted], check=False)
        subprocess.run(["busybox", "ip", "link", "del", self._bridge], check=False, capture_output=True)
        _remove_groups(self._key)

    # --- what an outsider sees ---

    def log(self, namespace: str, pod: str, container: str = "main") -> str:
        """What a container has said, all its starts."""
        files = sorted(self.logs.glob(f"{namespace}_{pod}_*/{container}/*.log"))
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
        return "\n".join(line.split(" ", 3)[3] for line in lines if line.count(" ") >= 3)

    def until_logged(self, namespace: str, pod: str, wanted: str, timeout_s: float = 30) -> str:
        deadline = time.monotonic() + timeout_s
        while wanted not in (found := self.log(namespace, pod)):
            assert time.monotonic() < deadline, f"{pod} has not said {wanted!r} but {found!r}"
            time.sleep(0.05)
        return found

    def environment(self, pod_uid: str) -> dict[str, str]:
        """Of the first process of the pod's container ``main``."""
        pid = self.pid(pod_uid)
        text = Path("/proc", str(pid), "environ").read_bytes().decode()
        return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)

    def pid(self, pod_uid: str, container: str = "main") -> int:
        """Of a running container's first process, as this machine counts."""
        for line in self._ctr("tasks", "list").splitlines()[1:]:
            task, pid, _ = line.split()
            labels = json.loads(self._ctr("containers", "info", task))["Labels"]
            if (
                labels.get("io.kubernetes.pod.uid") == pod_uid
                and labels.get("io.kubernetes.container.name") == container
            ):
                return int(pid)
        raise AssertionError(f"no container {container} of pod {pod_uid} runs")

    def limits(self, pod_uid: str, container: str = "main") -> tuple[int | None, int | None]:
        """Milli CPU and MiB that a container may use now, as the kernel has it; None is no limit."""
        pid = self.pid(pod_uid, container)
        lines = [line.split(":", 2) for line in Path("/proc", str(pid), "cgroup").read_text().splitlines()]
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        if "cpu" in paths:
            cpu, memory = CGROUPS / "cpu" / paths["cpu"][1:], CGROUPS / "memory" / paths["memory"][1:]
            quota, period = int((cpu / "cpu.cfs_quota_us").read_text()), int((cpu / "cpu.cfs_period_us").read_text())
            most = int((memory / "memory.limit_in_bytes").read_text())
            return (quota * 1000 // period if quota > 0 else None), (most >> 20 if most < 1 << 60 else None)
        group = CGROUPS / paths[""][1:]
        quota_text, period_text = (group / "cpu.max").read_text().split()
        most_text = (group / "memory.max").read_text().strip()
        milli = None if quota_text == "max" else int(quota_text) * 1000 // int(period_text)
        return milli, (None if most_text == "max" else int(most_text) >> 20)

    # --- how it is made ---

    @property
    def _bridge(self) -> str:
        return f"lxk{self._key[-8:]}"

    def _ctr(self, *arguments: str) -> str:
        command = ["ctr", "-a", str(self._socket), "-n", "k8s.io", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def _serves(self) -> bool:
        command = ["ctr", "-a", str(self._socket), "version"]
        return subprocess.run(command, check=False, capture_output=True, timeout=10).returncode == 0

    def _is_ready(self) -> bool:
        found = self._admin.find(f"/api/v1/nodes/{self.name}")
        conditions = (found or {}).get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def _containerd(self) -> Path:
        cni = self.folder / "cni"
        cni.mkdir()
        octet = int(self._key.encode().hex(), 16) % 200 + 20
        network = {
            "cniVersion": "0.4.0",
            "name": self._key,
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": self._bridge,
                    "isGateway": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self.folder / "addresses"),
                        "ranges": [[{"subnet": f"10.231.{octet}.0/24"}]],
                    },
                }
            ],
        }
        (cni / "10-bridge.conflist").write_text(json.dumps(network))
        path = self.folder / "containerd.toml"
        path.write_text(
            f"""version = 2
root = "{self.folder}/c-root"
state = "{self.folder}/c"
oom_score = 0
[grpc]
  address = "{self._socket}"
[ttrpc]
  address = "{self._socket}.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self.folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGE}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""
        )
        return path

    def _kubelet(self) -> Path:
        config: Json = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": free_port(),
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._key}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "evictionHard": {"memory.available": "50Mi"},
            "nodeStatusUpdateFrequency": "2s",
            "podLogsDir": str(self.logs),
            "resolvConf": "",
            "syncFrequency": "5s",
            "volumePluginDir": str(self.folder / "plugins"),
        }
        path = self.folder / "kubelet.json"
        path.write_text(json.dumps(config))
        return path

    def _mounts(self) -> list[str]:
        """Deepest first."""
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return sorted((path for path in mounted if path.startswith(f"{self.folder}/")), reverse=True)


def _hierarchies() -> list[Path]:
    """One for each controller, or the only one."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and (path / "cgroup.procs").exists()]


def _make_groups(name: str) -> None:
    """Below which a kubelet makes those of its pods: two on one machine would else end each other's."""
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if (group / "cpuset.mems").exists():
            for file in ("cpuset.cpus", "cpuset.mems"):
                if not (group / file).read_text().strip():
                    (group / file).write_text((hierarchy / file).read_text() or "0")
        if hierarchy == CGROUPS:
            for controller in ("cpu", "cpuset", "memory", "pids", "io", "hugetlb"):
                with suppress(OSError):
                    (CGROUPS / "cgroup.subtree_control").write_text(f"+{controller}")


def _remove_groups(name: str) -> None:
    for hierarchy in _hierarchies():
        group = hierarchy / name
        deepest_first = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        for path in [*deepest_first, group]:
            with suppress(OSError):
                path.rmdir()
