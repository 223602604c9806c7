"""The test of time-sliced devices: a cap on contexts (THEORY section 1)."""

from collections.abc import Sequence

from shared.admission.tasks import RtTask, Sharing, Verdict, refused, room
from shared.messages import Kind
from shared.units import format_us


def slices(task: RtTask, slice_us: int) -> int:
    """N, how many slices one task needs at most: the sum of ceil(G / L) over its device parts G.

    An overrun lengthens any of the parts, each by some of it.
    """
    parts, over_us = task.parts(), task.overrun_us
    more = (over_us + min(len(parts), over_us) * (slice_us - 1)) // slice_us
    return sum(-(-part // slice_us) for part in parts) + more


def response_bound_us(task: RtTask, neighbours: int, slice_us: int, switch_us: int) -> int:
    """R(nu) = H + G + theta N + (L + theta) nu N, the longest response beside nu other contexts.

    Source: Wang, Liu, Wong, Kim, GCAPS, ECRTS 2024, Eqs. 1-5 and 15 (THEORY section 1).
    Assumes round robin with slice L, switch cost theta, D <= T, one task outstanding per container.
    """
    count = slices(task, slice_us)
    own = task.host_us + task.runtime_us + task.overrun_us + switch_us * count
    return own + (slice_us + switch_us) * neighbours * count


def nu_max(task: RtTask, slice_us: int, switch_us: int) -> int:
    """The most other contexts beside which the task still meets its deadline; negative: not even alone."""
    left_us = task.deadline_us - response_bound_us(task, 0, slice_us, switch_us)
    return left_us // ((slice_us + switch_us) * slices(task, slice_us))


def time_sliced(sharing: Sharing, residents: Sequence[RtTask], newcomer: RtTask, contexts: int) -> Verdict:
    """Section 1: the number of other contexts is at most nu_max of everyone to whom something is promised."""
    promised = [task for task in residents if task.kind is not Kind.SOFT]
    return sliced(sharing, [*promised, newcomer], len(residents) + contexts)


def sliced(sharing: Sharing, promised: Sequence[RtTask], neighbours: int) -> Verdict:
    """Whether all to whom something is promised meet their deadlines, each beside so many other contexts."""
    measured = sharing.measured()
    if measured is None:
        return refused("slice and switch cost of the device were not measured", "time-sliced")
    for task in promised:
        if task.deadline_us > task.period_us:
            reason = f"deadline {format_us(task.deadline_us)} of {task.name} is over its period"
            return refused(f"{reason} {format_us(task.period_us)}: the test does not cover it", "time-sliced")
    slack, task = min(
        ((t.deadline_us - response_bound_us(t, neighbours, *measured), t) for t in promised), key=lambda p: p[0]
    )
    text = f"{task.name} needs {format_us(task.deadline_us - slack)} of {format_us(task.deadline_us)}"
    most = max(0, nu_max(task, *measured))
    text = f"{text} beside {neighbours} other contexts, at most {most} fit"
    late = task.name if slack < 0 else None
    return Verdict(slack >= 0, "time-sliced", slack, f"{text}: {room(slack)}", late=late)
