"""What happens in the demo, in its order: who asks for what, who is disturbed, who leaves; nothing is judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cli import request_file
from cli.client import Client
from cli.demo.recorder import Recorder
from cli.embedded import dies_with
from cli.output import CommandError
from cli.place import ask, decide, reply_in
from cli.release import ask as release
from shared.bus import Msg
from shared.deadlines import Standing
from shared.devices import core_of
from shared.messages import DeviceStanding, ListedDevice, NodesQuery, NodesReply, PlaceReply, PlaceRequest

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "examples"
VICTIM: Final = "detector"
QUIET: Final = ("captioner", "embedder")
ORDER: Final = (
    *(VICTIM, *QUIET, "report", "guarded", "crowd", "gang", "trainer", "evaluator"),
    *("impossible", "hard-on-core", "too-big"),
)
MALFORMED: Final = {"request_id": "malformed", "command": ["true"], "gpu": {"count": 1, "share": 1.5}}
DECISION_US: Final = 10_000_000
JUDGED: Final = 40
"""Tasks of each container that are to be judged before anyone is disturbed."""
NOISE_STEPS: Final = (12, 12, 12)
"""How many busy neighbours come at once, and how many more where these do not disturb enough."""
NOISE_STEP_S: Final = 5.0
CALM_S: Final = 60.0
"""How long a busy machine may take to come to rest; a quiet one is through in a few seconds."""
DISTURBED_S: Final = 120.0
"""How long those who disturb the demo may take."""
LISTED_US: Final = 5_000_000
"""How long the list may take to show what rt_nodes shows: it is asked for, and its service may be starting."""
_BAD: Final = frozenset({DeviceStanding.AT_RISK, DeviceStanding.EXCLUDED})
Say = Callable[[str], None]


@dataclass
class Played:
    """What the client side saw; the rest is in the recorder."""

    replies: dict[str, PlaceReply] = field(default_factory=dict)
    before: list[ListedDevice] = field(default_factory=list)
    """The node list before the noise, best first."""
    after: list[ListedDevice] = field(default_factory=list)
    neighbours: int = 0

    @property
    def device(self) -> str:
        """Of the container that is to be disturbed; "" where it has none."""
        reply = self.replies.get(VICTIM)
        return reply.placements[0].devices[0] if reply and reply.placements and reply.placements[0].devices else ""


def position(listed: list[ListedDevice], device: str) -> tuple[int, DeviceStanding] | None:
    """Place from 1 and standing."""
    return next(((place, each.standing) for place, each in enumerate(listed, 1) if each.uuid == device), None)


async def play(client: Client, recorder: Recorder, say: Say, go_on: Path | None = None) -> Played:
    """All acts; the last one waits for the file ``go_on``. What goes wrong in one is for the judging to find."""
    played = Played()
    say("twelve requests, one of them a second time, and a malformed one")
    await _ask_for_all(client, played, say)
    say("one that waits moves when another leaves")
    await _queue_moves(client, recorder, played)
    say(f"tasks run and are judged: {JUDGED} of each container")
    await recorder.until(lambda: _calm(recorder), CALM_S)
    played.before = await _listed_as(client, played.device, frozenset(DeviceStanding) - _BAD)
    say(f"a noisy neighbour that declared nothing, on the core of {VICTIM}")
    await _disturb(client, recorder, played)
    if go_on is not None:
        say("those who disturb the demo are waited for")
        await recorder.until(go_on.exists, DISTURBED_S)
    say("everybody leaves")
    await _leave(client, recorder, played)
    return played


def _calm(recorder: Recorder) -> bool:
    """Everybody has been judged often enough, and a bad start, should there have been one, is made up for."""
    names = (VICTIM, *QUIET)
    enough = all(recorder.judged(name) >= JUDGED for name in names)
    return enough and all(recorder.records[name].standing != Standing.AT_RISK for name in names)


async def listed(client: Client) -> list[ListedDevice]:
    """The node list of the first deadline class; empty where nobody answers."""
    with contextlib.suppress(CommandError):
        return list((await client.ask(client.subjects.nodes, NodesQuery(), NodesReply)).devices)
    return []


async def _listed_as(client: Client, device: str, standings: frozenset[DeviceStanding]) -> list[ListedDevice]:
    """The list once the device has one of the standings in it, or as it is when the time is over."""
    until_us, devices = client.clock.now_us() + LISTED_US, list[ListedDevice]()
    while client.clock.now_us() < until_us:
        devices = await listed(client)
        where = position(devices, device)
        if where is not None and where[1] in standings:
            break
        await asyncio.sleep(0.1)
    return devices


# --- asking ---


async def _ask_for_all(client: Client, played: Played, say: Say) -> None:
    wall_us = client.clock.wall_us()
    requests = {name: request_file.read(EXAMPLES / f"{name}.yaml", wall_us) for name in ORDER}
    for name in ORDER:
        await _ask_for(client, played, name, requests[name], say)
    await _ask_for(client, played, "duplicate", requests[VICTIM], say)
    answer = await client.request(client.subjects.place, json.dumps(MALFORMED).encode(), DECISION_US)
    if isinstance(answer, Msg):
        played.replies["malformed"] = reply_in(answer, "malformed")
        say(f"  malformed: {_short(played.replies['malformed'])}")


async def _ask_for(client: Client, played: Played, name: str, request: PlaceRequest, say: Say) -> None:
    """The first answer, repeated with the same id where none came: also while a placer was killed."""
    until_us = client.clock.now_us() + DECISION_US
    reply = await decide(client, request, 0, say)
    while reply is None and client.clock.now_us() < until_us:
        reply = await ask(client, request)
    if reply is not None:
        played.replies[name] = reply
        say(f"  {name}: {_short(reply)}")


def _short(reply: PlaceReply) -> str:
    where = ", ".join(each.node for each in reply.placements)
    why = reply.reasons[0].message if reply.reasons else ""
    why = f"{reply.error.field} found {reply.error.found}" if reply.error else why
    marked = f"{reply.outcome}{' (duplicate)' if reply.duplicate else ''}"
    return marked + (f" on {where}" if where else "") + (f": {why}" if why else "")


async def _queue_moves(client: Client, recorder: Recorder, played: Played) -> None:
    await recorder.until(lambda: "started" in recorder.states("trainer"), 10)
    await _release(client, played, "trainer")
    await recorder.until(lambda: "started" in recorder.states("evaluator"), 10)


async def _release(client: Client, played: Played, name: str) -> None:
    with contextlib.suppress(CommandError):
        played.replies[f"release {name}"] = await release(client, name)


# --- disturbing ---


async def _disturb(client: Client, recorder: Recorder, played: Played) -> None:
    """More neighbours step by step until the container is at risk and its device has sunk."""
    core = core_of(played.device)
    if core is None:
        return
    with contextlib.ExitStack() as stack:
        for count in NOISE_STEPS:
            for _ in range(count):
                stack.enter_context(_noise(core))
            played.neighbours += count
            if await recorder.until(lambda: _sank(recorder, played.device), NOISE_STEP_S):
                break
        played.after = await _listed_as(client, played.device, frozenset({DeviceStanding.AT_RISK}))


def _sank(recorder: Recorder, uuid: str) -> bool:
    warned = any(each.event.kind == "at_risk" and each.event.request_id == VICTIM for each in recorder.warnings)
    devices = [device for facts in recorder.facts.values() for device in facts.devices if device.uuid == uuid]
    standings = [judged.standing for device in devices for judged in device.classes.values()]
    return warned and bool(standings) and all(each == DeviceStanding.AT_RISK for each in standings)


@contextlib.contextmanager
def _noise(core: int) -> Iterator[None]:
    """One busy process in a session of its own: the kernel shares a core among sessions, so each counts fully."""
    parent = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(EXAMPLES / "work" / "noise.py"), str(core)],
        start_new_session=True,
        preexec_fn=lambda: dies_with(parent),  # noqa: PLW1509  # this process has one thread
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- leaving ---


async def _leave(client: Client, recorder: Recorder, played: Played) -> None:
    alive = [name for name, record in _records(recorder).items() if not record]
    await asyncio.gather(*(_release(client, played, name) for name in alive))
    await recorder.until(lambda: all(_records(recorder).values()), 10)
    # the last batches: rings are closed once their writers are gone, and the tracker has heard of it
    await recorder.until(lambda: not recorder.events.finish(), 5)


def _records(recorder: Recorder) -> dict[str, bool]:
    """Request id and whether it is final."""
    return {record.request_id: record.final for record in recorder.ledger.records.values()}
