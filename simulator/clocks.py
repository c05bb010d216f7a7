"""Clocks that are wrong on purpose, put in place of those of the module ``time`` in one rank.

Misleads nobody who reads ``time.perf_counter``, ``datetime.now()`` or a name imported before (``from time import
time``), and no wait: a time-out that the kernel measures takes as long as it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SkewedClocks:
    """The wall and the monotonic clock of one process.

    ``on_read`` is called with True at the first reading of the wall clock after a change of it, and with False at that
    of the monotonic clock.
    """

    def __init__(self, on_read: Callable[[bool], None]) -> None:
        self._wall_ns = self._monotonic_ns = 0
        self._on_read = on_read
        self._wall_changed = self._monotonic_changed = False
        self._time_ns, self._time_monotonic_ns = time.time_ns, time.monotonic_ns

    def shift(self, seconds: float) -> None:
        """Move the wall clock by ``seconds``; negative moves it backwards."""
        self._wall_ns += round(seconds * 1e9)
        self._wall_changed = True

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass at once, by both clocks."""
        self._wall_ns += round(seconds * 1e9)
        self._monotonic_ns += round(seconds * 1e9)
        self._wall_changed = self._monotonic_changed = True

    def install(self) -> None:
        """Replace the process's clocks for good: a rank's process lives for one run."""
        time.time_ns, time.monotonic_ns = self.time_ns, self.monotonic_ns
        time.time = lambda: self.time_ns() / 1e9
        time.monotonic = lambda: self.monotonic_ns() / 1e9

    def time_ns(self) -> int:
        if self._wall_changed:
            self._wall_changed = False
            self._on_read(True)
        return self._time_ns() + self._wall_ns

    def monotonic_ns(self) -> int:
        if self._monotonic_changed:
            self._monotonic_changed = False
            self._on_read(False)
        return self._time_monotonic_ns() + self._monotonic_ns
