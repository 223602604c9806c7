"""Requests as people write them: what becomes of each word, and how a mistake is explained."""

from pathlib import Path

import pytest

from cli.request_file import parse, read
from shared.errors import FieldError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
NOW_US = 1_700_000_000_000_000


def test_units_become_whole_numbers_exactly() -> None:
    request = parse(
        """
        command: [serve]
        cpu: 500m
        memory: 1Gi
        shm: 1G
        hold: 1.5s
        place_by: +30s
        gpu: {share: 0.25, memory: 4Gi}
        realtime: {deadline: 50ms, period: 0.1s, runtime: 750us, host: 2ms}
        """,
        NOW_US,
    )
    assert request.gpu is not None
    assert request.realtime is not None
    assert (500, 1024, 954, 1_500_000) == (request.cpu_milli, request.memory_mib, request.shm_mib, request.hold_us)
    assert NOW_US + 30_000_000 == request.place_by_us
    assert (0.25, 4096) == (request.gpu.share, request.gpu.memory_mib)
    timing = request.realtime
    assert (50_000, 100_000, 750, 2_000) == (timing.deadline_us, timing.period_us, timing.runtime_us, timing.host_us)


def test_plain_numbers_of_cores_are_cores() -> None:
    assert 1500 == parse("command: [x]\ncpu: 1.5", NOW_US).cpu_milli


def test_the_words_of_the_message_are_taken_as_well() -> None:
    request = parse("command: [x]\ncpu_milli: 3\nmemory_mib: 4\nplace_by_us: 5", NOW_US)
    assert (3, 4, 5) == (request.cpu_milli, request.memory_mib, request.place_by_us)


def test_an_id_is_made_up_from_the_name_and_differs_each_time() -> None:
    first, second = (parse("name: größer als / alles\ncommand: [x]", NOW_US).request_id for _ in range(2))
    assert first is not None
    assert first.startswith("gr-er-als-alles-")
    assert first != second


def test_an_id_that_was_given_stays() -> None:
    assert "mine" == parse("request_id: mine\ncommand: [x]", NOW_US).request_id


@pytest.mark.parametrize(
    "text, field, found",
    [
        ("command: [x]\nmemry: 1Gi", "memry", "a field that does not exist"),
        ("command: [x]\ngpu: {sharing: 1}", "gpu.sharing", "a field that does not exist"),
        ("command: [x]\ncpu: 1\ncpu_milli: 5", "cpu", "also cpu_milli"),
        ("command: [x]\ncpu: 1\ncpu: 2", "cpu", "twice, again in line 3"),
        ("command: [x]\nmemory: 400m", "memory", "400m"),
        ("command: [x]\nmemory: [1]", "memory", "[1]"),
        ("command: [x]\nhold: 30", "hold", "30"),
        ("command: [x]\nplace_by: soon", "place_by", "soon"),
        ("command: [x]\ngpu: {}\nrealtime: {deadline: 50}", "realtime.deadline", "50"),
        ("command: [x]\ngpu: {share: 1.5}", "gpu.share", "1.5"),
        ("command: [x]\ngpu: {share: .nan}", "(file)", "Out of range float values are not JSON compliant"),
        ("command: [x]\nenv: {N: 5}", "env.N", "5"),
        ("just text", "(file)", "just text"),
        ("a: [1", "(file)", "expected ',' or ']', but got '<stream end>', line 1"),
        ("a: 1\n---\nb: 2", "(file)", "but found another document, line 2"),
        ("", "(file)", "None"),
        ("command: [x]\nvalue: !!python/name:os.system", "(file)", ""),
    ],
)
def test_a_mistake_names_its_field_and_what_was_found(text: str, field: str, found: str) -> None:
    with pytest.raises(FieldError) as error:
        parse(text, NOW_US)
    assert field == error.value.field
    assert error.value.found.startswith(found)
    assert error.value.allowed


def test_a_file_that_is_not_there_or_is_no_text_is_a_mistake_too(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, found in (("absent", "No such file or directory"), ("bytes", "bytes that are no text")):
        with pytest.raises(FieldError) as error:
            read(tmp_path / name, NOW_US)
        assert ("(file)", found) == (error.value.field, error.value.found)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_request_named_as_its_file(path: Path) -> None:
    request = read(path, NOW_US)
    assert (path.stem, path.stem) == (request.name, request.request_id)
