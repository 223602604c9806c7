"""Reads a request as people write it in YAML and makes the message of it; nothing is sent from here."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from shared.errors import FieldError
from shared.messages import Gpu, Message, PlaceRequest, Realtime
from shared.units import UnitError, cpu_milli, duration_us, memory_mib

Convert = Callable[[str], int]

_WORDS: Final[Mapping[str, Mapping[str, tuple[str, Convert]]]] = {
    "": {
        "cpu": ("cpu_milli", cpu_milli),
        "memory": ("memory_mib", memory_mib),
        "shm": ("shm_mib", memory_mib),
        "hold": ("hold_us", duration_us),
    },
    "gpu": {"memory": ("memory_mib", memory_mib)},
    "realtime": {
        "deadline": ("deadline_us", duration_us),
        "period": ("period_us", duration_us),
        "runtime": ("runtime_us", duration_us),
        "host": ("host_us", duration_us),
    },
}
"""Words that only files have, per section: the field that each stands for, and how its text is read."""
_FIELDS: Final[Mapping[str, type[Message]]] = {"": PlaceRequest, "gpu": Gpu, "realtime": Realtime}


class _Loader(yaml.SafeLoader):
    """Plain data only, and a key that stands twice is an error: YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise FieldError(key, f"twice, again in line {key_node.start_mark.line + 1}", "once")
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep)


def read(path: Path, wall_us: int) -> PlaceRequest:
    """The request in a file, with a request id made up unless it has one.

    ``place_by: +30s`` counts from ``wall_us``, so read a file once and repeat the message. Raises FieldError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FieldError("(file)", error.strerror or str(error), "a file that can be read") from None
    except UnicodeDecodeError:
        raise FieldError("(file)", "bytes that are no text", "UTF-8") from None
    return parse(text, wall_us)


def parse(text: str, wall_us: int) -> PlaceRequest:
    """As read, from the text itself."""
    try:
        found = yaml.load(text, _Loader)  # noqa: S506  # it derives from the safe loader
    except yaml.YAMLError as error:
        raise FieldError("(file)", _where(error), "one YAML document") from None
    request = PlaceRequest.from_json(_body(fields(found, wall_us)))
    return request if request.request_id else request.model_copy(update={"request_id": made_up_id(request.name)})


def fields(found: object, wall_us: int) -> dict[str, Any]:
    """The fields of the message, exact; raises FieldError for words that are none."""
    if not isinstance(found, dict):
        raise FieldError("(file)", found, "fields such as name: and command:")
    raw = dict(found)
    if "place_by" in raw:
        after_us = _converted("place_by", raw.pop("place_by"), duration_us)
        raw = _with(raw, "place_by", "place_by_us", wall_us + after_us)
    for section in ("gpu", "realtime"):
        if isinstance(raw.get(section), dict):
            raw[section] = _section(section, raw[section])
    return _section("", raw)


def made_up_id(name: str | None) -> str:
    """A new id that people recognise by the request's name."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", name or "").strip("-")[:40]
    return f"{stem or 'request'}-{secrets.token_hex(4)}"


def _section(section: str, found: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(found)
    for word, (field, convert) in _WORDS[section].items():
        if word in made:
            made = _with(made, _path(section, word), field, _converted(_path(section, word), made.pop(word), convert))
    known = set(_FIELDS[section].model_fields)
    for unknown in [name for name in made if name not in known]:
        allowed = ", ".join(sorted(known | set(_WORDS[section])))
        raise FieldError(_path(section, str(unknown)), "a field that does not exist", allowed)
    return made


def _with(raw: Mapping[str, Any], word: str, field: str, value: int) -> dict[str, Any]:
    if field in raw:
        raise FieldError(word, f"also {field}", "one of the two")
    return {**raw, field: value}


def _converted(path: str, value: object, convert: Convert) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise FieldError(path, value, "a number with its unit")
    try:
        return convert(str(value))
    except UnitError as error:
        raise FieldError(path, error.found, error.allowed) from None


def _body(raw: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(raw, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise FieldError("(file)", str(error), "text, numbers, true, false, lists and objects") from None


def _path(section: str, word: str) -> str:
    return f"{section}.{word}" if section else word


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"{problem}, line {mark.line + 1}" if mark else str(problem)
