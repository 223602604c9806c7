"""What is compiled of a table; kernels.py calls it."""

from services.placer.core.columns import Array, Floats

def refresh(*arrays: Array) -> bytes:
    """Writes options; the kinds of load that had to be known and are not, as int64: what is there is wrong then."""

def best(options: Floats, ties: Array, keys: int, device: int) -> tuple[int, int]:
    """The best two nodes, -1 for none; `device` is the line of options with the device rows, 0 for none."""
