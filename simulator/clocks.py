"""A wall clock that is wrong on purpose, put in place of ``time.time`` and ``time.time_ns`` of one rank.

Misleads nobody who reads ``time.monotonic``, ``datetime.now()`` or a name imported before (``from time import time``).
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SkewedClock:
    """``offset_s`` is added to every reading; ``on_read`` is told about the first reading after each change of it."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._offset_ns = 0
        self._on_read = on_read
        self._changed = False
        self._time_ns = time.time_ns

    def shift(self, seconds: float) -> None:
        """Move the clock by ``seconds``; negative moves it backwards."""
        self._offset_ns += round(seconds * 1e9)
        self._changed = True

    def install(self) -> None:
        """Replace the process's wall clock for good: a rank's process lives for one run."""
        time.time_ns = self.time_ns
        time.time = lambda: self.time_ns() / 1e9

    def time_ns(self) -> int:
        if self._changed:
            self._changed = False
            self._on_read()
        return self._time_ns() + self._offset_ns
