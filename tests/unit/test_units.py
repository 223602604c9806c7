"""Units are read exactly or refused with what is allowed."""

from decimal import Decimal
from fractions import Fraction

import pytest

from shared.units import (
    UnitError,
    cpu_milli,
    duration_us,
    format_mib,
    format_ratio,
    format_us,
    memory_mib,
    parse_quantity,
    share_micro,
)


@pytest.mark.parametrize(
    "text,expected",
    [
        ("0", Fraction(0)),
        ("500m", Fraction(1, 2)),
        ("1Gi", Fraction(2**30)),
        ("1e3", Fraction(1000)),
        ("1E3", Fraction(1000)),
        ("1E", Fraction(10**18)),
        ("1Ei", Fraction(2**60)),
        ("1e-3", Fraction(1, 1000)),
        ("1E+2", Fraction(100)),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1.5Gi", Fraction(3 * 2**29)),
        ("100n", Fraction(1, 10**7)),
        ("250u", Fraction(1, 4000)),
        ("2k", Fraction(2000)),
        ("2Ki", Fraction(2048)),
        ("3M", Fraction(3 * 10**6)),
        ("3Mi", Fraction(3 * 2**20)),
        ("1T", Fraction(10**12)),
        ("1Ti", Fraction(2**40)),
        ("1P", Fraction(10**15)),
        ("1Pi", Fraction(2**50)),
        ("+1", Fraction(1)),
        ("-1.5", Fraction(-3, 2)),
        ("0.1", Fraction(1, 10)),
        ("18446744073709551616", Fraction(2**64)),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str, expected: Fraction) -> None:
    assert expected == parse_quantity(text)


@pytest.mark.parametrize(
    "text",
    ["1GB", "1gi", "1K", "1mi", "1Mib", "1 Gi", "1Zi", "1kk", "5x", "1e", "1e3k", "1Gi3", "1e1.5"],
)
def test_K4_an_unknown_suffix_is_an_error_and_never_taken_for_one(text: str) -> None:
    with pytest.raises(UnitError) as error:
        parse_quantity(text)
    assert text == error.value.found
    assert "Ki Mi Gi" in error.value.allowed


@pytest.mark.parametrize(
    "text", ["", ".", "+", "-", "m", "Gi", "--1", "1..2", "1_000", "0x10", "NaN", "inf", "٣", "1\n", " 1", "1,5"]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_quantity(text)


@pytest.mark.parametrize("text", ["1e31", "1e-31", "1e999999999", "9" * 65, "1e" + "0" * 80])
def test_a_number_that_only_costs_work_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_quantity(text)


def test_a_quantity_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnitError) as error:
        parse_quantity(5)  # type: ignore[arg-type]
    assert "5" == error.value.found


@pytest.mark.parametrize(
    "text,expected", [("1", 1000), ("500m", 500), ("0.5", 500), ("0.1m", 1), ("1.0001", 1001), ("2e3", 2_000_000)]
)
def test_cpu_rounds_up_to_a_thousandth(text: str, expected: int) -> None:
    assert expected == cpu_milli(text)


@pytest.mark.parametrize(
    "text,expected",
    [
        ("2.5G", 2385),  # 2,500,000,000 / 1,048,576 = 2384.2
        ("1Gi", 1024),
        ("1G", 954),
        ("1Mi", 1),
        ("1M", 1),
        ("1048577", 2),
        ("1", 1),
        ("0", 0),
        ("128974848000m", 123),
    ],
)
def test_D12_decimal_and_binary_memory_are_exact_and_differ(text: str, expected: int) -> None:
    assert expected == memory_mib(text)


def test_memory_of_less_than_a_byte_is_a_slip_of_the_suffix() -> None:
    with pytest.raises(UnitError, match="M is 1000"):
        memory_mib("400m")


@pytest.mark.parametrize("read", [cpu_milli, memory_mib])
def test_negative_amounts_are_refused(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnitError, match="0 or more"):
        read("-1")


@pytest.mark.parametrize(
    "text,expected",
    [
        ("50ms", 50_000),
        ("30s", 30_000_000),
        ("1.5s", 1_500_000),
        ("+30s", 30_000_000),
        ("2m", 120_000_000),
        ("1h", 3_600_000_000),
        ("750us", 750),
        ("0.25ms", 250),
        ("0s", 0),
    ],
)
def test_a_duration_becomes_microseconds(text: str, expected: int) -> None:
    assert expected == duration_us(text)


@pytest.mark.parametrize("text", ["50", "1.5", "", "ms", "-5s", "5 s", "5d", "5S", "1e3s", "1h30m", "s5", "5ns"])
def test_a_duration_without_a_known_unit_is_refused_with_the_allowed_form(text: str) -> None:
    with pytest.raises(UnitError) as error:
        duration_us(text)
    assert "a number with its unit: us, ms, s, m or h, such as 50ms or +30s" == error.value.allowed


def test_parts_of_a_microsecond_are_refused() -> None:
    with pytest.raises(UnitError, match="whole microseconds"):
        duration_us("0.5us")


@pytest.mark.parametrize(
    "share,expected",
    [
        ("0.5", 500_000),
        (0.5, 500_000),
        (1, 1_000_000),
        (1.0, 1_000_000),
        ("1", 1_000_000),
        (0.1, 100_000),
        (0.15, 150_000),
        (Decimal("0.25"), 250_000),
        ("0.000001", 1),
        (1e-6, 1),
        (0.1 + 0.2, 300_000),
    ],
)
def test_K5_a_share_is_taken_from_its_decimal_digits(share: float | int | str | Decimal, expected: int) -> None:
    assert expected == share_micro(share)


@pytest.mark.parametrize(
    "share",
    [0, 0.0, -0.5, 1.5, "1.0000001", "0.5Gi", "half", "", "nan", "inf", float("nan"), float("inf"), True, None, [],
     1e-7, "0.0000001", "1e-99", "1e99999", Decimal("NaN"), Decimal("sNaN"), Decimal("1e-999999"), 10**5000, "0_5"],
    ids=lambda share: repr(share)[:20] if not isinstance(share, int) or share < 9 else "huge",
)  # fmt: skip
def test_K5_what_is_no_share_is_refused_with_the_allowed_form(share: object) -> None:
    with pytest.raises(UnitError) as error:
        share_micro(share)  # type: ignore[arg-type]
    assert "at most 1" in error.value.allowed


@pytest.mark.parametrize("share,per_device", [(0.15, 6), (1 / 3, 3), (0.1, 10), (0.5, 2), (0.7, 1)])
def test_P8_fractions_fit_per_device_and_not_per_sum_of_devices(share: float, per_device: int) -> None:
    assert per_device == 1_000_000 // share_micro(share)


@pytest.mark.parametrize(
    "value,expected",
    [
        (None, "unknown"),
        (0, "0 us"),
        (750, "750 us"),
        (47_200, "47.2 ms"),
        (50_000, "50 ms"),
        (1_001, "1.001 ms"),
        (1_500_000, "1.5 s"),
        (119_999_999, "120 s"),
        (120_000_000, "2 min"),
        (7_200_000_000, "2 h"),
        (-3_300, "-3.3 ms"),
    ],
)
def test_durations_are_printed_for_people(value: int | None, expected: str) -> None:
    assert expected == format_us(value)


def test_memory_is_printed_in_one_unit_and_unknown_is_never_zero() -> None:
    assert ["4096 MiB", "0 MiB", "unknown"] == [format_mib(4096), format_mib(0), format_mib(None)]


@pytest.mark.parametrize(
    "ratio,expected",
    [
        (None, "unknown"),
        (0.99, "99 %"),
        (1.0, "100 %"),
        (0.999999, "99.999 %"),
        (Fraction(107, 100), "107 %"),
        (0.0, "0 %"),
    ],
)
def test_ratios_are_rounded_down_so_that_only_all_reads_100(ratio: float | None, expected: str) -> None:
    assert expected == format_ratio(ratio)
