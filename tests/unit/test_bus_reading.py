"""What the server sends is taken apart alike wherever it is cut; what no server sends is an error."""

from __future__ import annotations

import pytest

from shared.bus.msg import Msg
from shared.bus.reading import Reader

SAID = [
    b"PING\r\n",
    b"MSG rt.place 12 5\r\nhello\r\n",
    b"MSG rt.place 12 _INBOX.a.1 12\r\nMSG x 1 1\r\n\r\r\n",
    b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
    b"HMSG s.\xff 3 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
    b"HMSG s 3 back 29 29\r\nNATS/1.0 503\r\nname: value\r\n\r\n\r\n",
    b"MSG empty 7 0\r\n\r\n",
    b"PONG\r\n",
]
FOUND = [
    b"PING\r\n",
    (12, Msg("rt.place", b"hello")),
    (12, Msg("rt.place", b"MSG x 1 1\r\n\r", "_INBOX.a.1")),
    b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n",
    (3, Msg("s.\ufffd", b"hi", "", {})),
    (3, Msg("s", b"", "back", {"Status": "503", "name": "value"})),
    (7, Msg("empty", b"")),
    b"PONG\r\n",
]


def plain(found: list[tuple[int, Msg] | bytes]) -> list[tuple[int, Msg] | bytes]:
    return [
        each if isinstance(each, bytes) else (each[0], each[1]._replace(headers=dict(each[1].headers)))
        for each in found
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 11, 50, 1000])
def test_it_is_the_same_wherever_it_is_cut(size: int) -> None:
    whole, reader = b"".join(SAID), Reader()
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert FOUND == plain([each for piece in pieces for each in reader.take(piece)])


def test_nothing_is_said_of_what_is_not_whole() -> None:
    reader = Reader()
    assert [] == reader.take(b"MSG s 1 3\r\nab")
    assert [] == reader.take(b"c\r")
    assert [(1, Msg("s", b"abc"))] == reader.take(b"\n")


@pytest.mark.parametrize("line", [b"\r\n", b"MSG\r\n", b"MSG s one 3\r\nabc\r\n", b"MSG s 1 x\r\n"])
def test_what_no_server_sends_is_an_error(line: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        Reader().take(line)
