"""The base of every message: how it is decoded, encoded, and how a wrong field is explained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from shared.errors import FieldError
from shared.subjects import MAX_NAME_BYTES, encode

MAX_BODY_BYTES = 256 * 1024
"""Largest body that a service of ours accepts."""


_set = object.__setattr__


def _checked_name(name: str) -> str:
    """Nothing is remembered: a cluster has more names than any cache would hold."""
    if len(name) > MAX_NAME_BYTES or not name.isascii():
        encode(name, "")
    return name


Name = Annotated[str, Field(min_length=1), AfterValidator(_checked_name)]
"""A name that can stand in a subject or a key: 1 to 253 bytes of UTF-8."""


class Message(BaseModel):
    """One JSON object on the bus or in a key-value bucket.

    Strict: a number in quotes is not a number, true is not 1, NaN is nothing. Fields that a reader does not know are
    ignored, so that optional ones can be added within v1. What was said is sent: a field that nobody set is left
    out, one that was set to None is written as null (unknown).
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """The message in ``body``; raises FieldError that names the field, what was found and what is allowed."""
        if len(body) > MAX_BODY_BYTES:
            raise FieldError("(body)", f"{len(body)} bytes", f"at most {MAX_BODY_BYTES} bytes")
        return cls._parsed(body)

    @classmethod
    def trusted(cls, body: bytes) -> Self:
        """As from_json without the limit on size, for what one of our services wrote (checkpoints, node keys)."""
        return cls._parsed(body)

    @classmethod
    def _parsed(cls, body: bytes) -> Self:
        if not body:
            raise FieldError("(body)", "nothing", "a JSON object")
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise explain(cls, error) from None

    def to_json(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True, by_alias=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As the library's, which also looks after what no message has: private and extra fields."""
        if deep:
            return super().model_copy(update=update, deep=True)
        made, changes = self.__new__(type(self)), update or {}
        _set(made, "__dict__", {**self.__dict__, **changes})
        _set(made, "__pydantic_fields_set__", self.__pydantic_fields_set__.union(changes))
        _set(made, "__pydantic_extra__", None)
        _set(made, "__pydantic_private__", None)
        return made


class Own(Message):
    """A message that our own code makes, many times for each request, of what was checked before.

    Made, it is not checked once more: its types are mypy's. Read, it is checked as any other.
    """

    _unsaid: ClassVar[dict[str, Any]] = {}
    """Of each field, in order, its default; of one that is always said anything."""

    def __init__(self, **said: Any) -> None:
        _set(self, "__dict__", {**self._unsaid, **said})
        _set(self, "__pydantic_fields_set__", set(said))
        _set(self, "__pydantic_extra__", None)
        _set(self, "__pydantic_private__", None)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # pydantic's mark: not called for what is read

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._unsaid = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}


def explain(model: type[BaseModel], error: ValidationError) -> FieldError:
    """The first fault of a body, in terms of its fields."""
    first = error.errors(include_url=False)[0]
    if isinstance(cause := first.get("ctx", {}).get("error"), FieldError):
        place = [*first["loc"], *([cause.field] if cause.field else [])]
        return FieldError(_path(place), cause.found, cause.allowed)
    if first["type"] in {"json_invalid", "model_type", "model_attributes_type"} and not first["loc"]:
        return FieldError("(body)", _found_body(first), "a JSON object")
    return FieldError(_path(first["loc"]), _found(first), _allowed(model, first))


def _path(loc: Iterable[int | str]) -> str:
    """``gpu.share``, ``volumes[0].target``: union branches that pydantic adds to the place are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _is_branch(part):
            path += f".{part}" if path else part
    return path or "(body)"


def _is_branch(part: str) -> bool:
    """True for what pydantic adds for the branch of a union: ``str``, ``Secret``, ``tuple[str, ...]``."""
    models = (*Message.__subclasses__(), *Own.__subclasses__())
    return part in {"str", "int", "float"} or "[" in part or part in {model.__name__ for model in models}


def _found_body(error: ErrorDetails) -> str:
    return f"{error['msg']}" if error["type"] == "json_invalid" else repr(error["input"])


def _found(error: ErrorDetails) -> object:
    return "nothing" if error["type"] == "missing" else error["input"]


_WORDS: dict[type, str] = {
    Gt: "above {}",
    Ge: "at least {}",
    Lt: "below {}",
    Le: "at most {}",
    MinLen: "at least {} long",
    MaxLen: "at most {} long",
}
_NAMES: dict[type, str] = {Gt: "gt", Ge: "ge", Lt: "lt", Le: "le", MinLen: "min_length", MaxLen: "max_length"}
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "missing": "a value: this field is required",
}


def _allowed(model: type[BaseModel], error: ErrorDetails) -> str:
    bounds = _bounds(model, error["loc"])
    kind = _TYPES.get(error["type"])
    if kind is None and (expected := error.get("ctx", {}).get("expected")):
        return str(expected)
    if kind is None:
        return bounds or error["msg"]
    return f"{kind}, {bounds}" if bounds and error["type"] != "missing" else kind


def _bounds(model: type[BaseModel], loc: Iterable[int | str]) -> str:
    """The limits declared on the field at ``loc``: ``above 0, at most 1``."""
    metadata: list[Any] = []
    current: type[BaseModel] | None = model
    for part in loc:
        if current is None or part not in current.model_fields:
            continue
        field = current.model_fields[str(part)]
        metadata = field.metadata
        current = _model_in(field.annotation)
    return ", ".join(_WORDS[type(m)].format(getattr(m, _NAMES[type(m)])) for m in metadata if type(m) in _WORDS)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside ``Model``, ``Model | None`` or ``tuple[Model, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if found := _model_in(inner):
            return found
    return None
