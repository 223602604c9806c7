"""Deadline arithmetic: verdicts, laxity, guarantee ratios with bounds; holds no clock and no container."""

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import floor, sqrt
from statistics import NormalDist
from typing import Final, TypedDict

from shared.errors import LaxityError

CONFIDENCE: Final = 0.95


class Outcome(StrEnum):
    """What became of one task; `invalid` is a duration that cannot be, and counts neither way."""

    MET = "met"
    MISSED = "missed"
    INVALID = "invalid"


class Standing(StrEnum):
    """What a container's record says about its guarantee."""

    GOOD = "good"
    AT_RISK = "at_risk"
    UNKNOWN = "unknown"


class WindowError(LaxityError, ValueError):
    """A window is too short ever to show its guarantee; `needed` is None when no window can."""

    def __init__(self, window: int, guarantee: float, needed: int | None) -> None:
        self.window, self.guarantee, self.needed = window, guarantee, needed
        least = "no number of tasks can show it" if needed is None else f"at least {needed} are needed"
        super().__init__(f"a window of {window} tasks cannot show a guarantee of {guarantee}: {least}")


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval of a ratio, 0 <= lower <= upper <= 1."""

    lower: float
    upper: float


def verdict(begin_us: int, end_us: int, deadline_us: int) -> Outcome:
    """Met when end - begin <= deadline; all three from one monotonic clock, deadline relative to begin."""
    if end_us < begin_us:
        return Outcome.INVALID
    return Outcome.MET if end_us - begin_us <= deadline_us else Outcome.MISSED


def laxity_us(deadline_us: int, elapsed_us: int, remaining_runtime_us: int) -> int:
    """Time left until the deadline minus the work left; negative when the deadline cannot be met."""
    return deadline_us - elapsed_us - remaining_runtime_us


def tardiness_us(begin_us: int, end_us: int, deadline_us: int) -> int:
    """How far past its deadline a task ended, 0 when in time."""
    return max(0, end_us - begin_us - deadline_us)


@cache
def _quantile(confidence: float) -> float:
    """z: so many standard deviations around the mean hold that share of a normal distribution."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def wilson(met: int, total: int, confidence: float = CONFIDENCE) -> Interval | None:
    """The Wilson score interval of met / total; None when nothing was seen.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference",
    J. Am. Stat. Assoc. 22 (1927); z is the exact normal quantile. Assumes independent tasks.
    Raises ValueError unless 0 <= met <= total and 0 < confidence < 1.
    """
    if not (0 <= met <= total and 0 < confidence < 1):
        raise ValueError(f"needs 0 <= met <= total and a confidence below 1: {met} of {total}, {confidence}")
    if total == 0:
        return None
    z = _quantile(confidence)
    ratio, scale = met / total, 1 + z * z / total
    centre = (ratio + z * z / (2 * total)) / scale
    half = z * sqrt(ratio * (1 - ratio) / total + z * z / (4 * total * total)) / scale
    # the two ends are exact by definition and must not suffer from rounding
    return Interval(0.0 if met == 0 else max(0.0, centre - half), 1.0 if met == total else centre + half)


def guarantee_ratio(met: int, missed: int) -> float | None:
    """Met / (met + missed); None when nothing was judged."""
    return met / (met + missed) if met + missed else None


def standing(met: int, missed: int, guarantee: float) -> Standing:
    """Good when the lower bound reaches the guarantee, at risk when the upper one does not, else unknown."""
    bounds = wilson(met, met + missed)
    if bounds is None:
        return Standing.UNKNOWN
    if bounds.lower >= guarantee:
        return Standing.GOOD
    return Standing.AT_RISK if bounds.upper < guarantee else Standing.UNKNOWN


def smallest_window(guarantee: float, confidence: float = CONFIDENCE) -> int | None:
    """The fewest tasks, all met, whose lower bound reaches the guarantee (0.99: 381); None for 1.

    With no miss the Wilson lower bound is n / (n + z^2), hence n >= z^2 g / (1 - g).
    Raises ValueError unless 0 < guarantee <= 1.
    """
    if not 0 < guarantee <= 1:
        raise ValueError(f"a guarantee is above 0 and at most 1: {guarantee}")
    if guarantee == 1:
        return None
    z = _quantile(confidence)
    count = max(1, floor(z * z * guarantee / (1 - guarantee)) - 1)
    while not _reaches(count, guarantee, confidence):  # the formula is rounded: the bound itself decides
        count += 1
    return count


def check_window(window: int, guarantee: float) -> None:
    """Raises WindowError when even a clean window of this length could not show the guarantee."""
    needed = smallest_window(guarantee)
    if needed is None or window < needed:
        raise WindowError(window, guarantee, needed)


def _reaches(count: int, guarantee: float, confidence: float) -> bool:
    bounds = wilson(count, count, confidence)
    return bounds is not None and bounds.lower >= guarantee


class WindowState(TypedDict):
    """A window as JSON: its length, how many outcomes it holds, and these as bits, newest lowest, 1 = met."""

    length: int
    count: int
    bits: str


_AS_DIGITS: Final = bytes.maketrans(b"\0\1", b"01")
_AS_OUTCOMES: Final = bytes.maketrans(b"01", b"\0\1")


class SlidingWindow:
    """The last `length` outcomes of a container; push and counts are O(1)."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a window holds at least one task: {length}")
        self._ring = bytearray(length)
        self._next = 0
        self._count = 0
        self._met = 0

    def __repr__(self) -> str:
        return f"SlidingWindow({self.length}, met={self.met}, missed={self.missed})"

    @property
    def length(self) -> int:
        """How many outcomes it can hold."""
        return len(self._ring)

    @property
    def met(self) -> int:
        """How many of the outcomes held are met."""
        return self._met

    @property
    def missed(self) -> int:
        """How many of the outcomes held are missed."""
        return self._count - self._met

    def push(self, met: bool, times: int = 1) -> None:
        """Adds the newest outcome, so many times; the oldest fall out of a full window."""
        length = len(self._ring)
        while times:
            end = min(self._next + times, length)
            added = end - self._next
            # places not used yet hold 0
            self._met += met * added - self._ring.count(1, self._next, end)
            self._ring[self._next : end] = bytes([met]) * added
            self._count = min(self._count + added, length)
            self._next = end % length
            times -= added

    def copy(self) -> "SlidingWindow":
        """One that goes its own way."""
        other = SlidingWindow(self.length)
        other._ring[:], other._next, other._count, other._met = self._ring, self._next, self._count, self._met
        return other

    def distance_to_failure(self, m: int) -> int:
        """How many misses in a row from now leave fewer than m met in the last `length` tasks; 0 is failing.

        The distance of an (m,k)-firm stream, k being the length: k - l + 1, l the place of the m-th met task
        counted from the newest. Tasks not seen yet count as met. Source: Hamdaoui and Ramanathan,
        IEEE Trans. Computers 44(12), 1995. Raises ValueError unless 1 <= m <= length.
        """
        if not 1 <= m <= self.length:
            raise ValueError(f"m must lie from 1 to the window's {self.length}: {m}")
        unseen = self.length - self._count
        if self._met < m:
            return max(0, unseen - (m - self._met) + 1)
        outcomes, from_oldest = self._oldest_first(), self._met - m + 1
        return unseen + 1 + bisect_left(range(self._count), from_oldest, key=lambda i: outcomes.count(1, 0, i + 1))

    def dump(self) -> WindowState:
        """The window as plain JSON; `load` gives it back."""
        digits = self._oldest_first().translate(_AS_DIGITS)
        return {"length": self.length, "count": self._count, "bits": f"{int(digits or b'0', 2):x}"}

    @classmethod
    def load(cls, state: WindowState) -> "SlidingWindow":
        """The window that `dump` wrote; raises ValueError when the state contradicts itself."""
        window, count, bits = cls(state["length"]), state["count"], int(state["bits"], 16)
        if not 0 <= count <= window.length or bits < 0 or bits >> count:
            raise ValueError(f"window state contradicts itself: {state}")
        window._ring[:count] = f"{bits:0{count}b}".encode().translate(_AS_OUTCOMES) if count else b""
        window._next, window._count, window._met = count % window.length, count, bits.bit_count()
        return window

    def _oldest_first(self) -> bytes:
        if self._count < self.length:
            return bytes(self._ring[: self._count])
        return bytes(self._ring[self._next :] + self._ring[: self._next])
