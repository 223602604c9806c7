"""The story of a Kubernetes pod by its name: what a kube-bridge or else the ledger knows of it, and of its request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from cli.client import ANSWER_US, Client
from cli.output import CommandError, Exit
from shared.messages import PodFound, PodsQuery, PodsReply, RequestRecord
from shared.subjects import LEDGER

Story = Callable[[Client, str], Awaitable[list[str]]]
_KINDS = {"pod", "pods", "po"}


def named(what: str, namespace: str | None) -> PodsQuery | None:
    """``pod/NAME`` or ``pod/NAMESPACE/NAME``; None where something else is asked for."""
    kind, *names = what.split("/")
    if kind not in _KINDS or not 0 < len(names) < 3:
        if namespace is not None:
            raise CommandError(f"--namespace: found {what}, allowed: with pod/NAME", Exit.USAGE)
        return None
    if len(names) == 2 and namespace not in {None, names[0]}:
        raise CommandError(f"--namespace: found {namespace}, allowed: {names[0]}, as in {what}", Exit.USAGE)
    return PodsQuery(name=names[-1], namespace=names[0] if len(names) == 2 else namespace)


async def story(client: Client, query: PodsQuery, of_request: Story) -> list[str]:
    """Of each pod of that name; of one that no bridge knows what the ledger has. Empty where nobody knows it."""
    answer = await client.request(client.subjects.pods, query.to_json(), ANSWER_US)
    reply = PodsReply.trusted(answer.body) if answer is not None else None
    lines: list[str] = []
    for pod in reply.pods if reply else ():
        lines += _pod(pod)
        lines += await _request(client, pod, of_request)
    return lines or await _of_ledger(client, query, of_request, _unheard(reply))


def _unheard(reply: PodsReply | None) -> str:
    if reply is None:
        return "no kube-bridge answers"
    if reply.not_loaded:
        return f"the kube-bridge has not loaded {', '.join(reply.not_loaded)}"
    return "Kubernetes has no such pod any more"


def _pod(pod: PodFound) -> Iterator[str]:
    devices = pod.devices if pod.devices not in {None, "", "void"} else "no device"
    where = f"bound to {pod.node} ({devices})" if pod.node else "not bound"
    yield f"pod {pod.namespace}/{pod.name}, uid {pod.uid}: {where}{', has ended' if pod.ended else ''}"
    if pod.message is not None:
        yield f"  laxity.dev/Placed is {pod.status}, {pod.reason}: {pod.message}"
    if pod.unscheduled and not pod.node:
        yield f"  its scheduler says: {pod.unscheduled}"
    if not (pod.node or pod.message or pod.unscheduled or pod.ended):
        yield "  nobody has said anything of it yet: is there a scheduler of the name that it gives?"


async def _request(client: Client, pod: PodFound, of_request: Story) -> list[str]:
    if pod.request_id is None:
        return ["  it asks for nothing of Laxity's, or another scheduler is responsible for it"]
    told = await of_request(client, pod.request_id)
    return told or [f"  the ledger has nothing of its request {pod.request_id}: nothing is held for it"]


async def _of_ledger(client: Client, query: PodsQuery, of_request: Story, why: str) -> list[str]:
    """The last one of that name in each namespace: a StatefulSet's pods have had many."""
    found = dict(sorted(await _named_in_ledger(client, query), key=lambda each: _at_us(each[1])))
    lines: list[str] = []
    for namespace, record in sorted(found.items()):
        lines.append(f"pod {namespace}/{query.name}: {why}; from the ledger alone:")
        lines += await of_request(client, record.request_id)
    return lines


async def _named_in_ledger(client: Client, query: PodsQuery) -> list[tuple[str, RequestRecord]]:
    every = (await client.read_bucket(LEDGER)).items()
    records = [RequestRecord.trusted(value) for key, (value, _) in every if key.startswith("request.")]
    return [
        (pod.namespace, record)
        for record in records
        for pod in (record.body.pods if record.body else None) or ()
        if pod.name == query.name and query.namespace in {None, pod.namespace}
    ]


def _at_us(record: RequestRecord) -> int:
    return record.steps[-1].at_us if record.steps else 0
