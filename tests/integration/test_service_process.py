"""A service as a process of its own: signals, exit codes, what it logs."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from shared.bus import Bus, Msg
from shared.testing.service_process import START_TIMEOUT_S
from shared.testing.wait import until

PROGRAM = """
import asyncio
from shared.effects import Reply
from shared.messages import Message
from shared.service import Listen, Service, run
from shared.settings import ServiceSettings

class Say(Message):
    text: str

class Core:
    def handle(self, event, now_us):
        if getattr(event, "message", None) is None:
            return []
        if event.message.text == "bug":
            raise RuntimeError("a bug")
        return [Reply(event.reply, event.message)]
    def check(self): ...
    def story(self, id): return []

SERVICE = Service("toy", "echoes", (Listen("echo", "request", Say, queue="toys"),))
asyncio.run(run(SERVICE, Core(), ServiceSettings()))
"""


class Process:
    """The toy, with what it wrote to stderr."""

    def __init__(self, folder: Path, nats_url: str) -> None:
        self.ready_file = folder / "ready"
        self._log = folder / "log"
        env = {
            "LAXITY_NATS_URL": nats_url,
            "LAXITY_READY_FILE": str(self.ready_file),
            "LAXITY_CHECK": "true",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        with self._log.open("wb") as log:
            self.child = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=log, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gone, also where the test failed half-way: a leaked process fails another test."""
        self.child.kill()
        self.child.wait()

    async def ready(self) -> None:
        await until(lambda: self.ready_file.exists() or self.child.poll() is not None, START_TIMEOUT_S)
        assert self.child.poll() is None, self._log.read_text()

    async def ended(self) -> int | None:
        await until(lambda: self.child.poll() is not None)
        return self.child.returncode

    def log(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_service_in_order_with_exit_code_0(
    bus: Bus, nats_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    with Process(tmp_path, nats_url) as toy:
        await toy.ready()
        assert isinstance(await bus.request("rt.echo", b'{"text": "x"}', 5_000_000), Msg)
        toy.child.send_signal(number)
        assert 0 == await toy.ended()
        assert ["ready", "draining", "stopped"] == [line["event"] for line in toy.log()]
        assert not toy.ready_file.exists()


async def test_a_bug_ends_the_process_with_exit_code_1_and_is_in_the_log(
    bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    with Process(tmp_path, nats_url) as toy:
        await toy.ready()
        await bus.publish("rt.echo", b'{"text": "bug"}')
        assert 1 == await toy.ended()
        (failed,) = [line for line in toy.log() if line["event"] == "service failed"]
        assert "a bug" in json.dumps(failed)


async def test_one_of_three_stopped_leaves_its_requests_unanswered_and_the_others_answer(
    bus: Bus, nats_url: str, tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        toys = [stack.enter_context(Process(tmp_path / name, nats_url)) for name in ("a", "b", "c")]
        for toy in toys:
            await toy.ready()
        toys[0].child.send_signal(signal.SIGSTOP)
        asked = [bus.request("rt.echo", b'{"text": "x"}', 1_000_000) for _ in range(60)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        toys[0].child.send_signal(signal.SIGCONT)
        answered = sum(isinstance(answer, Msg) for answer in answers)
        assert 20 <= answered < 60  # about a third goes to the one that stands still
        for toy in toys:
            toy.child.terminate()
            assert 0 == await toy.ended()
