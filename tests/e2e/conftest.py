"""Fixtures of the tests from outside: whole clusters, as ``laxity up`` runs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.embedded import Embedded


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Embedded]:
    """One real node, one fake one, two placers; streams in files, since servers are killed."""
    with Embedded(tmp_path, "--fake-nodes", "1", "--placers", "2") as embedded:
        yield embedded
