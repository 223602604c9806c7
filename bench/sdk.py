"""What marking a task costs the program that does it: `make bench-sdk`.

Begin and end of a task beside a span of OpenTelemetry with a batch processor and a timer of prometheus_client, each
around nothing, in turn. What taking records costs the monitor is told too, and what `laxity.h` costs.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import laxity
from bench.report import tell
from laxity import tasks
from services.monitor.rings import RingDirectory

ROUNDS: Final = 100
NUMBER: Final = 500
"""Of each way in a round: few, so that other load falls on all ways alike, and no span finds its queue full."""
SPAN_RATIO: Final = 12
MARKS_C: Final = Path(__file__).parents[1] / "tests" / "laxity_h" / "marks.c"


def scoped() -> None:
    with laxity.task("infer", deadline_us=50_000):
        pass


def explicit() -> None:
    laxity.begin("infer", deadline_us=50_000).end()


def nothing() -> None:
    pass


def per_call_ns(function: Callable[[], object], number: int = NUMBER) -> float:
    return timeit.timeit(function, number=number) / number * 1e9


@contextmanager
def span() -> Iterator[tuple[Callable[[], None], Callable[[], object]]]:
    """A span, given by the batch processor to an exporter that drops it; and how to wait for that."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Dropping(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:  # noqa: ARG002  # part of the interface
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    tracer = provider.get_tracer("bench")

    def spanned() -> None:
        with tracer.start_as_current_span("infer"):
            pass

    yield spanned, provider.force_flush
    provider.shutdown()


def timer() -> Callable[[], None]:
    from prometheus_client import CollectorRegistry, Histogram

    histogram = Histogram("infer_seconds", "bench", registry=CollectorRegistry())

    def timed() -> None:
        with histogram.time():
            pass

    return timed


def in_turn(ways: dict[str, Callable[[], None]], rest: Callable[[], object] = nothing) -> dict[str, list[float]]:
    """Nanoseconds of each, less those of an empty call; all ways once in each round. `rest` between any two."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        empty_ns = per_call_ns(nothing)
        for name, way in ways.items():
            took[name].append(per_call_ns(way) - empty_ns)
            rest()
    return took


def ratio(took: dict[str, list[float]], of: str, by: str) -> float:
    """The median of the rounds' ratios."""
    return median(one / other for one, other in zip(took[of], took[by], strict=True))


def reader_us(root: Path) -> dict[str, float]:
    """What the monitor pays: for a ring with nothing new, and for a thousand records."""
    directory = RingDirectory(root)
    try:
        (ring,) = directory.scan().new
        ring.read()
        quiet_ns = min(per_call_ns(ring.read) for _ in range(9))

        def marked() -> None:
            for _ in range(500):
                scoped()

        marks_ns = min(per_call_ns(marked, 20) for _ in range(9))
        both_ns = min(per_call_ns(lambda: (marked(), ring.read()), 20) for _ in range(9))
    finally:
        directory.close()
    return {"quiet_ring_us": round(quiet_ns / 1e3, 2), "thousand_records_us": round((both_ns - marks_ns) / 1e3, 1)}


def header_ns(folder: Path) -> float | None:
    """Begin and end by `laxity.h`, the median of several runs; None without a compiler."""
    if shutil.which("gcc") is None:
        return None
    program = folder / "marks"
    options = ["-O2", f"-I{Path(laxity.__file__).parent}", str(MARKS_C), "-o", str(program), "-pthread"]
    subprocess.run(["gcc", *options], check=True)
    run = functools.partial(subprocess.run, [program, "bench", "200000"], capture_output=True, text=True, check=True)
    return median(float(run().stdout) for _ in range(5))


def main() -> None:
    os.environ.pop("LAXITY_RING_DIR", None)
    without_ns = round(median(in_turn({"task": scoped})["task"]), 1)
    with tempfile.TemporaryDirectory() as name, span() as (spanned, flush):
        os.environ["LAXITY_RING_DIR"] = str(Path(name, "box"))
        Path(name, "box").mkdir()
        tasks._forget()  # noqa: SLF001 - a bench may start afresh
        ways = {"task": scoped, "begin_end": explicit, "span": spanned, "timer": timer()}
        took = in_turn(ways, flush)
        reader = reader_us(Path(name))
        native_ns = header_ns(Path(name))
    header = {} if native_ns is None else {"laxity_h_ns": native_ns}
    spans, timers = ratio(took, "span", "task"), ratio(took, "timer", "task")
    tell(
        "sdk",
        {f"{way}_ns": round(median(each), 1) for way, each in took.items()}
        | {"task_without_a_ring_ns": without_ns, "load_average": os.getloadavg()[0]}
        | header
        | reader,
        ratios={"span_over_task": round(spans, 2), "timer_over_task": round(timers, 3)},
        holds={
            f"a task costs at most 1/{SPAN_RATIO} of a span": spans >= SPAN_RATIO,
            "a task costs at most a histogram timer": timers >= 1,
        },
        notes="Real: one process and its ring; `with` around nothing, less an empty call, medians of rounds in turn. "
        "The span's exporter drops what it is given, and has done so before another way is measured.",
    )


if __name__ == "__main__":
    main()
