"""The expressions of the admission policies beside the code that reads the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kube_bridge import asked
from shared.messages.place import Kind
from shared.units import UnitError, duration_us
from tests.manifests import named

VARIABLES = {
    each["name"]: each["expression"]
    for each in named("demo", "ValidatingAdmissionPolicy", "pods.laxity.dev")["spec"]["variables"]
}
(READABLE,) = re.findall(r"matches\(\s*'(\^[^']+)'\)", VARIABLES["unreadable"].replace("\\\\", "\\"))


def accepted(text: str) -> bool:
    """By the policy: RE2 and Python's expressions mean the same by all that is used there."""
    return len(text) <= 64 and re.search("[1-9]", text) is not None and re.search(READABLE, text) is not None


def read(text: str) -> bool:
    """By the services, which want a duration above zero."""
    try:
        return duration_us(text) > 0
    except UnitError:
        return False


EXAMPLES = ["50ms", "+30s", "1.5s", "2m", "1h", "750us", ".5s", "5.s", "0.001ms", "1.0us", "0.0000010s"]
REFUSED = [
    "50",
    "ms",
    "",
    "-5ms",
    "50 ms",
    "50Ms",
    "0ms",
    "0.0s",
    "1.50000us",
    "1.5us",
    "0.0001ms",
    "1e3ms",
    "fifty",
    "5msx",
    "1d",
]


@pytest.mark.parametrize("text", [*EXAMPLES, *REFUSED, "9" * 62 + "ms", "9" * 63 + "ms"])
def test_a_deadline_that_the_policy_refuses_is_one_that_cannot_be_read(text: str) -> None:
    assert (text in EXAMPLES or len(text) == 64) == read(text) == accepted(text)


@given(st.from_regex(r"\A\+?[0-9]{0,3}\.?[0-9]{0,9}(us|ms|s)\Z") | st.from_regex(r"\A[0-9]{1,3}(\.[0-9]{0,6})?[mh]\Z"))
def test_the_policy_and_the_services_read_the_same_durations(text: str) -> None:
    assert read(text) == accepted(text)


@given(st.from_regex(r"\A\+?[0-9]{0,3}\.?[0-9]{0,12}[mh]\Z"))
def test_the_policy_never_refuses_what_the_services_could_read(text: str) -> None:
    assert accepted(text) or not read(text)


def test_the_policy_knows_the_kinds_of_tasks() -> None:
    (found,) = (
        each["expression"]
        for each in named("demo", "ValidatingAdmissionPolicy", "pods.laxity.dev")["spec"]["validations"]
        if "laxity.dev/kind" in each["expression"]
    )

    assert sorted(kind.value for kind in Kind) == sorted(re.findall(r"'(\w+)'", found.partition(" in [")[2]))


def test_the_policy_knows_the_words_that_the_bridge_reads() -> None:
    listed = set(re.findall(r"'([a-z-]+)'", VARIABLES["misspelt"]))

    assert {*asked._WORDS, *asked._NO_WISH} | {asked.GPU_MILLI[11:], asked.GPU_MIB[11:]} == listed
