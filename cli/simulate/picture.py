"""Who is on which device at the end, as a small SVG: for clusters that one can look at, and for the documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from cli.simulate.play import WAITING, Played
from shared.messages import SHARE_WHOLE_MICRO

_STEP: Final = 18
"""Pixels from one device, or one line, to the next; a device is a square of 4 less."""
_NAMES: Final = 64
_COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
_STYLE: Final = "text{font:12px sans-serif;fill:#222}rect{stroke:#888}"


def picture(played: Sequence[Played]) -> str:
    """A block for each strategy: a line for each node, a square for each device, and who waits.

    Each request that is still there has a colour, in order of arrival, and fills its part of each of its devices.
    """
    nodes = played[0].world.nodes
    most = max((len(facts.devices) for facts in nodes), default=0)
    width, height = _NAMES + (most + 1) * _STEP, (len(nodes) + 1) * _STEP
    size = f'width="{width * len(played)}" height="{height}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{_STYLE}</style>"]
    for place, each in enumerate(played):
        lines += [f'<g transform="translate({place * width},0)">', *_block(each), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _block(played: Played) -> Iterator[str]:
    yield _text(0, 1, played.world.strategy)
    held = _held(played)
    here = sorted({number for on_device in held.values() for number, _ in on_device})
    for line, facts in enumerate(played.world.nodes, 2):
        yield _text(0, line, facts.node)
        for place, device in enumerate(facts.devices):
            yield _bar(place, line, SHARE_WHOLE_MICRO, "#fff")
            taken = 0
            for number, share_micro in held[device.uuid]:
                yield _bar(place, line, share_micro, _COLOURS[here.index(number) % len(_COLOURS)], taken)
                taken += share_micro
    waiting = [arrival.name for arrival, fate in zip(played.arrivals, played.fates, strict=True) if fate == WAITING]
    if waiting:
        yield _text(_NAMES, 1, f"waiting: {', '.join(waiting)}")


def _held(played: Played) -> dict[str, list[tuple[int, int]]]:
    """By device, the numbers of the requests that are on it at the end, and their shares in millionths."""
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for facts in played.world.nodes:
        for reservation in played.world.cluster.reservations(facts.node):
            for uuid in reservation.devices:
                held[uuid].append((int(reservation.request_id), reservation.share_micro))
    return held


def _text(x: int, line: int, text: str) -> str:
    return f'<text x="{x}" y="{line * _STEP - 6}">{escape(text)}</text>'


def _bar(place: int, line: int, share_micro: int, colour: str, taken_micro: int = 0) -> str:
    side = _STEP - 4
    x = _NAMES + place * _STEP + taken_micro * side / SHARE_WHOLE_MICRO
    width = share_micro * side / SHARE_WHOLE_MICRO
    return f'<rect x="{x:g}" y="{(line - 1) * _STEP}" width="{width:g}" height="{side}" fill="{colour}"/>'
