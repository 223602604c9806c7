"""What marking a task costs its container and what taking records costs the monitor: `python bench/sdk.py`."""

import functools
import os
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import laxity
from laxity import tasks
from services.monitor.rings import RingDirectory


def nanoseconds(function: Callable[[], object], number: int = 50_000) -> int:
    return round(min(timeit.repeat(function, number=number, repeat=9)) / number * 1e9)


def scoped() -> None:
    with laxity.task("infer", deadline_us=50_000):
        pass


def mark(count: int) -> int:
    for _ in range(count):
        scoped()
    return count


def explicit() -> None:
    laxity.begin("infer", deadline_us=50_000).end()


def nothing() -> None:
    pass


def writer(label: str) -> None:
    print(f"{label}: with {nanoseconds(scoped)} ns, begin and end {nanoseconds(explicit)} ns")


def reader(root: Path) -> None:
    directory = RingDirectory(root)
    (ring,) = directory.scan().new
    ring.read()
    print(f"reader: quiet ring {nanoseconds(ring.read)} ns, writer_gone {nanoseconds(ring.writer_gone)} ns")
    for count in (1, 10, 100, 1000):
        many = functools.partial(mark, count)
        both = nanoseconds(lambda many=many: (many(), ring.read()), 20) - nanoseconds(many, 20)  # type: ignore[misc]
        print(f"reader: {2 * count} records in {both / 1000:.0f} us")
    directory.close()


def main() -> None:
    print(f"an empty function: {nanoseconds(nothing)} ns")
    os.environ.pop("LAXITY_RING_DIR", None)
    writer("without a ring")
    with tempfile.TemporaryDirectory() as root:
        os.environ["LAXITY_RING_DIR"] = str(Path(root, "box"))
        Path(root, "box").mkdir()
        tasks._forget()  # noqa: SLF001 - a bench may start afresh
        writer("with a ring")
        reader(Path(root))


if __name__ == "__main__":
    main()
