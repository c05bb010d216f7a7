"""Planned faults of the small fakes (credential endpoint, object store): addressed, counted, in a stated order.

The server's own plan (server/faults.py) knows routes and clients; this one knows only the fields every fault has. The
rules are the same: faults are asked in list order, each that matches counts the request as seen, the first ``skip`` of
those pass, the next ``count`` are struck. Faults that ``STACKS`` (delays) all apply; of the others the first that is
due applies, and one that came second stays due. So a fault fires exactly ``count`` times if enough requests come.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

import msgspec

from .errors import InvalidParameter

COUNT_MAX: Final = 2**31
DELAY_MS_MAX: Final = 600_000


class Planned(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every planned fault has: an ``id`` that logs name, ``skip`` requests to let through, ``count`` to strike."""

    STACKS: ClassVar[bool] = False

    id: str
    skip: int = 0
    count: int = 1

    def check(self) -> None:
        """Raise InvalidParameter if a field is out of range."""
        if not self.id:
            raise InvalidParameter("a fault needs a non-empty id")
        if not 0 <= self.skip <= COUNT_MAX or not 1 <= self.count <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: skip {self.skip}, count {self.count}: want skip >= 0, count >= 1")


F = TypeVar("F", bound=Planned)


class Firing(NamedTuple, Generic[F]):
    """A fault with its counts: ``seen`` matching requests and ``fired`` times."""

    fault: F
    seen: int
    fired: int


class Plan(Generic[F]):
    """The faults in force and their counts. May be asked from several threads."""

    def __init__(self) -> None:
        self._faults: list[F] = []
        self._seen: list[int] = []
        self._fired: list[int] = []
        self._lock = _thread.allocate_lock()  # not threading.Lock, which a simulator replaces

    def set(self, faults: Sequence[F]) -> None:
        """Replace the plan; counts start at zero. Raises InvalidParameter, and then changes nothing."""
        ids = [fault.id for fault in faults]
        for fault in faults:
            fault.check()
        if len(set(ids)) < len(ids):
            raise InvalidParameter(f"two faults have one id among {ids}")
        with self._lock:
            self._faults, self._seen, self._fired = list(faults), [0] * len(ids), [0] * len(ids)

    def add(self, fault: F) -> None:
        """Append one fault; the counts of the others stay. Raises InvalidParameter."""
        fault.check()
        with self._lock:
            if any(fault.id == other.id for other in self._faults):
                raise InvalidParameter(f"two faults have the id {fault.id!r}")
            self._faults.append(fault)
            self._seen.append(0)
            self._fired.append(0)

    def firings(self) -> list[Firing[F]]:
        with self._lock:
            return [Firing(*row) for row in zip(self._faults, self._seen, self._fired, strict=True)]

    def fired(self) -> dict[str, int]:
        """How often each fault fired, by id."""
        return {entry.fault.id: entry.fired for entry in self.firings()}

    def strike(self, matches: Callable[[F], bool] = lambda _: True) -> tuple[list[F], F | None]:
        """Count one request; return the stacking faults that are due and the one other that decides, if any."""
        stacked: list[F] = []
        main: F | None = None
        with self._lock:
            for number, fault in enumerate(self._faults):
                if not matches(fault):
                    continue
                self._seen[number] += 1
                if self._seen[number] <= fault.skip or self._fired[number] >= fault.count:
                    continue
                if fault.STACKS:
                    stacked.append(fault)
                elif main is None:
                    main = fault
                else:
                    continue
                self._fired[number] += 1
        return stacked, main
