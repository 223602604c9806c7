"""The public verbs `task`, `begin`, `enabled`, this process's one ring, and what a task writes into it."""

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar, cast

from laxity import gate as gates
from laxity.records import Mark, know, quick
from laxity.ring import DEFAULT_RECORDS, MAX_RECORDS, MIN_RECORDS, NAME_SIZE, Ring, words_of

MAX_DEADLINE_US = 86_400_000_000

P = ParamSpec("P")
R = TypeVar("R")

_MAX_NAMES = 1024  # names remembered as records have them; more than that are encoded again

_ring: Ring | None = None
_opened = False
_making = False
_opening = threading.RLock()
_warned: set[str] = set()
_names: dict[str, tuple[bytes, bytes, bytes]] = {}
_default_deadline_us: int | None = None
_default: "type[Task] | None" = None


class Task(Mark):
    """One task around a `with` body, or one per call of the function that it decorates; made by `task`, `begin`.

    One object serves one `with` at a time (RuntimeError otherwise); as a decorator it has no such limit. `seq` is the
    sequence of its begin, 0 unless it is open.
    """

    __slots__ = ()

    def _process_ring(self) -> Ring | None:
        return _ring if _opened else _open()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function or a coroutine function; TypeError for generators, whose calls do no work."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"laxity.task cannot decorate the generator {function.__qualname__}: use with inside it")
        if inspect.iscoroutinefunction(function):

            async def call_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", functools.wraps(function)(call_coroutine))

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._again():
                return function(*args, **kwargs)

        return functools.wraps(function)(call)

    def _again(self) -> Self:
        """One more task like this one."""
        made = type(self)()
        made.words, made.deadline_us, made.seq, made.ring = self.words, self.deadline_us, 0, _ring
        return made


class GatedTask(Task):
    """A task that waits for its turn on the device after its begin, and gives it back at its end."""

    __slots__ = ("turn",)

    turn: gates.Turn | None

    def __enter__(self) -> Self:
        """The thread waits. What is raised meanwhile ends the task as failed; GateError where there is no gate."""
        super().__enter__()
        self.turn = None
        try:
            if not gates.enter(self, os.environ.get("LAXITY_RING_DIR", ""), self.deadline_us):
                _warn("no gate; tasks run without it, as LAXITY_GATE_LOST=run says")
        except BaseException:
            self.end(failed=True)
            raise
        return self

    def __exit__(self, failed: object, error: object = None, trace: object = None) -> None:
        self.end(failed=bool(failed))

    def end(self, *, failed: bool = False) -> None:
        """As of any task. The end is stamped first: giving the turn back is no part of the task."""
        try:
            super().end(failed=failed)
        finally:
            if self.turn is not None:
                self.turn.give(self)


def task(name: str, *, deadline_us: int | None = None, gate: bool | None = None) -> Task:
    """Mark one task: `with laxity.task("infer", deadline_us=50_000): ...`, or a decorator with the same words.

    `name` is kept up to 22 bytes of UTF-8. `deadline_us` is relative to the begin, 1 to 86_400_000_000;
    None takes LAXITY_DEADLINE_US. `gate`: whether it waits for its turn at the gate of the device; None takes
    LAXITY_GATE, and LAXITY_GATE=0 wins over True. ValueError for anything else, with and without a ring.
    """
    try:
        words = _names[name]
    except (KeyError, TypeError):
        words = _encode(name)
    if type(deadline_us) is not int or not 1 <= deadline_us <= MAX_DEADLINE_US:
        deadline_us = _deadline(deadline_us)
    kind = _default if gate is None and _default is not None else _kind(gate)
    made = kind()  # an __init__ would cost as much again
    made.words = words
    made.deadline_us = deadline_us
    made.seq = 0
    made.ring = _ring
    if _opened and _default is Task:
        know(Task, _ring, _default_deadline_us or 0)
    return made


def begin(name: str, *, deadline_us: int | None = None, gate: bool | None = None) -> Task:
    """Begin a task that ends elsewhere: `Task.end`. Arguments and errors as for `task`."""
    return task(name, deadline_us=deadline_us, gate=gate).__enter__()


def enabled() -> bool:
    """Whether tasks of this process are recorded: there is a ring directory and it can be written."""
    return (_ring if _opened else _open()) is not None


def _encode(name: str) -> tuple[bytes, bytes, bytes]:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: found {name!r}, allowed: a string that is not empty")
    made = words_of(name.encode("utf-8", "replace")[:NAME_SIZE].decode("utf-8", "ignore").encode())
    if len(_names) < _MAX_NAMES:
        _names[name] = made
    return made


def _deadline(given: object) -> int:
    """The default for None; ValueError for what is not a deadline."""
    global _default_deadline_us
    allowed = f"allowed: an int from 1 to {MAX_DEADLINE_US} (microseconds)"
    if given is not None:
        raise ValueError(f"deadline_us: found {given!r}, {allowed}")
    if _default_deadline_us is None:
        text = os.environ.get("LAXITY_DEADLINE_US", "")
        if not text:
            raise ValueError(f"deadline_us: found None and no LAXITY_DEADLINE_US, {allowed}")
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and 1 <= int(text) <= MAX_DEADLINE_US):
            raise ValueError(f"LAXITY_DEADLINE_US: found {text!r}, {allowed}")
        _default_deadline_us = int(text)
    return _default_deadline_us


def _kind(gate: bool | None) -> type[Task]:
    """What a task is that says `gate`; what one is that says nothing is remembered."""
    global _default
    if gate is not None and not isinstance(gate, bool):
        raise ValueError(f"gate: found {gate!r}, allowed: True, False or None")
    text = os.environ.get("LAXITY_GATE", "")
    if text not in {"", "0", "1"}:
        raise ValueError(f"LAXITY_GATE: found {text!r}, allowed: 0 or 1")
    possible = text != "0" and bool(os.environ.get("LAXITY_RING_DIR"))
    _default = GatedTask if possible and text == "1" else Task
    if gate is None:
        return _default
    return GatedTask if possible and gate else Task


def _open() -> Ring | None:
    global _ring, _opened, _making
    with _opening:
        if _opened or _making:  # a signal handler that comes while its own thread makes the ring goes unrecorded
            return _ring
        _making = True
        try:
            directory = os.environ.get("LAXITY_RING_DIR", "")
            _ring = _make_ring(directory) if directory else None
            _opened = True
        finally:
            _making = False
    return _ring


def _make_ring(directory: str) -> Ring | None:
    if sys.byteorder != "little":
        _warn("rings are little-endian and this machine is not; tasks are not recorded")
        return None
    try:
        return Ring(directory, _records())
    except OSError as error:
        _warn(f"no ring in LAXITY_RING_DIR={directory}: {error}; tasks are not recorded")
        return None


def _records() -> int:
    text = os.environ.get("LAXITY_RING_RECORDS", "")
    if not text:
        return DEFAULT_RECORDS
    records = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0
    if MIN_RECORDS <= records <= MAX_RECORDS and records.bit_count() == 1:
        return records
    allowed = f"a power of two from {MIN_RECORDS} to {MAX_RECORDS}"
    _warn(f"LAXITY_RING_RECORDS: found {text!r}, allowed: {allowed}; {DEFAULT_RECORDS} is used")
    return DEFAULT_RECORDS


def _warn(text: str) -> None:
    """Say it once; a process without a usable stderr is left in peace."""
    if text not in _warned:
        _warned.add(text)
        with contextlib.suppress(OSError, ValueError):
            print(f"laxity: {text}", file=sys.stderr)


def _forget() -> None:
    """Start afresh, as a forked child must: the ring that it inherited belongs to its parent."""
    global _ring, _opened, _making, _opening, _default_deadline_us, _default
    inherited, _ring, _opened, _making = _ring, None, False, False
    _opening = threading.RLock()  # another thread of the parent may have held it at the fork
    _default_deadline_us = _default = None
    know(None, None, 0)
    if inherited is not None:
        inherited.close()


os.register_at_fork(after_in_child=_forget)
quick_task, quick_begin = quick(_names, task, begin)
