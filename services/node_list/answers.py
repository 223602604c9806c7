"""Answers to rt.nodes: pages of a list as it is published, filtered; pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from services.node_list.lists import Lists
from services.node_list.nodes import NodeView
from shared.effects import Reply
from shared.errors import FieldError
from shared.lists import Key
from shared.messages import DeviceStanding, ListedDevice, NodesQuery, NodesReply, PlaceReply
from shared.subjects import decode, encode


def answer(query: NodesQuery, reply: str, lists: Lists, nodes: Mapping[str, NodeView], now_us: int) -> Reply:
    """One page of one class's list, the first of the settings where the query names none."""
    wanted = query.deadline_class or next(iter(lists.rankings))
    try:
        devices, after = _page(query, wanted, lists, nodes, now_us)
    except FieldError as fault:
        return Reply(reply, PlaceReply.of_error(fault), (400, str(fault)))
    body = NodesReply(
        revision=lists.revision(wanted),
        deadline_class=wanted,
        devices=tuple(devices),
        after=after,
        start_id=lists.record.start_id if lists.record else None,
        counts=lists.rankings[wanted].counts(),
    )
    return Reply(reply, body)


def _page(
    query: NodesQuery, wanted: str, lists: Lists, nodes: Mapping[str, NodeView], now_us: int
) -> tuple[list[ListedDevice], str | None]:
    if wanted not in lists.rankings:
        raise FieldError("class", wanted, f"one of {', '.join(lists.rankings)}")
    devices: list[ListedDevice] = []
    last: Key | None = None
    for key in lists.rankings[wanted].after(_key(query.after), query.standing or DeviceStanding):
        _, _, node, uuid = key
        if not _asked_for(query, lists, node, uuid):
            continue
        if last is not None and len(devices) == query.limit:
            return devices, _cursor(last)
        devices.append(_listed(wanted, lists, nodes[node], uuid, now_us))
        last = key
    return devices, None


def _asked_for(query: NodesQuery, lists: Lists, node: str, uuid: str) -> bool:
    if not query.models and not query.group:
        return True
    device = lists.devices[node][uuid]
    return (not query.models or device.model in query.models) and (not query.group or device.group == query.group)


def _listed(wanted: str, lists: Lists, view: NodeView, uuid: str, now_us: int) -> ListedDevice:
    standing = lists.devices[view.name][uuid].classes[wanted]
    return ListedDevice(
        node=view.name,
        uuid=uuid,
        standing=standing.standing,
        slack_us=standing.slack_us,
        reason=standing.reason,
        age_us=now_us - view.liveness.seen_us,
        unproven=standing.unproven,
        closed=view.facts.closed if view.facts else None,
    )


def _cursor(key: Key) -> str:
    """A place in the order, not a device: what moves meanwhile makes nothing else be left out."""
    place, slack, node, uuid = key
    return f"{place}.{slack}.{encode(node)}.{encode(uuid)}"


def _key(cursor: str | None) -> Key | None:
    if cursor is None:
        return None
    try:
        place, slack, node, uuid = cursor.split(".")
        return int(place), int(slack), decode(node), decode(uuid)
    except ValueError:
        raise FieldError("after", cursor, "the after of an earlier reply") from None
