"""The page on deadlines names functions that exist, and leaves none of the formulas' functions out."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from shared import admission, deadlines
from shared.admission import gated, kinds, tasks, time_sliced

PAGE = (Path(__file__).parents[2] / "docs" / "deadlines.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`((?:shared|services)\.[A-Za-z_.]+)`", PAGE)))

PUBLIC = {*admission.__all__, *(name for name in vars(deadlines) if not name.startswith("_"))}


def find(name: str) -> Any:
    """What a dotted name stands for; a field of a model stands for its declaration."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            fields = getattr(found, "model_fields", {})
            found = fields[part] if part in fields else getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_page_exists(name: str) -> None:
    assert find(name) is not None


def test_a_name_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(AttributeError):
        find("shared.deadlines.no_such_function")


@pytest.mark.parametrize("module", [deadlines, kinds, gated, time_sliced, tasks])
def test_every_public_function_of_the_formulas_is_on_the_page(module: Any) -> None:
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {name for name, value in functions if value.__module__ == module.__name__ and name in PUBLIC}
    assert set() == own - {name.split(".")[-1] for name in NAMES}
