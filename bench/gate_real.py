"""`bench-gate` through everything: the three containers are placed by `rt.place` on a core that stands for a device.

What is reported are the deadline-tracker's verdicts. On the gated core they are hard containers, on a time-sliced one
soft, since no other kind is admitted there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import gate
from bench.core_time import OURS, filler, join
from bench.gate import MARGIN_US, SET, Span, Trace, quantile
from bench.report import tell
from bench.shared_devices import Kept, declared, total
from bench.utilisation_real import DECIDE_US, SETTLE_S, cluster, judged
from cli.client import Client
from cli.place import decide
from shared.messages import Gpu, Kind, PlaceReply, PlaceRequest, Regime

ROOT: Final = Path(gate.__file__).parents[1]
BEGIN_S: Final = 5.0
"""From the first request until all containers release their first tasks together."""
WAIT_S: Final = 30.0
SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster's run: what the placer answered by name, what the tracker judged by name, what the containers saw."""

    answers: Mapping[str, PlaceReply]
    verdicts: Mapping[str, Kept]
    trace: Trace

    @property
    def judged(self) -> Kept:
        return total(self.verdicts.values())

    def outcomes(self, *names: str) -> list[str]:
        return [self.answers[name].outcome for name in names]


def request(index: int, kind: Kind, command: Sequence[str], ours: Path) -> PlaceRequest:
    timing = declared(SET[index], kind).model_copy(update={"gate": kind is Kind.HARD})
    return PlaceRequest(
        request_id=SET[index].name,
        command=("python", "-m", "bench.gate", "--worker", *command),
        env={"PYTHONPATH": str(ROOT), OURS: str(ours)},
        gpu=Gpu(share=SHARE),
        realtime=timing,
        queue=True,
    )


async def run(folder: Path, count: int, *, gated: bool) -> Run:
    """The containers of SET on one core of a cluster with ``count`` tasks each, and two that may not come.

    The other cores are held by somebody who does nothing.
    """
    kind, core = Kind.HARD if gated else Kind.SOFT, max(os.sched_getaffinity(0))
    env = {"LAXITY_MONITOR_GATE_MARGIN_US": str(MARGIN_US)}
    if gated:
        env["LAXITY_MONITOR_REGIMES"] = json.dumps({core: Regime.GATED})
    ours = folder / "ours"
    ours.mkdir()
    files = [folder / f"{task.name}.json" for task in SET]
    began_ns = time.monotonic_ns() + int(BEGIN_S * 1e9)
    async with cluster(folder, core + 1, **env) as client:
        keep_off(folder, core)
        rest = PlaceRequest(request_id="rest", command=("sleep", "600"), gpu=Gpu(count=core, share=1.0))
        await answer(client, rest)
        wanted = [
            request(index, kind, (*map(str, (index, -1, began_ns, count)), "--spans", str(file)), ours)
            for index, file in enumerate(files)
        ]
        bare = declared(SET[0], Kind.FIRM).model_copy(update={"gate": False})
        others = [
            wanted[0].model_copy(update={"request_id": "without-gate", "realtime": bare, "queue": False}),
            wanted[0].model_copy(
                update={"request_id": "one-more", "realtime": declared(SET[0], Kind.HARD), "queue": False}
            ),
        ]
        answers = {each.request_id or "": await answer(client, each) for each in (*wanted, *others)}
        with filler(core) as fills:  # not before: it is foreign use, and a gated device takes nobody beside that
            await asyncio.to_thread(join, ours, [fills, *gates(folder, core)], len(SET) + 1)
            await over(files, BEGIN_S + 3 * count * SET[0].period_us / 1e6 + WAIT_S)
        await asyncio.sleep(SETTLE_S)
        verdicts = await judged(client)
    spans = [Span(task, *row) for task, file in zip(SET, files, strict=True) for row in json.loads(file.read_text())]
    return Run(answers, verdicts, Trace(spans))


async def answer(client: Client, wanted: PlaceRequest, limit_s: float = WAIT_S) -> PlaceReply:
    """What became of it. A gated device takes nobody while others compute on it: who may wait does, until they rest."""
    until_s, before = time.monotonic() + limit_s, ""
    while reply := await decide(client, wanted, DECIDE_US, print):
        if reply.outcome != before:
            print(f"{wanted.request_id}: {reply.outcome}", *(reason.message for reason in reply.reasons))
        if reply.outcome != "queued" or time.monotonic() > until_s:
            return reply
        before = reply.outcome
        await asyncio.sleep(0.2)
    raise SystemExit(f"nobody decided on {wanted.request_id}")


def keep_off(folder: Path, core: int) -> None:
    """The cluster's own processes leave the core to those whose device it is."""
    others = os.sched_getaffinity(0) - {core}
    for pids in json.loads((folder / "cluster.json").read_bytes())["services"].values():
        for thread in (int(path.name) for pid in pids for path in Path(f"/proc/{pid}/task").iterdir()):
            os.sched_setaffinity(thread, others)


def gates(folder: Path, core: int) -> list[int]:
    """The processes of gates, which go to the device's core, so that its time is all that anybody waits for."""
    services = json.loads((folder / "cluster.json").read_bytes())["services"].values()
    children = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pids in services for pid in pids]
    found = [
        int(pid) for pids in children for pid in pids if b"monitor.gate" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in found:
        os.sched_setaffinity(pid, {core})
    return found


async def over(files: Sequence[Path], limit_s: float) -> None:
    """Until all containers have told what they saw."""
    until_s = time.monotonic() + limit_s
    while missing := [file.stem for file in files if not file.exists()]:
        if time.monotonic() > until_s:
            raise SystemExit(f"not done: {', '.join(missing)}")
        await asyncio.sleep(0.1)


# ------------------------------------------------------------------------------------------ the report


def report(free: Run, gated: Run, load: float) -> None:
    misses, unexplained = len(gated.trace.misses()), len(gated.trace.unexplained())
    handovers = gated.trace.handovers_us()
    tell(
        "gate-real",
        {
            "judged_without": free.judged.met + free.judged.missed,
            "missed_without": free.judged.missed,
            "judged_gated": gated.judged.met + gated.judged.missed,
            "missed_gated": gated.judged.missed,
            "missed_gated_by_the_containers_stamps": misses,
            "of_these_not_the_hosts": unexplained,
            "overlaps_gated": gated.trace.overlaps(),
            "handover_p50_us": quantile(handovers, 0.5),
            "handover_p99_us": quantile(handovers, 0.99),
            "handover_p99_9_us": quantile(handovers, 0.999),
            "load_average": round(load, 2),
        },
        ratios={"missed_without": round(1 - free.judged.ratio, 4)},
        holds=holds(free, gated),
        notes="Real: every service, containers as processes on one core that stands for a device; missed and judged "
        "are the deadline-tracker's verdicts. A miss is the host's as in `bench-gate`, by the containers' own stamps, "
        "which lie within those that are judged.",
    )


def holds(free: Run, gated: Run) -> dict[str, bool]:
    names = [task.name for task in SET]
    spans = len(gated.trace.spans)
    return {
        "gated, all three are admitted as hard": set(gated.outcomes(*names)) <= {"placed", "started"},
        "a fourth one is refused": gated.outcomes("one-more") == ["rejected"],
        "one without `gate: true` is refused": gated.outcomes("without-gate") == ["rejected"],
        "not gated, none would be as hard": free.outcomes("one-more") == ["rejected"],
        "without the gate deadlines are missed": free.judged.missed > 0,
        "with it none is, but for those of the host": not gated.trace.unexplained(),
        "never two at once": gated.trace.overlaps() == 0,
        "every task was judged": gated.judged.met + gated.judged.missed
        == spans + len(SET),  # each begins with one by itself
    }


async def measure(tasks: int) -> tuple[Run, Run]:
    each = max(1, tasks // len(SET))
    with tempfile.TemporaryDirectory() as free, tempfile.TemporaryDirectory() as gated:
        return await run(Path(free), max(1, each // 10), gated=False), await run(Path(gated), each, gated=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=10_002, help="in all, with the gate; a tenth without it")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    free, gated = asyncio.run(measure(args.tasks))
    report(free, gated, load)


if __name__ == "__main__":
    main()
