"""Memory for what is read, used again: to touch fresh pages takes as long as to read into them."""

from __future__ import annotations

from typing import Any

import numpy as np


class Buffers:
    """Hands out memory for one range at a time, and takes it back. Safe between threads."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: bytes of a buffer. Ranges that would fill less than half of one get memory of their own, so
                that many small ones do not take many times their size; so do longer ones.
        """
        self._size = size
        self._free: list[np.ndarray[Any, Any]] = []

    def take(self, length: int) -> memoryview:
        """Memory of ``length`` bytes, filled with anything."""
        if not self._size // 2 < length <= self._size:
            return np.empty(length, np.uint8).data
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self._size, np.uint8)
        return buffer.data[:length]

    def give_back(self, memory: memoryview) -> None:
        """What `take` gave will be given to others: it must be used no more."""
        buffer = memory.obj
        if isinstance(buffer, np.ndarray) and buffer.nbytes == self._size:
            self._free.append(buffer)
