"""No name can add a token, a wildcard or a reply subject."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import FieldError
from shared.subjects import Subjects, decode, encode

NAMES = st.text(min_size=1, max_size=63).filter(lambda name: name.isprintable() or True)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("node-1", "node-1"),
        ("a.b", "a=2Eb"),
        ("a b", "a=20b"),
        ("*", "=2A"),
        (">", "=3E"),
        ("=2E", "=3D2E"),
        ("größe", "gr=C3=B6=C3=9Fe"),
        ("gpu/0\r\n", "gpu=2F0=0D=0A"),
    ],
)
def test_each_byte_outside_the_plain_ones_becomes_its_hex(name: str, expected: str) -> None:
    assert encode(name) == expected


def test_B7_a_name_with_a_space_cannot_become_a_reply_subject() -> None:
    assert Subjects().place_event("a.one two") == "rt.events.place.a=2Eone=20two"


@given(NAMES)
def test_every_name_comes_back_from_its_token(name: str) -> None:
    try:
        token = encode(name)
    except FieldError:
        return
    assert (decode(token), set(token) & set(".*> \t\r\n")) == (name, set())


@given(st.text(max_size=40))
def test_decode_accepts_only_what_encode_writes(token: str) -> None:
    try:
        name = decode(token)
    except FieldError:
        return
    assert encode(name) == token


@pytest.mark.parametrize("name", ["", "x" * 254, "\ud800"])
def test_names_that_cannot_be_tokens_are_refused(name: str) -> None:
    with pytest.raises(FieldError):
        encode(name)


@pytest.mark.parametrize(
    "reply, expected",
    [
        ("_INBOX.abc.1", False),
        ("rt.events.place.x", True),
        ("$JS.API.STREAM.DELETE.RT_EVENTS", True),
        ("_INBOX.>", True),
        ("a.*.b", True),
        ("a..b", True),
    ],
)
def test_reply_subjects_that_could_forge_or_flood_are_refused(reply: str, expected: bool) -> None:
    assert Subjects().reply_refused(reply) == expected
