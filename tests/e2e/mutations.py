"""Random damage to valid messages, as JSON and as bytes; seeded, so that a failure comes again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parents[2] / "docs" / "samples"
NASTY: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 70, -(1 << 63), 1e308, 0.1, "", " ", ".", "*", ">", "a.b c", "\x00", "\r\nPUB x 0\r\n",
    "x" * 300, "x" * 5000, "größe", "NaN", [], {}, [[[]]], {"a": {"b": []}}, [None], -0.0, "../../etc/passwd",
)  # fmt: skip
NASTY_TEXT = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"\\ud800"', b"[" * 2000, b"\xff\xfe", b"")


def sample(name: str) -> bytes:
    return (SAMPLES / f"{name}.json").read_bytes()


def mutated(body: bytes, rng: random.Random) -> bytes:
    """One to three kinds of damage; sometimes none, so that valid ones are among them."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        body = rng.choice((_value, _value, _drop, _rename, _bytes, _cut, _text))(body, rng)
    return body


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in _places(value[key])]


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _value(body: bytes, rng: random.Random) -> bytes:
    parsed = _parsed(body)
    if places := _places(parsed):
        container, key = rng.choice(places)
        container[key] = rng.choice(NASTY)
        return json.dumps(parsed).encode()
    return body


def _drop(body: bytes, rng: random.Random) -> bytes:
    parsed = _parsed(body)
    if places := _places(parsed):
        container, key = rng.choice(places)
        del container[key]
        return json.dumps(parsed).encode()
    return body


def _rename(body: bytes, rng: random.Random) -> bytes:
    parsed = _parsed(body)
    if places := [place for place in _places(parsed) if isinstance(place[0], dict)]:
        container, key = rng.choice(places)
        container[rng.choice(("shre", "GPU", "", "request_id", "*"))] = container.pop(key)
        return json.dumps(parsed).encode()
    return body


def _bytes(body: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(body or b"x")
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _cut(body: bytes, rng: random.Random) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def _text(body: bytes, rng: random.Random) -> bytes:
    parts = body.split(b":")
    if len(parts) < 2:
        return rng.choice(NASTY_TEXT)
    place = rng.randrange(1, len(parts))
    rest = parts[place].partition(b",")
    parts[place] = rng.choice(NASTY_TEXT) + rest[1] + rest[2]
    return b":".join(parts)
