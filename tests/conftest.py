"""What holds for every test: how hypothesis draws, and what is run once more. Fixtures are in shared/testing."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.kubernetes.fixtures import kube, machine

__all__ = ["kube", "machine"]

set_hypothesis_home_dir(Path(__file__).parents[1] / "build" / "hypothesis")

# The same draws in every run: a failure in CI is a failure here. No limit per example, since two busy
# cores make one of a few milliseconds take a hundred; the limit per test stands in pyproject.toml.
settings.register_profile("steady", derandomize=True, deadline=None, print_blob=True)
# HYPOTHESIS_PROFILE=explore looks for what the steady draws have not met.
settings.register_profile("explore", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

REAL = {"conformance", "integration", "e2e", "docker", "kubernetes"}
"""The folders whose tests run real processes: how these are scheduled is not ours to say."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A failed test with real processes is run once more; the summary names and counts it. No other test is."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in REAL:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How those failed that were run once more: without it nobody could mend them."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
