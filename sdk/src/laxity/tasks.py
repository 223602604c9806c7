"""The public verbs `task`, `begin`, `enabled`, this process's one ring, and what a task writes into it."""

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, ParamSpec, Self, TypeVar, cast

from laxity import gate as gates
from laxity.ring import DEFAULT_RECORDS, MAX_RECORDS, MIN_RECORDS, NAME_SIZE, Ring, pack_record, words_of

MAX_DEADLINE_US = 86_400_000_000
_ALREADY_OPEN = "this laxity.task is already open: make one for each with statement"

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


class Task:
    """One task around a `with` body, or one per call of the function that it decorates; made by `task`, `begin`.

    One object serves one `with` at a time (RuntimeError otherwise); as a decorator it has no such limit. `seq` is the
    sequence of its begin, 0 unless it is open.

    What is done for each record stands in `__enter__` and `__exit__` at full length, since every call would be felt.
    The lock is taken inside the `try`, as a signal may raise as soon as it is held, and by local names, which cost half
    of a `with`.
    """

    __slots__ = ("deadline_us", "ring", "seq", "words")

    deadline_us: int
    ring: Ring | None
    seq: int
    words: tuple[bytes, bytes, bytes]

    def __enter__(self) -> Self:
        """Write a begin, stamped as late as possible."""
        ring = self.ring
        if ring is None or ring.closed:  # made before there was a ring, or before a fork
            if self.seq:
                raise RuntimeError(_ALREADY_OPEN)
            ring = self.ring = _ring if _opened else _open()
            if ring is None:
                self.seq = 1
                return self
        acquire, release = ring.acquire, ring.release
        try:
            acquire()
            if self.seq:
                raise RuntimeError(_ALREADY_OPEN)
            seq, at = next(ring.places)
            pack_record(ring.map, at, seq, monotonic_ns(), seq, self.deadline_us, self.words[0], seq)
            if seq > ring.written:
                ring.written = ring.head[0] = seq
            self.seq = seq
        finally:
            try:  # noqa: SIM105 - suppress() costs a call on the hot path
                release()
            except RuntimeError:
                pass  # a signal raised while we waited for the lock: it is not ours
        return self

    def __exit__(self, failed: object, error: object = None, trace: object = None) -> None:
        """Write the end of an open task, stamped before anything is waited for; nothing if it is not open."""
        stamp_ns = monotonic_ns()
        ring = self.ring
        if ring is None or ring.closed:
            self.seq = 0
            return
        acquire, release = ring.acquire, ring.release
        try:
            acquire()
            begun = self.seq
            if begun:
                self.seq = 0
                seq, at = next(ring.places)
                pack_record(ring.map, at, seq, stamp_ns, begun, self.deadline_us, self.words[2 if failed else 1], seq)
                if seq > ring.written:
                    ring.written = ring.head[0] = seq
        finally:
            try:  # noqa: SIM105 - as above
                release()
            except RuntimeError:
                pass

    def end(self, *, failed: bool = False) -> None:
        """End the task now, `failed` if it gave no result.

        May be called from any thread and any number of times; the first counts. In a forked child nothing
        is written: the task is its parent's.
        """
        Task.__exit__(self, failed)

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
    if inherited is not None:
        inherited.close()


os.register_at_fork(after_in_child=_forget)
