"""Nodes with a driver library without a GPU, for the tests that look at GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.monitor.probes.nvml_process import NvmlProcess
from tests.fake_nvml.build import FakeDriver, build_fake_nvml
from tests.gpu_node import DEADLINE_S, Node


@pytest.fixture(scope="module")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    folder = tmp_path_factory.mktemp("driver")
    made = FakeDriver(build_fake_nvml(folder), folder / "profile")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        yield made


@pytest.fixture
def nvml_driver(nvml_library: FakeDriver) -> FakeDriver:
    nvml_library.plays("h100")
    return nvml_library


@pytest.fixture(scope="module")
def nvml_process(nvml_library: FakeDriver) -> Iterator[NvmlProcess]:
    """One for all tests that do not need one of their own: starting one takes longer than all else."""
    made = NvmlProcess(DEADLINE_S, first_deadline_s=DEADLINE_S, pause_s=0.001)
    yield made
    made.restart()


@pytest.fixture
def node(nvml_driver: FakeDriver, nvml_process: NvmlProcess) -> Node:
    return Node(nvml_driver, nvml_process)


@pytest.fixture
def patient(nvml_driver: FakeDriver) -> Iterator[Node]:
    """One whose driver has little time, and which does not try again soon."""
    made = NvmlProcess(0.3, first_deadline_s=DEADLINE_S, pause_s=300)
    yield Node(nvml_driver, made)
    made.restart()


@pytest.fixture
def hasty(nvml_driver: FakeDriver) -> Iterator[Node]:
    """One whose driver has little time."""
    made = NvmlProcess(0.2, first_deadline_s=DEADLINE_S, pause_s=0.001)
    yield Node(nvml_driver, made)
    made.restart()
