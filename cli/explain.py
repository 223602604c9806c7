"""``laxity explain``: the story of a request, a node or a device, in words and numbers, from what the bus keeps."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from fractions import Fraction

from cli import client as clients
from cli import events, learned
from cli import explain_pod as pods
from cli.client import Client
from cli.output import CommandError, Exit, Output, clock_time
from services.placer.core.records import nodes_of, said
from shared.admission import Learned
from shared.bus import StoredMsg
from shared.messages import (
    PULLING,
    SHARE_WHOLE_MICRO,
    ContainerRecord,
    DeviceFacts,
    NodeDeadlines,
    NodeFacts,
    NodeReservations,
    NodeState,
    PlaceEvent,
    RequestRecord,
    Reservation,
)
from shared.subjects import DEADLINES, EVENTS_STREAM, LEDGER, NODES, node_key, request_key
from shared.units import format_mib, format_ratio, format_us

HELP = "tell the story of a request, of a node, of a device (NODE/UUID or NODE/INDEX), or of a Kubernetes pod"
_AWAY = frozenset({NodeState.UNREACHABLE, NodeState.LOST})
MISSES = 5
"""Of a container's misses, how many of the last are told one by one."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", metavar="REQUEST|NODE[/DEVICE]|pod/[NAMESPACE/]NAME")
    parser.add_argument("-n", "--namespace", help="of a pod (all of them)")


def run(args: Namespace, output: Output) -> Exit:
    lines = asyncio.run(_explain(args))
    output.result(
        {"about": args.what, "story": lines},
        lambda console: console.print("\n".join(lines), soft_wrap=True, markup=False),
    )
    return Exit.OK


async def _explain(args: Namespace) -> list[str]:
    async with clients.of(args) as client:
        pod = pods.named(args.what, args.namespace)
        told = await pods.story(client, pod, story) if pod is not None else []
        told = told or await story(client, args.what)
    if not told:
        raise CommandError(f"{args.what}: no request, node, device or pod of that name is known", Exit.REFUSED)
    return told


async def story(client: Client, what: str) -> list[str]:
    """Empty where nothing of that name is known."""
    record = await client.read_key(LEDGER, request_key(what), RequestRecord)
    told = await client.read_stream(EVENTS_STREAM, client.subjects.place_event(what))
    if record or told:
        return [line async for line in _request(client, what, record, told)]
    node, _, device = what.partition("/")
    facts = await client.read_key(NODES, node_key(node), NodeFacts)
    return [line async for line in _node(client, facts, device)] if facts else []


# --- a request ---


async def _request(
    client: Client, request_id: str, record: RequestRecord | None, told: list[StoredMsg]
) -> AsyncIterator[str]:
    yield _head(request_id, record)
    for line in _wanted(record):
        yield line
    for line in await _elsewhere(client, record):
        yield line
    for event in once_each(told):
        for line in _step(event):
            yield line
    for found in await _containers(client, request_id):
        yield _kept(found)
    for line in await _misses(client, request_id):
        yield line


def once_each(told: list[StoredMsg]) -> Iterator[PlaceEvent]:
    """Each event once, and of a pull the last one: how far it came."""
    events = list({message.headers.get("ce-id", ""): PlaceEvent.trusted(message.body) for message in told}.values())
    for event, after in zip(events, [*events[1:], None], strict=True):
        if after is None or (event.state, after.state) != (PULLING, PULLING):
            yield event


def _head(request_id: str, record: RequestRecord | None) -> str:
    if record is None:
        return f"{request_id}: the ledger has no key of it (final ones are kept for a day); the events say:"
    where = ", ".join(sorted({each.node for each in record.replicas if each.node}))
    final = ", which is final" if record.final else f", carried on by {record.owner}"
    return f"{request_id} is {record.state}{f' on {where}' if where else ''}{final}"


def _wanted(record: RequestRecord | None) -> Iterator[str]:
    if record is None or record.body is None:
        return
    body = record.body
    gpu = (
        f"{body.gpu.count} device(s), share {body.gpu.share:g}, {format_mib(body.gpu.memory_mib)} each"
        if body.gpu
        else "no device"
    )
    yield f"  wants {body.replicas} x ({gpu}, {body.cpu_milli} milli CPU, {format_mib(body.memory_mib)})"
    if record.size is not None:
        yield f"  resized since: {said(record.size)}"
    if (timing := body.realtime) is not None:
        period = format_us(timing.period_us or timing.deadline_us)
        yield (
            f"  {timing.kind} deadline {format_us(timing.deadline_us)}, runtime {format_us(timing.runtime_us)} every"
            f" {period}, guarantee {format_ratio(timing.guarantee)}"
        )
    if record.measured is not None:
        yield f"  {record.measured}"
    if record.unproven:
        yield "  the deadline is admitted on what it declares, not yet on what was measured"


async def _elsewhere(client: Client, record: RequestRecord | None) -> list[str]:
    """What is not where it should be: on nodes that do not answer, and at second places."""
    if record is None:
        return []
    away = {}
    for node in nodes_of(record):
        facts = await client.read_key(NODES, node_key(node), NodeFacts)
        if facts is not None and facts.state in _AWAY:
            away[node] = f", which is {facts.state}"
    return [
        f"  replica {each.replica}, generation {site.generation}, {says} on {site.node}{away.get(site.node, '')}"
        for each in record.replicas
        for site, says in ((each, "is"), (each.to, "is being started"), (each.leaving, "may still run"))
        if site is not None and site.node is not None and (site is not each or site.node in away)
    ]


def _step(event: PlaceEvent) -> Iterator[str]:
    where = ", ".join(f"{p.node} ({', '.join(p.devices) or 'no device'})" for p in event.placements)
    detail = f": {event.detail}" if event.detail else ""
    code = f", exit code {event.exit_code}" if event.exit_code is not None else ""
    code += f", {event.end_reason}" if event.end_reason else ""
    on = f" on {where}" if where else ""
    yield f"  {clock_time(event.at_us)} {event.state}, generation {event.generation}{on}{code}{detail}"
    yield from (f"    {reason.count} x {reason.code}: {reason.message}" for reason in event.reasons)
    yield from (f"    would fit if {change}" for change in event.would_fit_if)


async def _containers(client: Client, request_id: str) -> list[ContainerRecord]:
    found = await client.read_bucket(DEADLINES)
    every = [NodeDeadlines.trusted(value) for key, (value, _) in found.items() if key.startswith("node.")]
    return [record for node in every for record in node.containers if record.request_id == request_id]


def _kept(record: ContainerRecord) -> str:
    judged = record.window_met + record.window_missed
    bounds = f"{format_ratio(record.lower)} to {format_ratio(record.upper)}" if judged else "unknown"
    return (
        f"  replica {record.replica}, generation {record.generation}: {record.met} met, {record.missed} missed,"
        f" {record.lost} lost, {record.aborted} aborted, {record.open} open; of the last {judged}"
        f" {format_ratio(record.ratio)} met (95 % confidence: {bounds}), guarantee {format_ratio(record.guarantee)}:"
        f" {record.standing}"
    )


async def _misses(client: Client, request_id: str) -> list[str]:
    pattern = f"{client.subjects.prefix}.events.deadline.>"
    found = [json.loads(message.body) for message in await client.read_stream(EVENTS_STREAM, pattern)]
    ours = [body for body in found if body.get("request_id") == request_id]
    misses = [body for body in ours if body["kind"] == "missed"][-MISSES:]
    crossed = [body for body in ours if body["kind"] not in ("missed", "noisy")]
    noisy = [body for body in ours if body["kind"] == "noisy"][-MISSES:]
    told = sorted([*misses, *crossed, *noisy], key=lambda body: int(body["at_us"]))
    return [f"  {events.line(pattern, body).plain}" for body in told]


# --- a node, a device ---


async def _node(client: Client, facts: NodeFacts, device: str) -> AsyncIterator[str]:
    why = f": {facts.reason}" if facts.reason else ""
    yield f"{facts.node} is {facts.state}{why} (as of {clock_time(facts.at_us)})"
    ledger = await client.read_key(LEDGER, node_key(facts.node), NodeReservations)
    held = ledger.reservations if ledger else ()
    if facts.closed:
        yield f"  Kubernetes lets nothing new onto it: {facts.closed}"
    for line in _whole(facts, held) if not device else ():
        yield line
    known = await learned.all_learned(client)
    for each in facts.devices:
        if device in {"", each.uuid, str(each.index)}:
            there = [r for r in held if each.uuid in r.devices]
            for line in (*_device(each, there), *_measured(known, each, there)):
                yield line
    for message in (await client.read_stream(EVENTS_STREAM, client.subjects.node_event(facts.node)))[-10:]:
        yield f"  {events.line(message.subject, json.loads(message.body)).plain}"


def _whole(facts: NodeFacts, held: Sequence[Reservation]) -> Iterator[str]:
    cpu, foreign = sum(r.cpu_milli for r in held), facts.foreign_cpu_milli
    yield f"  {facts.cpu_milli} milli CPU: {cpu} reserved, {'unknown' if foreign is None else foreign} foreign"
    memory, foreign_mib = format_mib(sum(r.memory_mib for r in held)), format_mib(facts.foreign_memory_mib)
    yield f"  {format_mib(facts.memory_mib)}: {memory} reserved, {foreign_mib} foreign"


def _device(device: DeviceFacts, held: list[Reservation]) -> Iterator[str]:
    health = "healthy" if device.healthy else f"not healthy: {device.reason}"
    sliced = f", slice {format_us(device.slice_us)}, switch {format_us(device.switch_us)}" if device.slice_us else ""
    yield f"  {device.index} {device.uuid} ({device.model}, {device.regime}{sliced}): {health}"
    if device.holder:
        yield f"    given by others to {device.holder}"
    share, memory = sum(r.share_micro for r in held), sum(r.device_memory_mib for r in held)
    yield f"    {_share(share)} of it and {format_mib(memory)} of {format_mib(device.memory_mib)} reserved"
    for each in held:
        kind = f", {each.kind}" if each.kind else ""
        which = f"{each.request_id}/{each.replica}, generation {each.generation}"
        yield f"    holds {which}: {_share(each.share_micro)}{kind}"
    for name, judged in device.classes.items():
        slack = "no slack known" if judged.slack_us is None else f"slack {format_us(judged.slack_us)}"
        yield f"    class {name}: {judged.standing}, {slack}{f': {judged.reason}' if judged.reason else ''}"


def _measured(known: Learned, device: DeviceFacts, held: list[Reservation]) -> Iterator[str]:
    yield from (f"    measured: {line}" for line in learned.numbers(known, device, held))


def _share(micro: int) -> str:
    return format_ratio(Fraction(micro, SHARE_WHOLE_MICRO))
