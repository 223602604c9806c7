"""The exceptions that cross module borders; expected outcomes are values and live with the code that returns them.

LaxityError
├── FieldError          a field of a message, a setting or a file is wrong: field, found, allowed
├── BusError            the bus could not do what was asked
│   ├── NoStreamError        a stream that should exist does not
│   ├── OutcomeUnknownError  a write timed out: it may or may not have happened; read to learn
│   ├── TooLargeError        a body is over a limit
│   └── RefusedError         our user may not say this
├── KubernetesError     an API server refused, or did not answer
│   └── NotToThePointError   something answered, and not as an API server does
└── BackendError        a backend could not start, stop, resize or list containers
    └── BackendSilentError   it did not answer: what it was asked may still happen
"""

from __future__ import annotations


class LaxityError(Exception):
    """Base of all typed errors."""


class FieldError(LaxityError, ValueError):
    """A field is wrong. The three parts are what a person needs to mend it."""

    def __init__(self, field: str, found: object, allowed: str) -> None:
        self.field = field
        self.found = clip(found)
        self.allowed = allowed
        super().__init__(f"{field}: found {self.found}, allowed: {allowed}")


class BusError(LaxityError):
    """The bus could not do what was asked."""


class NoStreamError(BusError):
    """A stream that should exist does not."""


class OutcomeUnknownError(BusError):
    """A write timed out: it may or may not have happened."""


class TooLargeError(BusError):
    """A body is over a limit."""


class RefusedError(BusError):
    """Our user may not publish on this subject; the server said so, and nothing was done."""


class KubernetesError(LaxityError):
    """An API server refused, in its own words, or did not answer: then ``status``, that of HTTP, is None."""

    def __init__(self, words: str, status: int | None = None, retry_after_us: int = 0) -> None:
        self.status, self.retry_after_us = status, retry_after_us
        super().__init__(clip(words if status is None else f"{status}: {words}", 500))

    @property
    def unclear(self) -> bool:
        """What was asked may have happened: also of 5xx nobody can say, which a proxy or a slow store brings."""
        return self.status is None or self.status >= 500


class NotToThePointError(KubernetesError):
    """Something answered, and not as an API server does: a proxy's page, half a line. Its status says nothing sure."""

    @property
    def unclear(self) -> bool:
        return True


class BackendError(LaxityError):
    """A backend could not start, stop, resize or list containers; the text is shown to the requester as the reason."""


class BackendSilentError(BackendError):
    """It did not answer: what it was asked may have happened, or happen yet."""


def clip(found: object, limit: int = 200) -> str:
    """What was found, as text that fits a reply and a log line, with control characters made visible."""
    text = found if isinstance(found, str) else repr(found)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[:limit]}…"
