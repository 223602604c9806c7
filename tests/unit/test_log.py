"""What a process logs, and where."""

from __future__ import annotations

import io

import pytest

from shared.log import configure, logger


def test_a_line_goes_to_the_stderr_of_now_also_where_that_of_the_start_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)
    configure()
    log = logger(service="toy")
    monkeypatch.setattr("sys.stderr", second)
    first.close()
    log.error("it goes on")
    assert "it goes on" in second.getvalue()
