"""Whether anything that a hard test admits was ever late, in simulated devices: ``make bench-sound``.

Random containers are offered to many devices until these are nearly full, and what was admitted runs with the worst
releases that are known and with random ones. LAXITY_BENCH_SETS is how many sets in all, half of them gated and half
time-sliced; a tenth as many small sets of integers are simulated with all phases and compared with the exact test.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from bench.report import tell
from bench.sound_sets import gated_sets, single_devices, small_sets, time_sliced_sets

BATCH: Final = 4_000


def measure(sets: int, small: int, seed: int) -> Counter[str]:
    """Counts over all batches, each with a seed of its own; the kinds of sets take turns."""
    wanted: dict[str, tuple[Callable[[int, Random], Counter[str]], int]] = {
        "gated": (gated_sets, sets - sets // 2),
        "time_sliced": (time_sliced_sets, sets // 2),
        "small": (small_sets, small),
        "single": (single_devices, max(20, sets // 1_000)),
    }
    batches = -(-sets // (2 * BATCH))
    counts: Counter[str] = Counter()
    for batch in range(batches):
        for name, (run, number) in wanted.items():
            before_s = time.process_time()
            part = number * (batch + 1) // batches - number * batch // batches
            found = run(part, Random(f"{seed} {name} {batch}"))
            counts.update({f"{name}_{key}": value for key, value in found.items()})
            counts[f"{name}_cpu_ms"] += round((time.process_time() - before_s) * 1_000)
        if batch % 10 == 9:
            print(f"after {batch + 1} of {batches} batches: {dict(counts)}", flush=True)
    return counts


def report(counts: Counter[str]) -> None:
    missed = sum(counts[f"{name}_missed"] for name in ("gated", "time_sliced", "single"))
    tell(
        "sound",
        figures=counts,
        ratios={
            f"{name}_admitted_of_offered": round(counts[f"{name}_admitted"] / counts[f"{name}_offered"], 4)
            for name in ("gated", "time_sliced")
        },
        holds={
            "no admitted set misses": missed == 0,
            "the exact test agrees with all phases": counts["small_disagree"] == 0,
            "arrays agree with the test of one device": counts["gated_differ"] + counts["time_sliced_differ"] == 0,
        },
        notes="All simulated, in virtual time. Gated: each task in turn 1 ns before all others, up to the first idle "
        "moment (unseen: not within 4,000 jobs), and random releases. Time-sliced: each task in turn last in the ring, "
        "with as many always busy contexts as are admitted. Single: devices event by event, with host parts, segments, "
        "hand-over, overruns within the margin, soft containers. Small: integers, every phase of every task.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=int(os.environ.get("LAXITY_BENCH_SETS", "1000000")))
    parser.add_argument("--small", type=int, help="how many small sets; a tenth of the sets where not given")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    report(measure(args.sets, args.sets // 10 if args.small is None else args.small, args.seed))


if __name__ == "__main__":
    main()
