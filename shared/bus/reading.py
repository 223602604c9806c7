"""Taking apart what the server sends: whole messages, and the control lines between them; nothing is done about them.

The client's own parser tries its patterns on all that is left, for each message anew, and waits for each to be handled.
"""

from __future__ import annotations

from shared.bus.msg import NO_HEADERS, Headers, Msg

_END = b"\r\n"
_WITHOUT_REPLY = 4
"""Words of a message's line: its kind, subject, subscription and size."""


class Reader:
    """Bytes in, as they come. Out comes what is whole by then: a message with the number of its subscription, or a
    control line (``PING``, ``INFO …``) as it is.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._needed = 0

    def take(self, data: bytes) -> list[tuple[int, Msg] | bytes]:
        """Raises ValueError, IndexError for what no server sends."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data, self._rest = bytes(self._rest), bytearray()
        found: list[tuple[int, Msg] | bytes] = []
        at, size, stop = 0, len(data), 0
        while at < size:
            end = data.find(_END, at)
            if end < 0:
                stop = size + 1
                break
            words, body = data[at:end].split(), end + 2
            kind = words[0]
            if kind not in {b"MSG", b"HMSG"}:
                found.append(data[at:body])
                at = body
                continue
            stop = body + int(words[-1]) + 2
            if stop > size:
                break
            headers = NO_HEADERS
            if kind == b"HMSG":
                begin, body = body, body + int(words.pop(-2))
                headers = Headers(data[begin:body])
            subject, reply = words[1], words[3] if len(words) > _WITHOUT_REPLY else b""
            found.append((int(words[2]), Msg(_text(subject), data[body : stop - 2], _text(reply), headers)))
            at = stop
        if at < size:
            self._rest, self._needed = bytearray(data[at:]), stop - at
        return found


def _text(word: bytes) -> str:
    """Anybody may publish on a subject that is no UTF-8."""
    return word.decode("utf-8", "replace")
