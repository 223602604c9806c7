"""Each call of a gRPC server as a task with the deadline of its caller; needs grpcio, which only this file imports.

grpc.server(pool, interceptors=[laxity.grpc.Deadlines(default_us=50_000)])
grpc.aio.server(interceptors=[laxity.grpc.AsyncDeadlines(default_us=50_000)])
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

import laxity

_SIDES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class _Marks:
    """A call is named by its method, begins when its handler does and ends with its last message.

    Its deadline is what its caller leaves of its own, else `default_us`; where there is neither, or none is left, it is
    no task. It failed where the handler raised or aborted.
    """

    def __init__(self, *, default_us: int | None = None) -> None:
        if default_us is not None:
            laxity.task("default", deadline_us=default_us)  # ValueError now rather than at each call
        self.default_us = default_us

    def marked(self, method: str, context: Any) -> contextlib.AbstractContextManager[Any]:
        """The call's task, to be entered where its handler begins."""
        left_s = context.time_remaining()
        asked = left_s is not None and left_s * 1e6 <= laxity.MAX_DEADLINE_US
        deadline_us = int(left_s * 1e6) if asked else self.default_us
        if deadline_us is None or deadline_us < 1:
            return contextlib.nullcontext()
        return laxity.task(method.rpartition("/")[2], deadline_us=deadline_us)

    def wrapped(self, handler: Any, method: str, wrap: Callable[[Any, str, bool], Any]) -> Any:
        """The same handler, its behaviour marked."""
        if handler is None:
            return None
        side, make = _SIDES[bool(handler.request_streaming), bool(handler.response_streaming)]
        behaviour = wrap(getattr(handler, side), method, bool(handler.response_streaming))
        return make(behaviour, handler.request_deserializer, handler.response_serializer)


class Deadlines(_Marks, grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For `grpc.server`."""

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        return self.wrapped(continuation(details), details.method, self._wrap)

    def _wrap(self, behaviour: Any, method: str, streams: bool) -> Any:
        def call(request: Any, context: Any) -> Any:
            with self.marked(method, context):
                return behaviour(request, context)

        def stream(request: Any, context: Any) -> Iterator[Any]:
            with self.marked(method, context):
                yield from behaviour(request, context)

        return stream if streams else call


class AsyncDeadlines(_Marks, grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """For `grpc.aio.server`; its streams are asynchronous generators, or coroutines that write to the context."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        return self.wrapped(await continuation(details), details.method, self._wrap)

    def _wrap(self, behaviour: Any, method: str, streams: bool) -> Any:
        async def call(request: Any, context: Any) -> Any:
            with self.marked(method, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self.marked(method, context):
                async for message in behaviour(request, context):
                    yield message

        return stream if streams and inspect.isasyncgenfunction(behaviour) else call
