"""The documents say what the code does, and a schema of v1 only ever grows optional fields."""

import json
from typing import Any

import jsonschema
import pytest

from cli.generate_docs import CONTRACT, asyncapi, documents, incompatible, schema
from shared.messages import Message
from tests.e2e.mutations import SAMPLES, sample


def test_every_generated_document_is_up_to_date() -> None:
    stale = [path.name for path, text in documents().items() if not path.exists() or path.read_text() != text]
    assert stale == []


@pytest.mark.parametrize("model", CONTRACT, ids=lambda model: model.__name__)
def test_every_message_has_a_golden_sample_that_its_schema_accepts(model: type[Message]) -> None:
    names = [path.stem for path in SAMPLES.glob(f"{model.__name__}*.json") if path.stem.split(".")[0] == model.__name__]
    assert names
    for name in names:
        jsonschema.validate(json.loads(sample(name)), schema(model))


OLD = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "$defs": {"S": {"enum": ["x", "y"]}}}


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (OLD, []),
        (OLD | {"properties": {"a": {"type": "integer", "description": "said better"}}}, []),
        (OLD | {"properties": OLD["properties"] | {"b": {"type": "string"}}}, []),  # type: ignore[operator]
        (OLD | {"required": ["a", "b"]}, ["b became required"]),
        (OLD | {"properties": {}}, ["a is gone"]),
        (OLD | {"properties": {"a": {"type": "string"}}}, ["a changed"]),
        (OLD | {"$defs": {"S": {"enum": ["x"]}}}, ["S.y is no value any more"]),
        (OLD | {"$defs": {"S": {"enum": ["x", "y", "z"]}}}, []),
    ],
)
def test_a_schema_may_only_grow_optional_fields_and_values(new: dict[str, Any], expected: list[str]) -> None:
    assert incompatible(OLD, new) == expected


def test_asyncapi_names_every_subject_of_the_contract() -> None:
    addresses = {channel["address"] for channel in asyncapi()["channels"].values()}
    assert addresses >= {
        "rt.place",
        "rt.confirm",
        "rt.release",
        "rt.nodes",
        "rt.metrics.{node}",
        "rt.events.place.{request}",
        "rt.events.task.{node}",
        "rt.events.deadline.{node}.{container}",
        "rt.events.node.{node}",
    }


def test_every_reference_inside_the_asyncapi_document_leads_somewhere() -> None:
    document = asyncapi()

    def refs(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for inner in value.values() for ref in refs(inner)]
        return [ref for inner in value for ref in refs(inner)] if isinstance(value, list) else []

    def found(ref: str) -> bool:
        at: Any = document
        for part in ref.removeprefix("#/").split("/"):
            if part not in at:
                return False
            at = at[part]
        return True

    assert [ref for ref in set(refs(document)) if not found(ref)] == []
