"""Headers are read from what came, as the client would, and only when somebody asks."""

from __future__ import annotations

import pytest

from shared.bus import event_headers
from shared.bus.msg import Headers, Msg, written


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"NATS/1.0\r\nce-id: n1/s/1\r\nNats-Msg-Id:n1/s/1\r\n\r\n", {"ce-id": "n1/s/1", "Nats-Msg-Id": "n1/s/1"}),
        (b"NATS/1.0\r\nce-time: 2026-11-30T12:00:00Z\r\n\r\n", {"ce-time": "2026-11-30T12:00:00Z"}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\nNats-Last-Stream: 9\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": "7", "Nats-Last-Stream": "9"},
        ),
        (b"NATS/1.0\r\nno colon\r\nname: \xff\r\n\r\n", {"name": "\ufffd"}),
        (b"NATS/1.0\r\n\r\n", {}),
    ],
)
def test_names_values_and_the_inline_status_are_found(raw: bytes, found: dict[str, str]) -> None:
    assert found == dict(Headers(raw))


def test_only_what_has_no_body_has_a_status() -> None:
    headers = Headers(b"NATS/1.0 409 Leadership Change\r\n\r\n")
    assert ("409", "") == (Msg("s", b"", "", headers).status, Msg("s", b"body", "", headers).status)
    assert ("Leadership Change", "") == (Msg("s", b"", "", headers).description, Msg("s", b"").status)


def test_headers_are_written_as_they_are_read() -> None:
    headers = {"Nats-Msg-Id": "ledger/ä b/1", "ce-specversion": "1.0"}
    block = written(headers)
    assert block is not None
    assert headers == dict(Headers(block))


def test_an_event_has_its_id_in_one_line() -> None:
    headers = event_headers("l/a\r\nce-id: b/1", "laxity.place.placed", "/rt/placer/p", 1_000_001, 7)
    assert {
        "Nats-Msg-Id": "l/a  ce-id: b/1",
        "ce-id": "l/a  ce-id: b/1",
        "ce-type": "laxity.place.placed",
        "ce-source": "/rt/placer/p",
        "ce-time": "1970-01-01T00:00:01.000001Z",
        "ce-specversion": "1.0",
        "Nats-Expected-Last-Subject-Sequence": "7",
    } == dict(headers)
    assert headers.raw == written(headers)


@pytest.mark.parametrize("headers", [None, {}])
def test_where_there_are_none_nothing_is_written(headers: dict[str, str] | None) -> None:
    assert b"" == written(headers)


@pytest.mark.parametrize("headers", [{"a": "b\r\nc: d"}, {"a": "b\n"}, {"a": "\r"}, {"a: b\r\nc": "d"}, {"": "b"}])
def test_what_would_be_other_headers_is_left_to_the_client(headers: dict[str, str]) -> None:
    assert written(headers) is None
