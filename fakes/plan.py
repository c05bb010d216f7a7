"""Planned faults: which requests they strike, counted. What a fault does is the business of the fake that it strikes.

Order, per request:
1. Faults are asked in list order; each that matches counts the request as seen. Outside a fault's time window nothing
   is counted.
2. The first ``skip`` of the requests seen pass, the next ``count`` are struck. Faults that ``STACKS`` (delays) all
   apply; of the others the first that is due applies, and one that is due but came second stays due, and strikes the
   next matching request. So a fault fires exactly ``count`` times if enough requests come.
3. With a ``probability`` below 1 each request past ``skip`` draws once from the fault's own generator, seeded by
   ``seed``: which of the fault's requests are struck depends on nothing else.
4. A fault that lasts strikes, from the request on that it fired for, every matching one until its time is over; it
   fires once for all of them.

No sockets here, and the clock is injected.
"""

from __future__ import annotations

import _thread
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Final, Generic, TypeVar

import msgspec

from .errors import Applied, InvalidParameter

COUNT_MAX: Final = 2**31
DELAY_MS_MAX: Final = 600_000


class Planned(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every fault has: an ``id`` that logs name, and which of the requests it matches it strikes.

    ``skip`` matching requests pass first, the next ``count`` are struck, each with ``probability``. ``from_ms`` and
    ``until_ms`` bound the time window, in ms of the plan's clock since the fault was planned; ``until_ms`` None means
    for ever.
    """

    STACKS: ClassVar[bool] = False

    id: str
    skip: int = 0
    count: int = 1
    probability: float = 1.0
    seed: int = 0
    from_ms: float = 0.0
    until_ms: float | None = None

    @property
    def lasts_ms(self) -> float:
        """How long it strikes every matching request once it has fired."""
        return 0.0

    def check(self) -> None:
        """Raise InvalidParameter if a field is out of range."""
        if not self.id:
            raise InvalidParameter("a fault needs a non-empty id")
        if not 0 <= self.skip <= COUNT_MAX or not 1 <= self.count <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: skip {self.skip}, count {self.count}: want skip >= 0, count >= 1")
        if not 0 < self.probability <= 1:
            raise InvalidParameter(f"fault {self.id}: probability {self.probability}, want above 0, at most 1")
        if not 0 <= self.from_ms < float("inf") or (self.until_ms is not None and not self.from_ms < self.until_ms):
            raise InvalidParameter(
                f"fault {self.id}: from_ms {self.from_ms}, until_ms {self.until_ms}: want 0 <= from_ms < until_ms"
            )

    def check_range(self, name: str, value: float, low: float = 0, high: float = DELAY_MS_MAX) -> None:
        """Raise InvalidParameter unless the field lies within; the default is that of a time in ms."""
        if not low <= value <= high:
            raise InvalidParameter(f"fault {self.id}: {name} {value}, want {low} to {high}")

    def check_truth(self, when: str, applied: Applied, what: str, instead: str) -> None:
        """Raise InvalidParameter for an answer after the commit that tells a client that nothing was applied."""
        if when == "after-commit" and applied == "no":
            raise InvalidParameter(
                f"fault {self.id}: {what} tells a client that nothing was applied, so it cannot come after the commit; "
                f"use {instead}"
            )

    def check_known(self, what: str, name: str, known: Collection[str]) -> None:
        """Raise InvalidParameter unless ``name`` is one of ``known``."""
        if name not in known:
            raise InvalidParameter(
                f"fault {self.id}: no {what} {name[:40]!r}, so it would never fire; want {', '.join(sorted(known))}"
            )


F = TypeVar("F", bound=Planned)


class Fired(msgspec.Struct, Generic[F], frozen=True):
    """A fault with its counts: ``seen`` matching requests and ``fired`` times."""

    fault: F
    seen: int
    fired: int


class _InForce(Generic[F]):
    """One fault in force: its counts, its generator, when it was planned and until when it lasts."""

    def __init__(self, fault: F, now_ms: float) -> None:
        self.fault = fault
        self.seen = 0
        self.fired = 0
        self.lasts_until_ms = now_ms
        self._begun_ms = now_ms
        self._random = random.Random(fault.seed)

    def in_window(self, now_ms: float) -> bool:
        since_ms, until_ms = now_ms - self._begun_ms, self.fault.until_ms
        return self.fault.from_ms <= since_ms and (until_ms is None or since_ms < until_ms)

    def due(self) -> bool:
        """Count one matching request; whether the fault wants to strike it."""
        self.seen += 1
        if self.seen <= self.fault.skip:
            return False
        # Drawn even when the fault has had its fill, or another one strikes: the nth request meets the nth draw.
        lucky = self.fault.probability >= 1 or self._random.random() < self.fault.probability
        return lucky and self.fired < self.fault.count


def _host_ms() -> float:
    return time.monotonic() * 1000  # through the module: a simulator replaces it


class Plan(Generic[F]):
    """The faults in force and their counts. ``clock_ms`` is the clock of time windows. Several threads may use it."""

    def __init__(self, clock_ms: Callable[[], float] = _host_ms) -> None:
        self._clock_ms = clock_ms
        self._in_force: list[_InForce[F]] = []
        self._lock = _thread.allocate_lock()  # not threading.Lock, which a simulator replaces

    def set(self, faults: Sequence[F]) -> None:
        """Replace the plan; counts start at zero. Raises InvalidParameter, and then changes nothing."""
        seen_ids: set[str] = set()
        for fault in faults:
            fault.check()
            if fault.id in seen_ids:
                raise InvalidParameter(f"two faults have the id {fault.id!r}")
            seen_ids.add(fault.id)
        with self._lock:
            now_ms = self._clock_ms()
            self._in_force = [_InForce(fault, now_ms) for fault in faults]

    def add(self, fault: F) -> None:
        """Append one fault; the counts of the others stay. Raises InvalidParameter."""
        fault.check()
        with self._lock:
            if any(fault.id == other.fault.id for other in self._in_force):
                raise InvalidParameter(f"two faults have the id {fault.id!r}")
            self._in_force.append(_InForce(fault, self._clock_ms()))

    def fired(self) -> list[Fired[F]]:
        """The faults in force with their counts."""
        with self._lock:
            return [Fired(entry.fault, entry.seen, entry.fired) for entry in self._in_force]

    def meet(self, matches: Callable[[F], bool] = lambda _: True) -> tuple[tuple[F, ...], F | None, int | None]:
        """Count one request (see the order above): what stacks, what decides, and the place in the plan of the one
        that decides, else of the first that stacks, else None.
        """
        stacked: list[F] = []
        main: F | None = None
        at: int | None = None
        with self._lock:
            now_ms = self._clock_ms()
            for number, entry in enumerate(self._in_force):
                if not matches(entry.fault):
                    continue
                if now_ms < entry.lasts_until_ms:  # it goes on, whatever the window says
                    entry.seen += 1
                    if main is None:
                        main, at = entry.fault, number
                    continue
                if not entry.in_window(now_ms) or not entry.due():
                    continue
                if entry.fault.STACKS:
                    stacked.append(entry.fault)
                    at = number if at is None else at
                elif main is None:
                    main, at = entry.fault, number
                    entry.lasts_until_ms = now_ms + entry.fault.lasts_ms
                else:
                    continue
                entry.fired += 1
        return tuple(stacked), main, at


class Faulty(Generic[F]):
    """What every fake with a plan offers its user."""

    _plan: Plan[F]

    def add_fault(self, fault: F) -> None:
        """Append one fault to the plan. Raises InvalidParameter."""
        self._plan.add(fault)

    def set_faults(self, faults: Sequence[F]) -> None:
        """Replace the plan; counts start at zero. Raises InvalidParameter, and then changes nothing."""
        self._plan.set(faults)

    def faults(self) -> list[Fired[F]]:
        """The plan with the counts of seen requests and firings."""
        return self._plan.fired()

    def fired(self) -> dict[str, int]:
        """How often each fault fired, by id."""
        return {entry.fault.id: entry.fired for entry in self.faults()}
