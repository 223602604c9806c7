"""Each HTTP request of an ASGI application as a task, with the deadline that its client asks for."""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import laxity

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NUMBER = re.compile(rb"\d{1,8}(\.\d{1,3})?")


class DeadlineMiddleware:
    """`app = DeadlineMiddleware(app, default_us=50_000)`: a request ends with the last byte of its response.

    The deadline is the header's, in milliseconds from when the request came here, else `default_us`; where there is
    neither, the request is no task. It failed where the application raised, or answered 500 or more. `wrong_headers`
    counts headers that are no such number; their requests have the default. `name` is the task's, or what makes it
    of the scope: 22 bytes are kept, and each name is one more series in what is measured, so no path with an id.
    """

    def __init__(
        self,
        app: App,
        *,
        name: str | Callable[[Scope], str] = "http",
        default_us: int | None = None,
        header: str = "X-Deadline-Ms",
    ) -> None:
        if default_us is not None:
            laxity.task("default", deadline_us=default_us)  # ValueError now rather than at each request
        self.app, self.name, self.default_us = app, name, default_us
        self.header = header.lower().encode("latin-1")
        self.wrong_headers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline_us = self._deadline_us(scope) if scope["type"] == "http" else None
        if deadline_us is None:
            await self.app(scope, receive, send)
            return
        name = self.name if isinstance(self.name, str) else self.name(scope)
        task, status = laxity.begin(name, deadline_us=deadline_us), 500

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                task.end(failed=status >= 500)

        try:
            await self.app(scope, receive, sent)
        finally:
            task.end(failed=True)  # only where it has not ended

    def _deadline_us(self, scope: Scope) -> int | None:
        for name, value in scope["headers"]:
            if name.lower() == self.header:
                deadline_us = round(float(value) * 1_000) if _NUMBER.fullmatch(value) else 0
                if 1 <= deadline_us <= laxity.MAX_DEADLINE_US:
                    return deadline_us
                self.wrong_headers += 1
        return self.default_us
