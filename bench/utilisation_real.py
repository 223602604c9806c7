"""`bench-utilisation` for real: cores of this machine stand for devices, containers are processes, services run.

One core has many patient containers that come all at once, the other has few and is used more. Detectors and captioners
arrive, placed by each chooser in turn; what is reported are the deadline tracker's verdicts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

from bench.report import tell
from bench.shared_devices import Kept, declared, share_micro, total
from bench.utilisation import CROWD, FEW, NEWCOMERS, Place
from cli.client import Client, connected
from cli.embedded import dies_with
from cli.place import decide
from cli.programs import REAL
from cli.release import ask as release
from shared.admission import RtTask
from shared.messages import SHARE_WHOLE_MICRO, Gpu, Kind, NodeDeadlines, NodeFacts, PlaceRequest
from shared.subjects import DEADLINES, NODES, node_key

CORES: Final = 2
BUSY: Final = Path(__file__).with_name("busy.py")
READY_S: Final = 40.0
DECIDE_US: Final = 10_000_000
SETTLE_S: Final = 2.5
"""The tracker writes its records once a second."""
PROFILES: Final = {"utilisation": {"strategy": "spread", "cpu": 0, "memory": 0, "gpu": 1}}
NOBODY, LOWEST, PACKING, OURS = "nobody new", "lowest utilisation", "bin packing", "guarantees"
STRATEGIES: Final = {LOWEST: "utilisation", PACKING: "binpack", OURS: "deadline"}
DETECTOR, CAPTIONER = NEWCOMERS[:2]
SHOWN: Final = {"everybody": ("",), "residents": (CROWD.name, FEW.name), "detectors": (DETECTOR.name,)}
NOTES: Final = (
    "Real: processes pinned to cores that stand for devices, every service, the tracker's verdicts. What is missed "
    "with nobody new is the machine's own noise."
)
ARRIVING: Final = (DETECTOR, CAPTIONER) * 4


def request(name: str, task: RtTask, strategy: str, kind: Kind, phase_us: int) -> PlaceRequest:
    share = Gpu(share=share_micro(task) / SHARE_WHOLE_MICRO)
    command = ("python", str(BUSY), *map(str, (task.runtime_us, task.period_us, phase_us)))
    return PlaceRequest(request_id=name, command=command, gpu=share, realtime=declared(task, kind), strategy=strategy)


# ----------------------------------------------------------------------------------------- the cluster


@asynccontextmanager
async def cluster(folder: Path, cores: int, **env: str) -> AsyncIterator[Client]:
    """Embedded: a server, a monitor of the cores, a tracker, a node list, a placer; ends with its containers."""
    ready, parent = folder / "cluster.json", os.getpid()
    command = [sys.executable, "-m", "cli.main", "up", "--fake-nodes", "0", "--placers", "1", "--storage", "memory"]
    command += ["--cores", str(cores), "--state-dir", str(folder), "--ready-file", str(ready)]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220  # nothing else runs yet
            command,
            env=os.environ | env,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: dies_with(parent, signal.SIGTERM),  # noqa: PLW1509  # this process has one thread
        )
    try:
        until_s = time.monotonic() + READY_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the cluster does not start:\n{(folder / 'up.log').read_text()[-2000:]}")
            await asyncio.sleep(0.05)
        async with connected(json.loads(ready.read_bytes())["nats_url"]) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


async def place(client: Client, wanted: PlaceRequest) -> str | None:
    """Its device; None where it was refused."""
    reply = await decide(client, wanted, DECIDE_US, print)
    if reply is None:
        raise SystemExit(f"nobody decided on {wanted.request_id}")
    if reply.outcome == "placed":
        return reply.placements[0].devices[0]
    print(f"  {wanted.request_id} is refused: {'; '.join(reason.message for reason in reply.reasons)}")
    return None


async def leave(client: Client, name: str) -> None:
    """Until nothing of it is reserved any more."""
    while (await release(client, name)).outcome == "stopping":  # noqa: ASYNC110  # it is asked for
        await asyncio.sleep(0.1)


async def settle(client: Client) -> dict[str, Place]:
    """The residents, each kind packed on a core of its own: what the crowd leaves of its core is held meanwhile."""
    crowd = await _packed(client, CROWD)
    left_micro = SHARE_WHOLE_MICRO - len(CROWD.residents) * share_micro(CROWD.residents[0])
    share = Gpu(share=left_micro / SHARE_WHOLE_MICRO)
    await place(client, PlaceRequest(request_id="rest", command=("sleep", "600"), gpu=share, strategy="binpack"))
    few = await _packed(client, FEW)
    await leave(client, "rest")
    if crowd == few:
        raise SystemExit("the residents are on one core")
    return {crowd: CROWD, few: FEW}


async def _packed(client: Client, kind: Place) -> str:
    """Firm, as the list sees them; those that come together are released together."""
    devices = set[str | None]()
    for number, task in enumerate(kind.residents):
        phase_us = 0 if kind.together else number * task.period_us // len(kind.residents)
        name = f"{kind.name}-{number}"
        devices.add(await place(client, request(name, task, "binpack", Kind.FIRM, phase_us)))
    [device] = devices
    if device is None:
        raise SystemExit(f"there is no room for {kind.name}")
    return device


# ---------------------------------------------------------------------------------------- the choosers


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one chooser's turn: where newcomers went (None: nowhere), and all containers' tasks meanwhile."""

    places: Mapping[str, str | None]
    kept: Mapping[str, Kept]

    def of(self, *starts: str) -> Kept:
        """Of the containers whose names start so."""
        return total(kept for name, kept in self.kept.items() if name.startswith(starts))


async def round_of(client: Client, chooser: str, names: Mapping[str, Place], number: int, seconds: float) -> Round:
    """The newcomers come, everything runs for so long, they go. Who is told no deadlines sees no promise to make."""
    places = dict[str, str | None]()
    for index, task in enumerate(() if chooser == NOBODY else ARRIVING):
        name, kind = f"{task.name}-{number}-{index}", Kind.FIRM if chooser == OURS else Kind.SOFT
        phase_us = index * task.period_us // len(ARRIVING)
        device = await place(client, request(name, task, STRATEGIES[chooser], kind, phase_us))
        places[name] = None if device is None else names[device].name
    await asyncio.sleep(SETTLE_S)
    before = await judged(client)
    await asyncio.sleep(seconds)
    after = await judged(client)
    there = {name for name, place in places.items() if place}
    await asyncio.gather(*(leave(client, name) for name in there))
    residents = {f"{kind.name}-{index}" for kind in names.values() for index in range(len(kind.residents))}
    nothing = Kept()  # of one that has not begun
    kept = {name: _since(before.get(name, nothing), after.get(name, nothing)) for name in there | residents}
    return Round(places, kept)


async def judged(client: Client) -> dict[str, Kept]:
    """All verdicts of the tracker so far, by request; a second old at most."""
    found = await client.read_key(DEADLINES, node_key(REAL), NodeDeadlines)
    assert found is not None, "the tracker has written no record"
    return {record.request_id: Kept(record.met, record.missed) for record in found.containers if record.request_id}


def _since(before: Kept, after: Kept) -> Kept:
    return Kept(after.met - before.met, after.missed - before.missed)


# ------------------------------------------------------------------------------------------ the report


def report(rounds: Mapping[str, Sequence[Round]], slice_us: int | None, load: float) -> None:
    print(
        f"\n{'placed by':<20} admitted  with the crowd  tasks met  of residents  of detectors  of those with the crowd"
    )
    figures: dict[str, float] = {"slice_us": slice_us or 0, "load_average": round(load, 2)}
    for chooser, turns in rounds.items():
        admitted, crowded = (mean(len(names) for names in each) for each in zip(*map(_detail, turns), strict=True))
        kept = {what: total(each.of(*kinds) for each in turns) for what, kinds in SHOWN.items()}
        kept["crowded"] = total(each.of(*_detail(each)[1]) for each in turns)
        shown = [f"{each.ratio:.2%}" if each.met + each.missed else "" for each in kept.values()]
        print("{:<20} {:<9.1f} {:<15.1f} {:<10} {:<13} {:<13} {}".format(chooser, admitted, crowded, *shown))
        name = chooser.replace(" ", "_")
        figures |= {f"{name}_admitted": admitted, f"{name}_detectors_with_crowd": crowded}
        for what, each in kept.items():
            figures |= {f"{name}_{what}_met": each.met, f"{name}_{what}_missed": each.missed}
    tell("utilisation-real", figures, ratios={}, holds=_holds(figures), notes=NOTES)


def _detail(each: Round) -> tuple[list[str], list[str]]:
    """Who was admitted, and which detectors were put beside the crowd."""
    admitted = [name for name, place in each.places.items() if place]
    return admitted, [name for name in admitted if each.places[name] == CROWD.name and DETECTOR.name in name]


def _holds(figures: Mapping[str, float]) -> dict[str, bool]:
    def missed(chooser: str, what: str) -> float:
        name = f"{chooser.replace(' ', '_')}_{what}"
        return figures[f"{name}_missed"] / max(1, figures[f"{name}_met"] + figures[f"{name}_missed"])

    return {
        "the lowest utilisation puts detectors beside the crowd, and they miss more than 10 %": missed(
            LOWEST, "crowded"
        )
        > 0.1,
        "packed by utilisation, residents miss ten times as much as with nobody new, and 1 % or more": missed(
            PACKING, "residents"
        )
        > max(0.01, 10 * missed(NOBODY, "residents")),
        "by guarantees less than 1 % is missed, or as much as with nobody new": missed(OURS, "everybody")
        <= max(0.01, missed(NOBODY, "everybody")),
    }


async def measure(folder: Path, seconds: float, turns: int) -> tuple[dict[str, list[Round]], int | None]:
    rounds: dict[str, list[Round]] = {chooser: [] for chooser in (NOBODY, LOWEST, PACKING, OURS)}
    async with cluster(folder, CORES, LAXITY_PLACER_PROFILES=json.dumps(PROFILES)) as client:
        names = await settle(client)
        facts = await client.read_key(NODES, node_key(REAL), NodeFacts)
        for turn, chooser in enumerate([*rounds] * turns):
            rounds[chooser].append(await round_of(client, chooser, names, turn, seconds))
            print(f"{chooser}: {dict(rounds[chooser][-1].places)}", flush=True)
    return rounds, facts.devices[0].slice_us if facts else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each chooser's turn")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < CORES:
        raise SystemExit("two cores are needed")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        rounds, slice_us = asyncio.run(measure(Path(name), args.seconds, args.turns))
    report(rounds, slice_us, load)


if __name__ == "__main__":
    main()
