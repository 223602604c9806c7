"""Strategies under names of their own, with other parameters: what a scheduler calls a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from services.placer.core.strategies import STRATEGIES, Strategy
from shared.errors import FieldError


def with_profiles(profiles: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Strategy]:
    """The strategies and these profiles, by the name that a request's `strategy` says.

    A profile names its `strategy` and the parameters that differ, as `{"strategy": "binpack", "gpu": 10}`. Raises
    FieldError with the profile and the parameter that is wrong.
    """
    made = {name: _made(name, dict(profile)) for name, profile in profiles.items()}
    return MappingProxyType({**STRATEGIES, **made})


def _made(name: str, parameters: dict[str, Any]) -> Strategy:
    if not name or name in STRATEGIES:
        raise FieldError(f"profiles.{name}", name, "a name that no strategy has")
    base = parameters.pop("strategy", None)
    if base not in STRATEGIES:
        raise FieldError(f"profiles.{name}.strategy", base, f"one of {', '.join(sorted(STRATEGIES))}")
    kind: type[Any] = type(STRATEGIES[base])
    known = sorted({field.name for field in fields(kind)} - {"name", "outlook"})
    for wrong in parameters.keys() - set(known):
        raise FieldError(f"profiles.{name}.{wrong}", parameters[wrong], f"parameters of {base}: {', '.join(known)}")
    try:
        return cast(Strategy, TypeAdapter(kind).validate_python({**parameters, "name": name}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("profiles", name, *first["loc"]))
        raise FieldError(where, first["input"] if first["loc"] else parameters, first["msg"]) from None
