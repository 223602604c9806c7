"""Units: what is printed by hand is read back exactly, and no text whatever does more than be refused."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.units import UnitError, cpu_milli, duration_us, format_us, memory_mib, parse_quantity, share_micro

SCALES = {
    "": Fraction(1), "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "k": Fraction(10**3),
    "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40), "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}  # fmt: skip


@given(st.integers(0, 10**12), st.integers(0, 999_999), st.sampled_from(sorted(SCALES)))
def test_a_quantity_is_its_number_times_its_scale(whole: int, millionths: int, suffix: str) -> None:
    expected = (whole + Fraction(millionths, 10**6)) * SCALES[suffix]
    assert expected == parse_quantity(f"{whole}.{millionths:06d}{suffix}")


@given(st.integers(-(10**9), 10**9), st.integers(-30, 30), st.sampled_from("eE"))
def test_an_exponent_is_a_power_of_ten(number: int, exponent: int, letter: str) -> None:
    assert Fraction(number) * Fraction(10) ** exponent == parse_quantity(f"{number}{letter}{exponent}")


@given(st.integers(0, 10**9), st.sampled_from(sorted(SCALES)))
def test_rounding_is_up_and_by_less_than_one(number: int, suffix: str) -> None:
    exact = number * SCALES[suffix]
    assert 0 <= cpu_milli(f"{number}{suffix}") - exact * 1000 < 1
    if exact == 0 or exact >= 1:
        assert 0 <= memory_mib(f"{number}{suffix}") - exact / 2**20 < 1


@given(st.integers(0, 10**15))
def test_microseconds_are_read_back(value: int) -> None:
    assert value == duration_us(f"{value}us")
    assert value == duration_us(f"{value // 10**6}.{value % 10**6:06d}s")


@given(st.integers(1, 10**6))
def test_a_share_in_millionths_comes_back_from_every_way_of_writing_it(micro: int) -> None:
    text = str(Decimal(micro).scaleb(-6))
    assert [micro] * 3 == [share_micro(text), share_micro(Decimal(text)), share_micro(micro / 10**6)]


@given(st.floats(min_value=1e-6, max_value=1.0))
def test_any_share_is_off_by_at_most_half_a_millionth(share: float) -> None:
    assert abs(share_micro(share) - Fraction(str(share)) * 10**6) <= Fraction(1, 2)


def outcome(read: Callable[[Any], int | Fraction], given: object) -> int | Fraction | UnitError:
    """What was read or the refusal; any other exception is a bug and ends the test."""
    try:
        return read(given)
    except UnitError as error:
        return error


@given(
    st.one_of(st.text(max_size=80), st.from_regex(r"[+-]?[0-9.eE]{0,9}[a-zA-Z+-]{0,3}[0-9]{0,9}")),
    st.sampled_from([parse_quantity, cpu_milli, memory_mib, duration_us, share_micro]),
)
@settings(max_examples=400)
def test_any_text_is_read_or_refused_and_nothing_else(text: str, read: Callable[[Any], int | Fraction]) -> None:
    result = outcome(read, text)
    assert bool(result.allowed) if isinstance(result, UnitError) else isinstance(result, int | Fraction)


things = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.binary(), st.lists(st.integers()), st.decimals()
)


@given(things)
def test_anything_else_is_a_share_or_refused(thing: object) -> None:
    result = outcome(share_micro, thing)
    assert "at most 1" in result.allowed if isinstance(result, UnitError) else 1 <= result <= 10**6


@given(st.integers(0, 10**6 - 1))
def test_durations_below_a_second_are_printed_without_loss(value: int) -> None:
    assert value == duration_us(format_us(value).replace(" ", ""))
