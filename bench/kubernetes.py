"""How many pods a second get their places, without us and with us: ``make bench-kubernetes``.

In turn, on one Kubernetes with nodes that are only said to be there: a stock kube-scheduler by itself, the same with
our extender, and ``rt.place``, where the placer makes the pods and binds them. Each begins with 32 pods at once for
devices that just suffice and some pods alone, which is the warm-up; Laxity's processes are new each time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench import kubernetes_pods as pods
from bench import report as form
from bench.kubernetes_laxity import Laxity
from bench.kubernetes_watch import BoundPods
from tests.kubernetes.api import Api, Json
from tests.kubernetes.bridged import laxity_on
from tests.kubernetes.cluster import KubeCluster
from tests.kubernetes.parts import free_port
from tests.kubernetes.profile import profile

WAYS: Final = ("plain", "extender", "place")
AT_ONCE, ALONE = 32, 20
JUST: Final = {"bench.example.com/nodes": "just"}
JUST_NODES: Final = AT_ONCE // pods.DEVICES
THREADS: Final = 8
"""Of the client that makes pods."""
LIMIT_S: Final = 120.0
MOST_ALLOCATED: Final = {
    "type": "MostAllocated",
    "resources": [{"name": "cpu", "weight": 1}, {"name": "memory", "weight": 1}, {"name": pods.PLUGIN, "weight": 100}],
}


@dataclass
class Found:
    """Of one way; a value for each round."""

    pods_per_s: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)
    at_once_s: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    """What was tried and did not come about for the 32 at once."""
    failed_later: list[int] = field(default_factory=list)
    left: list[pods.Left] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each process, for one pod."""
    commit_us: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


class Bench:
    """One Kubernetes, and what is tried on it; ``nodes`` and ``count`` of pods."""

    def __init__(self, kube: KubeCluster, folder: Path, nodes: int, count: int) -> None:
        self._kube, self._folder, self._count = kube, folder, count
        self._nodes = [f"node-{number:04d}" for number in range(1, nodes + 1)]
        self._mine = threading.local()
        self._threads = ThreadPoolExecutor(THREADS)
        self.found = {way: Found() for way in WAYS}

    def prepare(self) -> None:
        """The nodes: each has devices of ours, and as many replicas of the plugin's."""
        capacity = {pods.PLUGIN: str(pods.DEVICES * pods.SLOTS)}
        just = self._nodes[:JUST_NODES]

        def add(name: str) -> None:
            self._kube.add_node(name, JUST if name in just else {}, capacity)

        list(self._threads.map(add, self._nodes))

    # --- the three ways ---

    async def plain(self, number: int) -> None:
        config: Json = {"percentageOfNodesToScore": 100, "profiles": [_most_allocated()]}
        namespace = self._kube.namespace(f"plain-{number}")
        with self._scheduler(f"plain-{number}", config) as scheduler:
            make = self._maker(namespace, pods.plain)
            await self._measure("plain", number, namespace, make, scheduler)
        await self._clear(namespace)

    async def extender(self, number: int) -> None:
        namespace, port = self._kube.namespace(f"extender-{number}"), free_port()
        async with self._laxity(f"extender-{number}", port=port) as laxity:
            config = profile(f"http://127.0.0.1:{port}")
            with self._scheduler(f"extender-{number}", config) as scheduler:
                make = self._maker(namespace, pods.ours)
                await self._measure("extender", number, namespace, make, scheduler, laxity)
                self.found["extender"].commit_us += await laxity.commits_us()
        await self._clear(namespace)

    async def place(self, number: int) -> None:
        namespace = self._kube.namespace(f"place-{number}")
        async with self._laxity(f"place-{number}", namespace) as laxity:
            await self._measure("place", number, namespace, laxity.place, {}, laxity)
            self.found["place"].commit_us += await laxity.commits_us()
        await self._clear(namespace)

    @asynccontextmanager
    async def _laxity(self, name: str, namespace: str = "unused", port: int = 0) -> AsyncIterator[Laxity]:
        folder = self._folder / name
        folder.mkdir()
        async with laxity_on(self._kube, folder, Laxity) as laxity:
            await laxity.start(self._nodes, namespace, port)
            try:
                yield laxity
            finally:
                await laxity.end()

    @contextmanager
    def _scheduler(self, name: str, config: Json) -> Iterator[dict[str, int]]:
        """A stock one; its process id."""
        part = self._kube.scheduler(config, name)
        try:
            yield {"kube-scheduler": part.pid}
        finally:
            part.kill()

    def _maker(self, namespace: str, body: Callable[[str, dict[str, str]], Json]) -> Any:
        """Makes pods as a client of the API server does, in threads."""
        path = f"/api/v1/namespaces/{namespace}/pods"

        def one(asked: Json) -> None:
            if not hasattr(self._mine, "api"):
                self._mine.api = self._kube.api()
            api: Api = self._mine.api
            api.create(path, asked)

        async def make(names: list[str], labels: dict[str, str]) -> None:
            bodies = [body(name, labels) for name in names]
            await asyncio.to_thread(lambda: list(self._threads.map(one, bodies)))

        return make

    # --- what is measured ---

    async def _measure(
        self, way: str, number: int, namespace: str, make: Any, processes: dict[str, int], laxity: Laxity | None = None
    ) -> None:
        found = self.found[way]
        processes = processes | self._parts() | (laxity.processes if laxity else {})
        with BoundPods(self._kube, namespace) as bound:

            async def until_bound(names: list[str], labels: dict[str, str]) -> float:
                began = time.monotonic()
                wanted = len(bound.pods) + len(names)
                last, _ = await asyncio.gather(asyncio.to_thread(bound.wait, wanted, LIMIT_S), make(names, labels))
                return last - began

            whole = [f"whole-just-{index}" for index in range(AT_ONCE)]
            found.at_once_s.append(await until_bound(whole, JUST))
            found.failed.append(self._failures(namespace, laxity))
            for index in range(ALONE):
                found.alone_ms.append(await until_bound([f"batch-alone-{index}"], {}) * 1e3)
            watched = {name: psutil.Process(pid) for name, pid in processes.items()}
            before = _cpu_s(watched)
            found.load.append(os.getloadavg()[0])
            took_s = await until_bound(pods.names("many", self._count, seed=number), {})
            for name, cpu_s in _cpu_s(watched).items():
                found.cpu_ms[name].append((cpu_s - before[name]) / self._count * 1e3)
            found.pods_per_s.append(self._count / took_s)
            found.failed_later.append(self._failures(namespace, laxity) - found.failed[-1])
            found.left.append(pods.left(bound.pods.values(), len(self._nodes)))
        print(f"{way}: {found.pods_per_s[-1]:.0f} pods/s, load {found.load[-1]:.1f}", file=sys.stderr)

    def _parts(self) -> dict[str, int]:
        return {"kube-apiserver": self._kube.apiserver.pid, "etcd": self._kube.etcd.pid, "bench": os.getpid()}

    def _failures(self, namespace: str, laxity: Laxity | None) -> int:
        """Tries that came to nothing: what kube-scheduler says of them, and the placer."""
        events = self._kube.admin.items(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")
        failed = sum(event["reason"] == "FailedScheduling" for event in events)
        return failed + (laxity.failures if laxity else 0)

    async def _clear(self, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}"
        for kind in (f"{path}/pods", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"):
            await asyncio.to_thread(self._kube.admin.delete, kind, grace_s=0)
        await asyncio.to_thread(self._kube.admin.until, f"{path}/pods", lambda found: not found["items"], LIMIT_S)


def _most_allocated() -> Json:
    args = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "NodeResourcesFitArgs",
        "scoringStrategy": MOST_ALLOCATED,
    }
    return {"schedulerName": "plain", "pluginConfig": [{"name": "NodeResourcesFit", "args": args}]}


def _cpu_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: each.user + each.system for name, each in times.items()}


# --- the report ---


def report(found: dict[str, Found], nodes: int, count: int, rounds: int) -> Json:
    """In the form of all benches."""
    figures: dict[str, float] = {}
    for way, each in found.items():
        figures |= {f"{way}_{name}": value for name, value in _figures(each).items()}
    commits = [each for way in found.values() for each in way.commit_us]
    figures["bare_commit_p50_us"] = round(statistics.median(commits))
    ratios = {f"{way}_over_plain": _over(found[way], found["plain"]) for way in WAYS[1:]}
    ours = [found[way] for way in WAYS[1:]]
    holds = {
        ">= 0.6 of kube-scheduler alone, through the extender": ratios["extender_over_plain"] >= 0.6,
        ">= kube-scheduler alone, through rt.place": ratios["place_over_plain"] >= 1.0,
        "32 at once onto devices that just suffice: no failed bind": not any(sum(way.failed) for way in ours),
        "every deadline can be guaranteed": all(left.kept == 1.0 for way in ours for left in way.left),
    }
    notes = (
        f"{rounds} rounds of the three ways in turn, {count} pods on {nodes} nodes of {pods.DEVICES} devices. From the "
        "first pod or request that is made to the last pod that is seen bound. Before it, as the warm-up, 32 pods at "
        f"once onto {JUST_NODES} nodes that they fill, and {ALONE} pods alone. plain: pods that ask for replicas of "
        f"{pods.PLUGIN}, {pods.SLOTS} of each device, MostAllocated. Real: etcd, API server, kube-scheduler, "
        "nats-server with a memory ledger, node-list, placer, bridge. Simulated: nodes, monitors; no kubelet runs, so "
        "pods are bound and none is said to run; without us the device plugin, at its best. kept: pods with a deadline "
        "whose device can guarantee it (THEORY section 1, time-sliced)."
    )
    return form.found("kubernetes", figures, ratios, holds, notes)


def _figures(found: Found) -> dict[str, float]:
    rates, left = found.pods_per_s, found.left
    return {
        "pods_per_s": round(statistics.median(rates), 1),
        "pods_per_s_least": round(min(rates), 1),
        "pods_per_s_most": round(max(rates), 1),
        "alone_p50_ms": round(statistics.median(found.alone_ms), 1),
        "at_once_s": round(statistics.median(found.at_once_s), 2),
        "at_once_failed": sum(found.failed),
        "many_failed": sum(found.failed_later),
        "idle_devices": round(statistics.median(each.idle_devices for each in left)),
        "idle_nodes": round(statistics.median(each.idle_nodes for each in left)),
        "split": round(statistics.median(each.split for each in left)),
        "kept_ratio": round(statistics.median(each.kept for each in left), 3),
        "load": round(statistics.median(found.load), 1),
        **{f"cpu_ms_{name}": round(statistics.median(spent), 2) for name, spent in sorted(found.cpu_ms.items())},
    }


def _over(ours: Found, plain: Found) -> float:
    """The median of the rounds."""
    pairs = zip(ours.pods_per_s, plain.pods_per_s, strict=True)
    return round(statistics.median(our / other for our, other in pairs), 3)


def show(told: Json) -> None:
    """The same for people."""
    figures = told["figures"]
    names = dict.fromkeys(name.partition("_")[2] for name in figures if name.partition("_")[0] in WAYS)
    print(f"\n{'':28}" + "".join(f"{way:>12}" for way in WAYS))
    for name in names:
        row = [figures.get(f"{way}_{name}") for way in WAYS]
        print(f"  {name:<26}" + "".join(f"{'-' if value is None else value:>12}" for value in row))
    print(f"  bare_commit_p50_us: {figures['bare_commit_p50_us']}")
    form.show(told)


def find_kubernetes() -> None:
    """Names the folder of its programs, which are built where there are none; exits with the reason."""
    done = subprocess.run([".ci/kubernetes"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    os.environ["KUBEBUILDER_ASSETS"] = done.stdout.partition("=")[2].partition(";")[0]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", type=Path, help="a file for the figures, in place of build/bench/kubernetes.json")
    asked = parser.parse_args()
    find_kubernetes()
    ours = asyncio.current_task()
    assert ours is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ours.cancel)
    with KubeCluster() as kube, tempfile.TemporaryDirectory(prefix="laxity-bench-") as folder:
        bench = Bench(kube, Path(folder), asked.nodes, asked.pods)
        await asyncio.to_thread(bench.prepare)
        for number in range(1, asked.rounds + 1):
            for way in (bench.plain, bench.extender, bench.place):
                await way(number)
    told = report(bench.found, asked.nodes, asked.pods, asked.rounds)
    form.keep(told, asked.to)
    show(told)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except asyncio.CancelledError:  # by a signal, and all that it had started has ended with it
        sys.exit(128 + signal.SIGTERM)
