"""A container of `bench-utilisation-real`: computes for its runtime once a period, each time as one task.

Its releases are at multiples of its period plus its phase, by the clock that all of the machine share.
"""

import sys
import time

import laxity

WORK_RATIO = 0.95
"""Of the declared runtime, in processor time; the rest is for the loop around it."""


def main() -> None:
    runtime_us, period_us, phase_us = map(int, sys.argv[1:])
    while True:
        now_us = time.monotonic_ns() // 1_000
        time.sleep((period_us - (now_us - phase_us) % period_us) / 1e6)
        with laxity.task("work"):
            until_ns = time.thread_time_ns() + int(runtime_us * WORK_RATIO * 1_000)
            while time.thread_time_ns() < until_ns:
                pass


if __name__ == "__main__":
    main()
