"""``laxity events``: what happened, from the stream, and what happens, as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.text import Text

from cli import client as clients
from cli.client import Client
from cli.output import Exit, Output, clock_time
from shared.bus import Msg, StoredMsg
from shared.errors import OutcomeUnknownError
from shared.messages import PULLING
from shared.subjects import EVENTS_STREAM
from shared.units import format_us

HELP = "show what happened, and with --follow what happens"
USUAL = ("events.place.>", "events.deadline.>", "events.node.>", "events.bus.>")
"""Without the batches of tasks, of which each node sends many a second, and the changes of the lists."""
SHOWN_MOVES = 3
LOOK_AGAIN_S = 1.0
"""How often the stream is read while nothing is heard: an event may be heard before it can be read."""
_STYLES = {
    "missed": "red",
    "at_risk": "bold red",
    "noisy": "yellow",
    "failed": "red",
    "rejected": "red",
    "lost": "red",
    "started": "green",
    "ready": "green",
    "recovered": "green",
    PULLING: "dim",
}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "--subject", help="only these, such as rt.events.task.> (all but the batches of tasks)", metavar="PATTERN"
    )
    parser.add_argument("--last", type=int, default=50, help="how many of the past (50; 0: all)")


def run(args: Namespace, output: Output) -> Exit:
    return asyncio.run(_events(args, output))


async def _events(args: Namespace, output: Output) -> Exit:
    async with clients.of(args) as client:
        patterns = [args.subject] if args.subject else [f"{args.prefix}.{subject}" for subject in USUAL]
        past = await history(client, patterns, args.last)
        for message in past:
            show(output, message)
        if not args.follow:
            return Exit.OK
        last_seq = past[-1].seq if past else 0
        await _follow(client, output, patterns, last_seq)
    return Exit.OK


async def history(client: Client, patterns: list[str], last: int, since_seq: int = 1) -> list[StoredMsg]:
    """The last events on some patterns, in the order of the stream; 0 is all."""
    found = [message for one in patterns for message in await client.read_stream(EVENTS_STREAM, one, since_seq)]
    return sorted(found, key=lambda message: message.seq)[-last:]


async def _follow(client: Client, output: Output, patterns: list[str], last_seq: int) -> None:
    """Read on whenever one is heard: what is shown comes from the stream, so a lost link leaves no gap."""
    heard = asyncio.Event()

    async def hear(_: Msg) -> None:
        heard.set()

    for pattern in patterns:
        await client.bus.subscribe(pattern, hear)
    while True:
        heard.clear()
        with contextlib.suppress(OutcomeUnknownError):
            for message in await history(client, patterns, 0, last_seq + 1):
                show(output, message)
                last_seq = message.seq
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S):
                await heard.wait()


def show(output: Output, message: StoredMsg) -> None:
    """One event: a line for people, an object for machines."""
    body: dict[str, Any] = json.loads(message.body)
    headers = {name: message.headers.get(name) for name in ("ce-id", "ce-type", "ce-time")}
    about = {"subject": message.subject, "seq": message.seq, **headers, "body": body}
    output.result(about, lambda console: console.print(line(message.subject, body)))


def line(subject: str, body: dict[str, Any]) -> Text:
    """``14:03:07.123 place detector started, generation 1 on node-1``."""
    kind = subject.split(".")[2] if subject.count(".") >= 2 else subject
    word = next((str(body[name]) for name in ("state", "kind") if isinstance(body.get(name), str)), "")
    text = Text(clock_time(body.get("at_us", 0)), style="dim").append(f" {kind:<8} ", style="not dim")
    say = _SAY.get(kind)
    about, rest = say(body) if say else (json.dumps(body)[:200], "")
    return text.append(f"{about} ", style="not dim bold").append(word, style=_STYLES.get(word, "not dim")).append(rest)


def _place(body: dict[str, Any]) -> tuple[str, str]:
    where = ", ".join(f"{p['node']}" for p in body.get("placements", ()))
    rest = f", generation {body['generation']}" + (f" on {where}" if where else "")
    rest += f", exit code {body['exit_code']}" if body.get("exit_code") is not None else ""
    rest += f", {body['end_reason']}" if body.get("end_reason") else ""
    rest += f": {body['detail']}" if body.get("detail") else ""
    reasons = body.get("reasons", ())
    return body["request_id"], rest + (f": {reasons[0]['message']}" if reasons else "")


def _deadline(body: dict[str, Any]) -> tuple[str, str]:
    counts = f" ({body['met']} met, {body['missed']} missed, guarantee {body['guarantee']:g})"
    if body["kind"] == "noisy":
        return _whose(body), _because(body)
    if body["kind"] != "missed":
        return _whose(body), f": upper bound {body['upper']:.3f}, lower {body['lower']:.3f}{counts}"
    late = "still running" if body["tardiness_us"] is None else f"{body['tardiness_us']} us late"
    return _whose(body), f" task {body['task']} ({body['name']}), {late}{_because(body)}{counts}"


def _because(body: dict[str, Any]) -> str:
    """`; overran: detector-7f3a, 12.3 ms (17.3 ms of 5 ms)`: each cause in the order of what it cost."""
    causes = body.get("because") or ()
    return "".join(f"; {_cause(cause)}" for cause in causes)


def _cause(cause: dict[str, Any]) -> str:
    about = [cause["container"]] if cause.get("container") else []
    about += [format_us(cause["amount_us"])] if cause.get("amount_us") is not None else []
    detail = f" ({cause['detail']})" if cause.get("detail") else ""
    return str(cause["cause"]) + (f": {', '.join(about)}" if about else "") + detail


def _whose(body: dict[str, Any]) -> str:
    return str(body.get("request_id") or body["container"])


def _node(body: dict[str, Any]) -> tuple[str, str]:
    device = f" {body['device']}" if body.get("device") else ""
    return body["node"], device + (f": {body['reason']}" if body.get("reason") else "")


def _bus(body: dict[str, Any]) -> tuple[str, str]:
    return f"{body['service']} {body['instance']}", f": {body['detail']}"


def _task(body: dict[str, Any]) -> tuple[str, str]:
    return body["node"], f"batch {body['counter']}: {len(body['kind'])} records up to {body['watermark_us']} us"


def _list(body: dict[str, Any]) -> tuple[str, str]:
    moved = [f"{c['node']}/{c['uuid']} {c['was'] or 'new'} -> {c['standing'] or 'gone'}" for c in body["changes"]]
    more = f" and {len(moved) - SHOWN_MOVES} more" if len(moved) > SHOWN_MOVES else ""
    return body["class"], f" revision {body['revision']}: {', '.join(moved[:SHOWN_MOVES])}{more}"


_SAY = {"place": _place, "deadline": _deadline, "node": _node, "bus": _bus, "task": _task, "list": _list}
