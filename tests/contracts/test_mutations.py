"""Whatever comes in is either a message or a fault with field, found and allowed; never another exception."""

import random

import pytest

from shared import messages
from shared.errors import FieldError
from tests.e2e.mutations import SAMPLES, mutated, sample

NAMES = sorted(path.stem for path in SAMPLES.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_message_is_read_or_refused_in_plain_words(name: str) -> None:
    rng, model = random.Random(name), getattr(messages, name.partition(".")[0])
    faults: list[FieldError] = []
    for _ in range(300):
        try:
            model.from_json(mutated(sample(name), rng)).to_json()
        except FieldError as fault:
            faults.append(fault)
    assert faults
    assert [fault for fault in faults if not (fault.field and fault.allowed)] == []
