"""Tasks whose work goes on after its launch: the end is stamped when the stream has done it, not when the call returns.

    with laxity.stream.task("infer", deadline_us=50_000):    # torch's current stream
        result = model(batch)                                # launches and returns

Any stream with `record_event()` will do, whose event has `synchronize()`: torch.cuda.Stream, or one of your own.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import laxity
from laxity.tasks import GatedTask, Task


class Event(Protocol):
    def synchronize(self) -> None:
        """Returns once all that was given to the stream before the event is done."""


class Stream(Protocol):
    def record_event(self) -> Event: ...


@contextlib.contextmanager
def task(
    name: str, *, deadline_us: int | None = None, stream: Stream | None = None, gate: bool | None = None
) -> Iterator[Task]:
    """As `laxity.task`, for what is launched on a stream within; torch's current one where none is given.

    A thread of each waits for the events in turn and stamps the end with the host's CLOCK_MONOTONIC when it has woken:
    late by that wake-up, tens of microseconds on an idle host, never early. On a device with a gate the caller waits
    itself, since a turn ends with its work. What an event raises, or the body, ends the task as failed.
    """
    of: Any = _torch_stream() if stream is None else stream
    mark = laxity.begin(name, deadline_us=deadline_us, gate=gate)
    try:
        yield mark
        event = of.record_event()
        if isinstance(mark, GatedTask):
            event.synchronize()
            mark.end()
            return
    except BaseException:
        mark.end(failed=True)
        raise
    _waiters.of(of).put((event, mark))


def _torch_stream() -> Any:
    import torch  # type: ignore[import-not-found, unused-ignore]  # an application that uses it has it

    return torch.cuda.current_stream()


class _Waiters:
    """A thread for each stream: events of one stream are done in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Any, queue.SimpleQueue[tuple[Event, Task]]] = {}

    def of(self, stream: Any) -> "queue.SimpleQueue[tuple[Event, Task]]":
        key = getattr(stream, "cuda_stream", None) or id(stream)
        with self._lock:
            waiting = self._queues.get(key)
            if waiting is None:
                waiting = self._queues[key] = queue.SimpleQueue()
                threading.Thread(target=_wait, args=(waiting,), name="laxity-stream", daemon=True).start()
            return waiting


def _wait(waiting: "queue.SimpleQueue[tuple[Event, Task]]") -> None:
    while True:
        event, mark = waiting.get()
        try:
            event.synchronize()
        except Exception:  # noqa: BLE001  # whatever it was, the task gave no result; the application sees it itself
            mark.end(failed=True)
        else:
            mark.end()


_waiters = _Waiters()
