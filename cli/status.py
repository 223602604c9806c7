"""``laxity status``: who is there, which ledger they share and who leads, what is stored, what is wrong."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from typing import Any

from rich.console import Console
from rich.text import Text

from cli import client as clients
from cli.client import Client
from cli.output import CommandError, Exit, Output, clock_time, table
from shared.messages import Lease, LedgerIdentity, NodeFacts, RequestRecord
from shared.streams import bucket_stream
from shared.subjects import DEADLINES, EVENTS_STREAM, LEARNED, LEDGER, NODES, PLACE_STREAM, lease_key

HELP = "show services, ledger, leader, streams and alarms"
SERVICES = ("placer", "node-list", "deadline-tracker", "monitor")
ALARMS = 20


def arguments(parser: ArgumentParser) -> None:
    del parser


def run(args: Namespace, output: Output) -> Exit:
    found = asyncio.run(_status(args))
    output.result(found, lambda console: show(console, found))
    return Exit.OK if not found["missing"] else Exit.NO_ANSWER


async def _status(args: Namespace) -> dict[str, Any]:
    async with clients.of(args) as client:
        if await client.stream_info(EVENTS_STREAM) is None and not await client.services():
            raise CommandError(f"nothing of laxity at {client.url}", Exit.NO_ANSWER)
        services = await client.services(verb="STATS")
        ledger = await client.read_bucket(LEDGER)
        return {
            "nats_url": client.url,
            "services": [_service(stats) for stats in sorted(services, key=lambda s: (s["name"], s["id"]))],
            "missing": sorted(set(SERVICES) - {stats["name"] for stats in services}),
            "ledger": _ledger(ledger),
            "nodes": await _nodes(client),
            "streams": await _streams(client),
            "alarms": await alarms(client),
        }


def _service(stats: dict[str, Any]) -> dict[str, Any]:
    endpoints = stats.get("endpoints", [])
    return {
        "name": stats["name"],
        "instance": stats["metadata"].get("instance"),
        "pid": int(stats["metadata"].get("pid", 0)) or None,
        "started": stats.get("started"),
        "requests": sum(endpoint["num_requests"] for endpoint in endpoints),
        "errors": sum(endpoint["num_errors"] for endpoint in endpoints),
        **stats.get("data", {}),
    }


def _ledger(found: dict[str, tuple[bytes, int]]) -> dict[str, Any]:
    identity = LedgerIdentity.trusted(found["ledger"][0]) if "ledger" in found else None
    leader = Lease.trusted(found[lease_key("leader")][0]) if lease_key("leader") in found else None
    records = [RequestRecord.trusted(value) for key, (value, _) in found.items() if key.startswith("request.")]
    return {
        "id": identity.ledger_id if identity else None,
        "former": list(identity.former) if identity else [],
        "leader": leader.holder if leader else None,
        "requests": dict(Counter(str(record.state) for record in records)),
    }


async def _nodes(client: Client) -> dict[str, int]:
    found = await client.read_bucket(NODES)
    facts = [NodeFacts.trusted(value) for key, (value, _) in found.items() if key.startswith("node.")]
    return dict(Counter(str(each.state) for each in facts))


async def _streams(client: Client) -> list[dict[str, Any]]:
    buckets = [bucket_stream(name, client.subjects.prefix) for name in (LEDGER, NODES, DEADLINES, LEARNED)]
    made = []
    for name in (EVENTS_STREAM, PLACE_STREAM, *buckets):
        info = await client.stream_info(name)
        state = info["state"] if info else {}
        said = {"messages": state.get("messages"), "bytes": state.get("bytes"), "last_seq": state.get("last_seq")}
        made.append({"name": name, "exists": info is not None, **said})
    return made


async def alarms(client: Client) -> list[dict[str, Any]]:
    """What services said about the bus and the ledger lately, newest last."""
    found = await client.read_stream(EVENTS_STREAM, f"{client.subjects.prefix}.events.bus.>")
    return [json.loads(message.body) for message in found[-ALARMS:]]


# --- for people ---


def show(console: Console, found: dict[str, Any]) -> None:
    console.print(f"server {found['nats_url']}")
    columns = ("service", "instance", "pid", "state", "health", "requests", "errors", "inbox", "outbox")
    console.print(table("services", columns, ([_cell(each, name) for name in _FIELDS] for each in found["services"])))
    for name in found["missing"]:
        console.print(Text(f"no {name} answers", style="red"))
    ledger = found["ledger"]
    former = f", former ids {', '.join(ledger['former'])}" if ledger["former"] else ""
    console.print(f"ledger {ledger['id'] or 'none yet'}{former}, leader {ledger['leader'] or 'none'}")
    console.print(f"requests: {_counts(ledger['requests'])}; nodes: {_counts(found['nodes'])}")
    rows = ([each[name] for name in ("name", "messages", "bytes", "last_seq")] for each in found["streams"])
    console.print(table("streams", ("stream", "messages", "bytes", "last"), rows))
    lines = ((clock_time(a["at_us"]), a["service"], a["kind"], a["detail"]) for a in found["alarms"])
    if found["alarms"]:
        console.print(table("alarms", ("at", "service", "kind", "detail"), lines))
    else:
        console.print("no alarms")


_FIELDS = ("name", "instance", "pid", "state", "health", "requests", "errors", "inbox", "outbox")


def _cell(each: dict[str, Any], name: str) -> object:
    value = each.get(name)
    good = {"health": "ok", "state": "ready"}
    return Text(str(value), style="green" if value == good[name] else "red") if name in good else value


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
