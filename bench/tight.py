"""How much of what the exact test admits the online tests admit, beside simpler rules: ``make bench-tight``.

Random sets for a gated device, of three forms: deadlines before, at, and after the end of the period. A rule that is
not sound is counted twice: what it admits of what can be admitted, and what it admits that must miss.
"""

from __future__ import annotations

import argparse
from collections import Counter
from math import exp, log
from random import Random
from typing import Final

from bench.report import tell
from shared.admission import GatedTotals, RtTask, Sharing, admit, gated_exact, gated_linear
from shared.messages import Regime

GATED: Final = Sharing(Regime.GATED)
FORMS: Final = ("shorter", "equal", "longer")
EXACT_STEPS: Final = 1_000_000
TARGET_OF_EXACT, TARGET_OVER_DENSITY = 0.9, 1.4


def drawn(form: str, chance: Random) -> list[RtTask]:
    """2 to 20 tasks that need 10 to 100 % of the device, shared out evenly at random.

    Periods are 10 ms and more, within one set up to twice to twenty times the shortest.
    """
    size, left, spread = chance.randint(2, 20), chance.uniform(0.1, 1.0), chance.uniform(log(2), log(20))
    tasks = []
    for number in range(size):
        rest = left * chance.random() ** (1 / (size - number - 1)) if number < size - 1 else 0.0
        period_us = round(10_000 * exp(chance.uniform(0, spread)))
        runtime_us = max(1, int(period_us * (left - rest)))
        factor = {"shorter": chance.uniform(0.5, 1), "equal": 1.0, "longer": chance.uniform(1, 3)}[form]
        tasks.append(RtTask("", runtime_us, period_us, max(1, round(period_us * factor)), gate=True))
        left = rest
    return tasks


def rules(tasks: list[RtTask]) -> dict[str, bool]:
    """Whether each rule admits the set. `online` is what a placer asks: the O(1), the O(n) and a bounded exact test."""
    totals = GatedTotals()
    for task in tasks:
        totals = totals.plus(task, GATED)
    return {
        "online": admit(GATED, tasks[:-1], tasks[-1]).admitted,
        "linear": gated_linear(tasks, GATED).admitted,
        "density_with_blocking": totals.fit(),
        "density": totals.density <= 1,
        "utilisation_95": sum(task.runtime_us / task.period_us for task in tasks) <= 0.95,
    }


def measure(sets: int, seed: int) -> Counter[str]:
    """Per form: sets, those that the exact test admits, and per rule what it admits of these and of the others."""
    counts: Counter[str] = Counter()
    for form in FORMS:
        chance = Random(f"{seed} {form}")
        for _ in range(sets // len(FORMS)):
            tasks = drawn(form, chance)
            exact = gated_exact(tasks, GATED, steps=EXACT_STEPS).admitted
            counts.update({f"{form}_sets": 1, f"{form}_exact": int(exact)})
            for rule, admits in rules(tasks).items():
                counts[f"{form}_{rule}_{'right' if exact else 'wrong'}"] += admits
    return counts


def total(counts: Counter[str], name: str) -> int:
    return sum(counts[f"{form}_{name}"] for form in FORMS)


def report(counts: Counter[str]) -> None:
    right = {rule: total(counts, f"{rule}_right") for rule in rules(drawn("equal", Random(0)))}
    wrong = {rule: total(counts, f"{rule}_wrong") for rule in right}
    exact, density = total(counts, "exact"), right["density_with_blocking"]
    ratios = {f"{rule}_of_exact": number / exact for rule, number in right.items()}
    for rule in ("online", "linear"):
        ratios |= {
            f"{rule}_of_exact_{form}": counts[f"{form}_{rule}_right"] / counts[f"{form}_exact"] for form in FORMS
        }
        ratios[f"{rule}_over_density_with_blocking"] = right[rule] / density
    tell(
        "tight",
        figures=dict(counts) | {f"{rule}_admits_what_must_miss": number for rule, number in wrong.items()},
        ratios={name: round(ratio, 4) for name, ratio in ratios.items()},
        holds={
            f"online at least {TARGET_OF_EXACT} of exact": right["online"] >= TARGET_OF_EXACT * exact,
            f"online at least {TARGET_OVER_DENSITY} times density": right["online"] >= TARGET_OVER_DENSITY * density,
            "online admits nothing that the exact test refuses": wrong["online"] == 0,
        },
        notes="Computed, no device. The density rule is the sound one for a gate, sum of C/min(D,T) at most "
        "1 - Cmax/Dmin; without blocking (density) and as a cap on utilisation (utilisation_95) it is not sound there, "
        "and what it admits that must miss stands in the figures.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    report(measure(args.sets, args.seed))


if __name__ == "__main__":
    main()
