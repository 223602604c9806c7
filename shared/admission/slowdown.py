"""By how much neighbours slow a task down: what was seen beside some sets of them, composed for sets not seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from math import exp, log

import numpy as np

Beside = tuple[str, ...]
"""The profiles of the others on the device, in order, each as often as it is there."""


class Way(StrEnum):
    """How the slowdowns of neighbours compose."""

    ADDED = "added"
    """Each adds its part of the time alone: s = 1 + Σ e_j."""
    MULTIPLIED = "multiplied"
    """Each multiplies the time: s = Π f_j."""


def composed_us(seen: Mapping[Beside, float], beside: Beside, way: Way) -> float | None:
    """A time (a quantile of them) beside a set of neighbours, from those beside other sets, by weighted least squares.

    The time alone need not have been seen. None where what was seen does not determine it (a neighbour that was never
    there, or two that always were together), or where there would be two neighbours more than ever.
    Never below the time beside some of these neighbours: nobody speeds another one up.
    """
    if len(beside) > 1 + max(map(len, seen), default=-1):
        return None
    names = sorted({name for each in seen for name in each} | set(beside))
    rows = np.array([[1, *map(each.count, names)] for each in (*seen, beside)], np.float64)
    asked, times = rows[-1], np.array(list(seen.values()), np.float64)
    weight = 1 / times if way is Way.ADDED else np.ones(len(times))  # errors are relative in both ways
    rows = rows[:-1] * weight[:, None]
    solving = asked @ np.linalg.pinv(rows)
    if not np.allclose(solving @ rows, asked):
        return None
    found = float(solving @ (times * weight if way is Way.ADDED else np.log(times)))
    least = max((time for each, time in seen.items() if not Counter(each) - Counter(beside)), default=0)
    return max(least, found if way is Way.ADDED else exp(found)) or None


def left_out(seen: Mapping[Beside, float], way: Way) -> dict[Beside, float]:
    """Of each set of neighbours what the others say of it, where they determine it: so composing errs."""
    found = {each: composed_us({k: v for k, v in seen.items() if k != each}, each, way) for each in seen}
    return {each: time for each, time in found.items() if time}


def error(seen: Mapping[Beside, float], predicted: Mapping[Beside, float]) -> float:
    """The sum of the relative errors, as logarithms."""
    return sum(abs(log(predicted[each] / seen[each])) for each in predicted)
