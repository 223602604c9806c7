"""Marks the tasks of a container that has deadlines; what is public lives here, how it is written does not.

>>> import laxity
>>> with laxity.task("infer", deadline_us=50_000):
...     pass

Without ``LAXITY_RING_DIR`` in the environment all of this does nothing and costs almost nothing.
"""

from laxity.gate import GateError
from laxity.records import COMPILED
from laxity.tasks import MAX_DEADLINE_US, enabled
from laxity.tasks import quick_begin as begin
from laxity.tasks import quick_task as task

__all__ = ["COMPILED", "MAX_DEADLINE_US", "GateError", "begin", "enabled", "task"]
