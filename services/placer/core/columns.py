"""Columns of numbers that grow together, and a view of some of their rows; knows nothing of nodes or devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Columns:
    """A struct of arrays. Rows are handed out in runs and given back; a run given back is used again.

    A column of kind `(kind, (n,))` has n numbers in each row. `parts` gives some of these numbers names of their own,
    as `(column, place)`: what is always written together costs one write then.
    """

    def __init__(self, kinds: Mapping[str, Any], parts: Mapping[str, tuple[str, int | slice]] | None = None) -> None:
        self.kinds = kinds
        self._parts = parts or {}
        self.arrays: dict[str, Array] = {name: np.zeros(64, kind) for name, kind in kinds.items()}
        """As they are now, for who looks at several of them often: they are others once the columns have grown."""
        self._look()
        self._end = 0
        self._spare: dict[int, list[range]] = {}

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __len__(self) -> int:
        """How many rows were ever handed out; those given back are among them."""
        return self._end

    def take(self, count: int) -> range:
        """A run of `count` rows; what stands in them is old."""
        if runs := self._spare.get(count):
            return runs.pop()
        rows = range(self._end, self._end + count)
        self._end = rows.stop
        size = len(next(iter(self.arrays.values())))
        if self._end > size:
            extra = max(size, self._end - size)
            for name in self.kinds:
                column = self.arrays[name]
                more = np.zeros((extra, *column.shape[1:]), column.dtype)
                self.arrays[name] = np.concatenate([column, more])
            self._look()
        return rows

    def _look(self) -> None:
        """Parts are views of their columns."""
        self.arrays.update({name: self.arrays[column][:, place] for name, (column, place) in self._parts.items()})

    def give_back(self, rows: range) -> None:
        self._spare.setdefault(len(rows), []).append(rows)

    def widen(self, name: str, width: int) -> None:
        """Gives each row of a column of several numbers at least so many, the new ones 0."""
        column = self.arrays[name]
        if (more := width - column.shape[1]) > 0:
            self.arrays[name] = np.pad(column, ((0, 0), (0, more)))
            self._look()

    def write(self, rows: range, **values: Any) -> None:
        """Sets some columns of a run, each from one value or from a list of as many as there are rows."""
        for name, value in values.items():
            self.arrays[name][rows.start : rows.stop] = value


def name_hash(name: str) -> int:
    """The same number for the same name in every process: breaks ties."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
