"""Reads and prints units exactly (quantities, durations, shares); knows no field names and no clock."""

import re
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from fractions import Fraction
from math import ceil
from typing import Final

from shared.errors import LaxityError, clip

MIB: Final = 1 << 20
WHOLE_DEVICE_MICRO: Final = 1_000_000

_LONGEST = 64  # no honest number is longer; bounds the work that a hostile one can cause
_LARGEST_EXPONENT = 30

_SUFFIXES: Final[dict[str, Fraction]] = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "": Fraction(1),
    **{suffix: Fraction(10 ** (3 * i)) for i, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Fraction(1024**i) for i, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY_ALLOWED = "a number with one of n u m k M G T P E Ki Mi Gi Ti Pi Ei, an exponent (1e3), or none"

_DURATION_US: Final[dict[str, int]] = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
}
_DURATION_ALLOWED = "a number with its unit: us, ms, s, m or h, such as 50ms or +30s"
_SHARE_ALLOWED = "above 0, at most 1"

_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_QUANTITY = re.compile(rf"(?P<sign>[+-]?){_NUMBER}(?:[eE](?P<exponent>[+-]?[0-9]+)|(?P<suffix>[A-Za-z]*))")
_DURATION = re.compile(rf"\+?{_NUMBER}(?P<unit>[a-z]+)")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


class UnitError(LaxityError, ValueError):
    """A text is not in the unit wanted: `found` is what came, `allowed` what would be taken."""

    def __init__(self, found: object, allowed: str) -> None:
        self.found = clip(found, _LONGEST)
        self.allowed = allowed
        super().__init__(f"found {self.found}, allowed is {allowed}")


def parse_quantity(text: str) -> Fraction:
    """The exact value of a Kubernetes quantity (`500m`, `1Gi`, `1e3`, `1.5Gi`).

    Grammar: k8s.io/apimachinery `resource.Quantity`. Stricter in two ways: a value is never capped
    (Kubernetes silently caps binary ones at 2^63-1) and an exponent beyond 30 is refused.
    Raises UnitError; a suffix that is not known is never taken for 1.
    """
    found = _QUANTITY.fullmatch(_short(text, _QUANTITY_ALLOWED))
    if found is None:
        raise UnitError(text, _QUANTITY_ALLOWED)
    value = Fraction(found["number"]) * _scale(found, text)
    return -value if found["sign"] == "-" else value


def cpu_milli(text: str) -> int:
    """CPU in thousandths of a core, rounded up as Kubernetes does; raises UnitError."""
    return ceil(_not_negative(text) * 1000)


def memory_mib(text: str) -> int:
    """Memory in MiB, rounded up; the text counts bytes (`1Gi` is 1024 MiB, `1G` is 954 MiB).

    Raises UnitError, also for a part of one byte: `400m` is 0.4 bytes and was meant to be `400M`.
    """
    amount = _not_negative(text)
    if 0 < amount < 1:
        raise UnitError(text, "at least one byte: M is 1000^2 and Mi is 1024^2, m is one thousandth")
    return ceil(amount / MIB)


def duration_us(text: str) -> int:
    """A duration in microseconds (`50ms`, `30s`, `+30s`, `1.5s`, `2m`, `1h`, `750us`).

    Raises UnitError, also for a number without its unit and for parts of a microsecond.
    """
    found = _DURATION.fullmatch(_short(text, _DURATION_ALLOWED))
    if found is None or found["unit"] not in _DURATION_US:
        raise UnitError(text, _DURATION_ALLOWED)
    value = Fraction(found["number"]) * _DURATION_US[found["unit"]]
    if value.denominator != 1:
        raise UnitError(text, "whole microseconds")
    return int(value)


def share_micro(share: float | int | str | Decimal) -> int:
    """The share of one device in millionths of it, from the decimal digits that were written.

    What is finer than a millionth goes to the nearest one, so that three times 1/3 fit. Raises UnitError
    unless 0 < share <= 1 and it is at least half a millionth.
    """
    value = _decimal(share)
    if not 0 < value <= 1:
        raise UnitError(share, _SHARE_ALLOWED)
    micro = int(value.quantize(Decimal("0.000001"), ROUND_HALF_UP).scaleb(6))
    if micro == 0:
        raise UnitError(share, "at least 0.000001, at most 1")
    return micro


def format_us(value_us: int | None) -> str:
    """A duration for people (`750 us`, `47.2 ms`, `1.5 s`, `2 min`); None is `unknown`."""
    if value_us is None:
        return "unknown"
    for unit, size, below in (("us", 1, 1_000), ("ms", 1_000, 10**6), ("s", 10**6, 120 * 10**6)):
        if abs(value_us) < below:
            return f"{_three_decimals(value_us, size)} {unit}"
    if abs(value_us) < 120 * _DURATION_US["m"]:
        return f"{_three_decimals(value_us, _DURATION_US['m'])} min"
    return f"{_three_decimals(value_us, _DURATION_US['h'])} h"


def format_mib(value_mib: int | None) -> str:
    """Memory for people, always in MiB so that two numbers compare at sight; None is `unknown`."""
    return "unknown" if value_mib is None else f"{value_mib} MiB"


def format_ratio(ratio: float | Fraction | None) -> str:
    """A ratio in per cent (`99.9 %`), rounded down so that nothing short of it reads 100 %."""
    if ratio is None:
        return "unknown"
    exact = Fraction(str(ratio)) if isinstance(ratio, float) else Fraction(ratio)
    return f"{_three_decimals(exact * 100_000 // 1, 1_000)} %"


def _scale(found: re.Match[str], text: str) -> Fraction:
    """What the number is multiplied with: its suffix or its power of ten."""
    if found["exponent"] is not None:
        exponent = int(found["exponent"])
        if abs(exponent) > _LARGEST_EXPONENT:
            raise UnitError(text, f"an exponent from -{_LARGEST_EXPONENT} to {_LARGEST_EXPONENT}")
        return Fraction(10) ** exponent
    if found["suffix"] not in _SUFFIXES:
        raise UnitError(text, _QUANTITY_ALLOWED)
    return _SUFFIXES[found["suffix"]]


def _not_negative(text: str) -> Fraction:
    value = parse_quantity(text)
    if value < 0:
        raise UnitError(text, "0 or more")
    return value


def _short(text: object, allowed: str) -> str:
    """The text itself, when it is one and not absurdly long."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise UnitError(text, allowed)
    return text


def _decimal(number: float | int | str | Decimal) -> Decimal:
    """The number as the decimal that a person would read: a float by its shortest digits."""
    text = number if isinstance(number, str) else _digits(number)
    if not _DECIMAL.fullmatch(_short(text, _SHARE_ALLOWED)):
        raise UnitError(number, _SHARE_ALLOWED)
    return Decimal(text)


def _digits(number: object) -> str:
    """The decimal text of a number; refuses what only looks like one (True, None, a list)."""
    if isinstance(number, bool) or not isinstance(number, int | float | Decimal):
        raise UnitError(number, _SHARE_ALLOWED)
    try:
        return str(number)
    except (ValueError, InvalidOperation):  # Python refuses to print integers of thousands of digits
        raise UnitError("a number of thousands of digits", _SHARE_ALLOWED) from None


def _three_decimals(value: int, size: int) -> str:
    """So many of a unit of this size, with at most three decimals, rounded half up, without trailing zeros."""
    thousandths = (abs(value) * 2_000 + size) // (2 * size)
    whole, part = divmod(thousandths, 1_000)
    digits = f"{whole}.{part:03d}".rstrip("0").rstrip(".")
    return f"-{digits}" if value < 0 and digits != "0" else digits
