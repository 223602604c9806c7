"""Allocation and fragmentation against arrived demand, by matplotlib, which is an extra: ``laxity[plots]``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cli.output import CommandError, Exit
from cli.simulate.result import Result
from shared.errors import FieldError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ENDINGS: Final = (".png", ".svg")


def check(file: Path) -> None:
    """Raises what would stop `plot`."""
    if file.suffix not in _ENDINGS:
        raise FieldError("--plot", file.name, f"a name that ends with {' or '.join(_ENDINGS)}")
    if find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'laxity[plots]'", Exit.USAGE)


def plot(file: Path, title: str, results: Sequence[Result]) -> None:
    """One line for each strategy; the same file for the same results."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "laxity", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        figure.suptitle(title)
        allocated, fragmented = figure.subplots(1, 2)
        _draw(allocated, "allocated", {each.strategy: each.curve.allocated for each in results})
        _draw(fragmented, "fragmented", {each.strategy: each.curve.fragmented for each in results})
        allocated.legend()
        undated: dict[str, Any] = {"Date": None} if file.suffix == ".svg" else {}
        figure.savefig(file, metadata=undated)


def _draw(axes: Axes, what: str, curves: dict[str, dict[int, float]]) -> None:
    for strategy, values in curves.items():
        axes.plot(list(values), list(values.values()), label=strategy, linewidth=1.2)
    axes.set_xlabel("arrived demand, % of all devices")
    axes.set_ylabel(f"{what}, % of all devices")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
