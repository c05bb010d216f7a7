"""Clocks that are wrong on purpose, put in place of those of the module ``time`` in one rank.

Misleads nobody who reads ``time.perf_counter``, ``datetime.now()`` or a name imported before (``from time import
time``), and no wait: a time-out that the kernel measures takes as long as it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SkewedClocks:
    """The wall and the monotonic clock of one process, as they are until they are told to be wrong.

    ``on_read`` is called with True at the first reading of the wall clock after a change of it, and with False at that
    of the monotonic clock.
    """

    def __init__(self, on_read: Callable[[bool], None]) -> None:
        self._wall_ns = self._monotonic_ns = 0
        self._on_read = on_read
        self._wall_changed = self._monotonic_changed = False
        self._time_ns, self._time_monotonic_ns = time.time_ns, time.monotonic_ns
        self._ppm, self._since_ns, self._gained_ns = 0.0, 0, 0
        self._frozen_ns: int | None = None

    def shift(self, seconds: float) -> None:
        """Move the wall clock by ``seconds``; negative moves it backwards."""
        self._wall_ns += round(seconds * 1e9)
        self._wall_changed = True

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass at once, by both clocks; a frozen one stays where it is."""
        if self._frozen_ns is None:
            self._wall_ns += round(seconds * 1e9)
        self._monotonic_ns += round(seconds * 1e9)
        self._wall_changed = self._monotonic_changed = True

    def drift(self, ppm: float) -> None:
        """Let both clocks run so many parts in a million too fast from now on."""
        self._gained_ns, self._since_ns, self._ppm = self._drifted_ns(), self._time_monotonic_ns(), ppm
        self._wall_changed = self._monotonic_changed = True

    def _drifted_ns(self) -> int:
        return self._gained_ns + int((self._time_monotonic_ns() - self._since_ns) * self._ppm / 1e6)

    def freeze(self) -> None:
        """Let the wall clock stand still from now on."""
        self._frozen_ns = self._time_ns() + self._drifted_ns()
        self._wall_changed = True

    def install(self) -> None:
        """Replace the process's clocks for good: a rank's process lives for one run."""
        time.time_ns, time.monotonic_ns = self.time_ns, self.monotonic_ns
        time.time = lambda: self.time_ns() / 1e9
        time.monotonic = lambda: self.monotonic_ns() / 1e9

    def time_ns(self) -> int:
        if self._wall_changed:
            self._wall_changed = False
            self._on_read(True)
        now_ns = self._time_ns() + self._drifted_ns() if self._frozen_ns is None else self._frozen_ns
        return now_ns + self._wall_ns

    def monotonic_ns(self) -> int:
        if self._monotonic_changed:
            self._monotonic_changed = False
            self._on_read(False)
        return self._time_monotonic_ns() + self._drifted_ns() + self._monotonic_ns
