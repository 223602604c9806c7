"""How far a pull is, from what an engine says of it; without an engine."""

import json
from typing import Any

from services.placer.backends.docker_spec import PullProgress

MIB = 1 << 20


def after(*lines: dict[str, Any] | bytes) -> str:
    progress = PullProgress("r.example/a:1")
    for line in lines:
        progress.take(line if isinstance(line, bytes) else json.dumps(line).encode())
    return progress.text.removeprefix("image r.example/a:1: ")


def of(layer: str, status: str, current: int | None = None, total: int | None = None) -> dict[str, Any]:
    numbers = {name: number for name, number in (("current", current), ("total", total)) if number is not None}
    return {"status": status, "progressDetail": numbers, "id": layer}


def test_bytes_and_layers_are_counted_over_all_layers() -> None:
    assert "41 of 120 MiB, 1 of 3 layers" == after(
        {"status": "Pulling from a", "id": "1"},
        *(of(layer, "Pulling fs layer") for layer in "abc"),
        of("a", "Downloading", 10 * MIB, 20 * MIB),
        of("b", "Downloading", 1, 40 * MIB),
        of("c", "Downloading", 10 * MIB, 60 * MIB),
        of("a", "Download complete"),
        of("b", "Downloading", 11 * MIB, 40 * MIB),
        of("a", "Extracting", 1 * MIB, 20 * MIB),
        of("a", "Pull complete"),
    )


def test_what_is_not_known_is_said_to_be_unknown_and_never_nothing() -> None:
    assert "unknown size, unknown layers" == after()
    assert "unknown size, 0 of 2 layers" == after(of("a", "Pulling fs layer"), of("b", "Waiting"))
    waits = (of("a", "Pulling fs layer"), of("b", "Downloading", 5 * MIB, 9 * MIB))
    assert "5 MiB of unknown size, 0 of 2 layers" == after(*waits)


def test_a_total_that_the_registry_does_not_tell_stays_unknown() -> None:
    for total in (-1, 0, None):
        assert "3 MiB of unknown size, 0 of 1 layers" == after(of("a", "Downloading", 3 * MIB, total))
    done = (of("a", "Downloading", 3 * MIB, -1), of("a", "Download complete"), of("a", "Pull complete"))
    assert "3 MiB of unknown size, 1 of 1 layers" == after(*done)


def test_a_layer_that_was_there_is_done_and_not_fetched() -> None:
    assert "nothing to fetch, 2 of 2 layers" == after(of("a", "Already exists"), of("b", "Already exists"))
    assert "0.5 of 1 MiB, 1 of 2 layers" == after(of("a", "Already exists"), of("b", "Downloading", MIB // 2, MIB))


def test_small_images_are_not_rounded_to_nothing() -> None:
    assert "0.0098 of 0.02 MiB, 0 of 1 layers" == after(of("a", "Downloading", 10_240, 20_480))


def test_lines_of_another_form_change_nothing() -> None:
    odd: list[dict[str, Any] | bytes] = [
        b"",
        b"[1]",
        b"\xff",
        b'{"status": "Downl',
        {"status": "Status: Image is up to date"},
        {"status": 3, "id": "a"},
        {"status": "Downloading", "id": 3},
        {"status": "Layer already exists", "id": "a"},
    ]
    assert "unknown size, unknown layers" == after(*odd)
    strange = {"status": "Downloading", "id": "a", "progressDetail": {"current": "x", "total": [1]}}
    assert "unknown size, 0 of 1 layers" == after(strange)
    assert "unknown size, 0 of 1 layers" == after(strange | {"progressDetail": None})
