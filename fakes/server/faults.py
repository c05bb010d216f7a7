"""Planned faults of the server: which request they strike and what they do to it.

Order, per request that passed its own checks (a malformed request strikes no fault):
1. Faults are asked in list order; each whose route and client match counts the request as seen.
   Outside a fault's time window, and for a route that its kind cannot strike, nothing is counted.
2. Every ``delay`` that is due applies. Of the others the first that is due applies; one that is due but came second
   stays due, and strikes the next matching request. So a fault fires exactly ``count`` times if enough requests come.
   With a ``probability`` below 1 each request past ``skip`` draws once from the fault's own generator, seeded by
   ``seed``: which of the fault's requests are struck depends on nothing else.
3. before-commit delays; then what comes before the commit (a status, a reset, an outage, a reordering, the view
   deleted, its schema changed, the token revoked); then the commit (whole, partial or doubled; a read may be stale);
   then after-commit delays, then an after-commit status or reset; then what befalls the reply on its way.

What a client may conclude from what it gets is ``applied`` of each fault: that of the row of ``fakes.errors.ERRORS``
which ``outcome`` names.

No sockets here: the same plan serves the server and the in-process client, and its clock is injected.
"""

from __future__ import annotations

import _thread
import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from ..errors import ERRORS, Applied, InvalidParameter, code_for_status

When = Literal["before-commit", "after-commit"]

DELAY_MS_MAX: Final = 600_000
COUNT_MAX: Final = 2**31

# Groups of routes and the routes in each; routes.py serves exactly these (test_faults.py compares).
ROUTES: Final[dict[str, tuple[str, ...]]] = {
    "control": (
        "list_instances",
        "list_projects",
        "create_project",
        "get_project",
        "get_project_entity",
        "list_entities",
        "create_entity",
        "get_entity",
        "delete_entity",
        "list_views",
        "create_view",
        "get_view",
        "update_view",
        "delete_view",
        "online_features",
        "write_table",
        "list_datasources",
        "get_datasource",
    ),
    "write": ("write_json", "write_arrow"),
    "lookup": ("lookup_arrow", "batch_get_kkv", "batch_get_kv2"),
    "scan": ("create_snapshot", "scan_snapshot"),
    "changes": ("iterate_changes", "high_water_ts"),
    "health": ("health",),
}
_KNOWN: Final = {"*", *ROUTES}.union(*ROUTES.values())
_DATA_PLANE: Final = ("write", "lookup", "scan", "changes")


class Fault(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every fault has: an ``id`` the request log names, and the requests it strikes.

    ``route`` is a name or a group of ``ROUTES`` ("write_arrow", "write"), or "*".
    ``client`` is a FeatureDB username, or None for any. ``skip`` matching requests pass first, the next ``count`` are
    struck, each with ``probability``. ``from_ms`` and ``until_ms`` bound the time window, in ms of the plan's clock
    since the fault was planned; ``until_ms`` None means for ever.
    """

    id: str
    route: str = "write"
    client: str | None = None
    skip: int = 0
    count: int = 1
    probability: float = 1.0
    seed: int = 0
    from_ms: float = 0.0
    until_ms: float | None = None

    @property
    def outcome(self) -> str | None:
        """Which row of the errors table the struck client meets; None when it gets its ordinary reply."""
        return None

    @property
    def applied(self) -> Applied:
        """What the client may conclude about its write."""
        return "yes" if self.outcome is None else ERRORS[self.outcome].applied

    def strikes(self, route: str, group: str) -> bool:
        """Whether this kind of fault means anything for a route of that group."""
        return True

    def matches(self, route: str, group: str, client: str) -> bool:
        return self.route in (route, group, "*") and self.client in (None, client) and self.strikes(route, group)

    def check(self) -> None:
        """Raise InvalidParameter if a field is out of range or contradicts the errors table."""
        if not self.id:
            raise InvalidParameter("a fault needs a non-empty id")
        if self.route not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise InvalidParameter(
                f"fault {self.id}: no route {self.route[:40]!r}, so it would never fire; want {known}"
            )
        if not any(
            self.route in (route, group, "*") and self.strikes(route, group)
            for group, routes in ROUTES.items()
            for route in routes
        ):
            kind = self.__struct_config__.tag
            raise InvalidParameter(f"fault {self.id}: {kind} means nothing for route {self.route}: it would never fire")
        if not 0 <= self.skip <= COUNT_MAX or not 1 <= self.count <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: skip {self.skip}, count {self.count}: want skip >= 0, count >= 1")
        if not 0 < self.probability <= 1:
            raise InvalidParameter(f"fault {self.id}: probability {self.probability}, want above 0, at most 1")
        if not 0 <= self.from_ms < float("inf") or (self.until_ms is not None and not self.from_ms < self.until_ms):
            raise InvalidParameter(
                f"fault {self.id}: from_ms {self.from_ms}, until_ms {self.until_ms}: want 0 <= from_ms < until_ms"
            )

    def _check_ms(self, name: str, value: float, low: float = 0) -> None:
        if not low <= value <= DELAY_MS_MAX:
            raise InvalidParameter(f"fault {self.id}: {name} {value}, want {low} to {DELAY_MS_MAX}")


class StatusFault(Fault, tag="status", kw_only=True, frozen=True):
    """Answer with an HTTP status. After the commit only 5xx: the others mean "surely not applied"."""

    code: int = 503
    when: When = "before-commit"
    retry_after_s: float | None = None

    @property
    def outcome(self) -> str:
        return code_for_status(self.code)

    def check(self) -> None:
        super().check()
        if not 400 <= self.code <= 599:
            raise InvalidParameter(f"fault {self.id}: status {self.code}, want 400 to 599")
        if self.when == "after-commit" and ERRORS[code_for_status(self.code)].applied == "no":
            raise InvalidParameter(
                f"fault {self.id}: status {self.code} tells a client that nothing was applied, so it cannot come "
                "after the commit; use 500, 502, 503 or 504"
            )
        if self.retry_after_s is not None and not 0 <= self.retry_after_s <= DELAY_MS_MAX / 1000:
            raise InvalidParameter(f"fault {self.id}: retry_after_s {self.retry_after_s} is out of range")


class DelayFault(Fault, tag="delay", kw_only=True, frozen=True):
    """Wait before or after the commit; the request then goes on as if nothing had happened."""

    delay_ms: float
    when: When = "before-commit"

    def check(self) -> None:
        super().check()
        if not 0 <= self.delay_ms <= DELAY_MS_MAX:
            raise InvalidParameter(f"fault {self.id}: delay_ms {self.delay_ms}, want 0 to {DELAY_MS_MAX}")


class ResetFault(Fault, tag="reset", kw_only=True, frozen=True):
    """Break the connection (TCP reset) instead of answering, or (mid-reply) after half of the reply."""

    when: Literal["before-commit", "after-commit", "mid-reply"] = "before-commit"

    @property
    def outcome(self) -> str:
        return "ReplyTruncated" if self.when == "mid-reply" else "ConnectionLost"


class PartialFault(Fault, tag="partial", kw_only=True, frozen=True):
    """Do not apply the last ``rows_failed`` rows of a write (all, if it has fewer) and report them failed."""

    rows_failed: int

    @property
    def outcome(self) -> str:
        return "PartialFailure"

    def strikes(self, route: str, group: str) -> bool:
        return group == "write"

    def check(self) -> None:
        super().check()
        if not 1 <= self.rows_failed <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: rows_failed {self.rows_failed}, want at least 1")


class TruncateFault(Fault, tag="truncate", kw_only=True, frozen=True):
    """Announce the whole reply, send at most ``bytes_kept`` bytes of it (never all), then close in an orderly way."""

    bytes_kept: int = 0

    @property
    def outcome(self) -> str:
        return "ReplyTruncated"

    def check(self) -> None:
        super().check()
        if not 0 <= self.bytes_kept <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: bytes_kept {self.bytes_kept}, want at least 0")


class SlowBodyFault(Fault, tag="slow-body", kw_only=True, frozen=True):
    """Send the reply at ``bytes_per_s``; it arrives whole, or the client gives up first (then: perhaps applied)."""

    bytes_per_s: float

    def check(self) -> None:
        super().check()
        if not 1 <= self.bytes_per_s <= 1e12:
            raise InvalidParameter(f"fault {self.id}: bytes_per_s {self.bytes_per_s}, want 1 to 1e12")


class DuplicateFault(Fault, tag="duplicate", kw_only=True, frozen=True):
    """Deliver a write twice: the same rows under the same ts and request id again, ``delay_ms`` after the first time.

    The client gets one ordinary reply. The second delivery has its own line in the request log (``delivery`` 2).
    """

    delay_ms: float = 0

    def strikes(self, route: str, group: str) -> bool:
        return group == "write"

    def check(self) -> None:
        super().check()
        self._check_ms("delay_ms", self.delay_ms)


class ReorderFault(Fault, tag="reorder", kw_only=True, frozen=True):
    """Hold the request until another that the fault matches, of the same client over another of its connections, has
    been committed, for at most ``hold_ms_max``; then go on as if nothing had happened.

    In process there are no connections: the client's threads take their place.
    """

    hold_ms_max: float = 1000

    def check(self) -> None:
        super().check()
        self._check_ms("hold_ms_max", self.hold_ms_max)


class StaleReadFault(Fault, tag="stale-read", kw_only=True, frozen=True):
    """Answer a read with the view's content as of ``writes`` writes ago, or ``age_ms`` ms ago: exactly one of them.

    Strikes reads that look at the content: of the group "scan" the making of a snapshot, not the scan of one.
    """

    route: str = "lookup"
    writes: int = 0
    age_ms: float = 0

    def strikes(self, route: str, group: str) -> bool:
        if group == "control":
            return route == "online_features"
        return group in _DATA_PLANE and group != "write" and route != "scan_snapshot"

    def check(self) -> None:
        super().check()
        if not 0 <= self.writes <= COUNT_MAX or (self.writes > 0) == (self.age_ms > 0):
            raise InvalidParameter(
                f"fault {self.id}: writes {self.writes}, age_ms {self.age_ms}: want exactly one of them above 0"
            )
        self._check_ms("age_ms", self.age_ms)


class OutageFault(Fault, tag="outage", kw_only=True, frozen=True):
    """From the request on that it strikes, and for ``duration_ms``, every matching request is refused before the
    commit: with status ``code``, or (None) by a reset. It fires once per outage, not once per request.
    """

    route: str = "*"
    duration_ms: float
    code: int | None = 503
    retry_after_s: float | None = None

    @property
    def outcome(self) -> str:
        return "ConnectionLost" if self.code is None else code_for_status(self.code)

    def check(self) -> None:
        super().check()
        self._check_ms("duration_ms", self.duration_ms)
        if self.code is not None:
            StatusFault(id=self.id, code=self.code, retry_after_s=self.retry_after_s).check()


class _DataPlaneFault(Fault, kw_only=True, frozen=True):
    def strikes(self, route: str, group: str) -> bool:
        return group in _DATA_PLANE


class ViewDeletedFault(_DataPlaneFault, tag="view-deleted", kw_only=True, frozen=True):
    """The request's view is deleted, with its rows, before the commit: this request and later ones find no view."""

    @property
    def outcome(self) -> str:
        return "ViewNotFound"


class SchemaChangedFault(_DataPlaneFault, tag="schema-changed", kw_only=True, frozen=True):
    """The request's view is made again, empty, with the other value type (float32 or uint8) before the commit: this
    write and later ones of the old type are refused, reads find nothing.
    """

    @property
    def outcome(self) -> str:
        return "SchemaMismatch"


class TokenRevokedFault(_DataPlaneFault, tag="token-revoked", kw_only=True, frozen=True):
    """The datasource's token is replaced before the commit: this request and later ones with the old token are
    refused, until the client reads the new one from the datasource.
    """

    @property
    def outcome(self) -> str:
        return "InvalidToken"


AnyFault = (
    StatusFault
    | DelayFault
    | ResetFault
    | PartialFault
    | TruncateFault
    | SlowBodyFault
    | DuplicateFault
    | ReorderFault
    | StaleReadFault
    | OutageFault
    | ViewDeletedFault
    | SchemaChangedFault
    | TokenRevokedFault
)


class Strike(NamedTuple):
    """The faults due for one request: any number of delays and at most one other.

    ``at``: place in the plan of the one that decides the outcome, else of the first delay, else None.
    """

    delays: tuple[DelayFault, ...] = ()
    main: AnyFault | None = None
    at: int | None = None

    @property
    def ids(self) -> list[str]:
        return [fault.id for fault in (*self.delays, self.main) if fault is not None]

    def delay_s(self, when: When) -> float:
        return sum(fault.delay_ms for fault in self.delays if fault.when == when) / 1000

    @property
    def rows_failed(self) -> int:
        return self.main.rows_failed if isinstance(self.main, PartialFault) else 0

    def refusal(self, when: When) -> StatusFault | OutageFault | None:
        """The fault that answers with a status at that point."""
        main = self.main
        if isinstance(main, StatusFault) and main.when == when:
            return main
        if isinstance(main, OutageFault) and when == "before-commit" and main.code is not None:
            return main
        return None

    def breaks(self, when: When) -> bool:
        """Whether the connection is reset at that point."""
        main = self.main
        if isinstance(main, OutageFault):
            return when == "before-commit" and main.code is None
        return isinstance(main, ResetFault) and main.when == when

    @property
    def reply_fault(self) -> ResetFault | TruncateFault | SlowBodyFault | None:
        """What befalls the reply on its way, once everything else has gone well."""
        main = self.main
        if isinstance(main, TruncateFault | SlowBodyFault) or (
            isinstance(main, ResetFault) and main.when == "mid-reply"
        ):
            return main
        return None


class FiredFault(msgspec.Struct, frozen=True):
    """A fault with its counts: ``seen`` matching requests and ``fired`` times."""

    fault: AnyFault
    seen: int
    fired: int


class _Planned:
    """One fault in force: its counts, its generator, when it was planned and until when an outage of it lasts."""

    def __init__(self, fault: AnyFault, now_ms: float) -> None:
        self.fault = fault
        self.seen = 0
        self.fired = 0
        self.begun_ms = now_ms
        self.outage_until_ms = now_ms
        self._random = random.Random(fault.seed)

    def in_window(self, now_ms: float) -> bool:
        since_ms, until_ms = now_ms - self.begun_ms, self.fault.until_ms
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


class FaultPlan:
    """The faults in force and their counts. ``clock_ms`` is the clock of time windows and outages."""

    def __init__(self, clock_ms: Callable[[], float] = _host_ms) -> None:
        self._clock_ms = clock_ms
        self._planned: list[_Planned] = []
        self._lock = _thread.allocate_lock()  # not threading.Lock, which a simulator replaces

    def set(self, faults: Sequence[AnyFault]) -> None:
        """Replace the plan; counts start at zero. Raises InvalidParameter, and then changes nothing."""
        seen_ids: set[str] = set()
        for fault in faults:
            fault.check()
            if fault.id in seen_ids:
                raise InvalidParameter(f"two faults have the id {fault.id!r}")
            seen_ids.add(fault.id)
        with self._lock:
            now_ms = self._clock_ms()
            self._planned = [_Planned(fault, now_ms) for fault in faults]

    def add(self, fault: AnyFault) -> None:
        """Append one fault; the counts of the others stay. Raises InvalidParameter."""
        fault.check()
        with self._lock:
            if any(fault.id == other.fault.id for other in self._planned):
                raise InvalidParameter(f"two faults have the id {fault.id!r}")
            self._planned.append(_Planned(fault, self._clock_ms()))

    def fired(self) -> list[FiredFault]:
        with self._lock:
            return [FiredFault(entry.fault, entry.seen, entry.fired) for entry in self._planned]

    def strike(self, route: str, group: str, client: str) -> Strike:
        """Count one request and return what strikes it (see the order above)."""
        delays: list[DelayFault] = []
        main: AnyFault | None = None
        index: int | None = None
        with self._lock:
            now_ms = self._clock_ms()
            for number, entry in enumerate(self._planned):
                fault = entry.fault
                if not fault.matches(route, group, client):
                    continue
                if now_ms < entry.outage_until_ms:  # an outage goes on, whatever the window says
                    entry.seen += 1
                    if main is None:
                        main, index = fault, number
                    continue
                if not entry.in_window(now_ms) or not entry.due():
                    continue
                if isinstance(fault, DelayFault):
                    delays.append(fault)
                    index = number if index is None else index
                elif main is None:
                    main, index = fault, number
                    if isinstance(fault, OutageFault):
                        entry.outage_until_ms = now_ms + fault.duration_ms
                else:
                    continue
                entry.fired += 1
        return Strike(tuple(delays), main, index)


class Turns:
    """Who waits, held by a reorder fault, for another request of the same client to pass.

    ``connection`` is anything that tells the client's connections apart by identity.
    """

    def __init__(self) -> None:
        self._held: list[tuple[ReorderFault, str, object, Callable[[], object]]] = []

    @contextlib.contextmanager
    def waiting(
        self, fault: ReorderFault, client: str, connection: object, release: Callable[[], object]
    ) -> Iterator[None]:
        """Inside the block ``release`` is called, once, when a matching request passes."""
        held = (fault, client, connection, release)
        self._held.append(held)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                self._held.remove(held)

    def passed(self, route: str, group: str, client: str, connection: object) -> None:
        """A request was committed: let go those that waited for it."""
        for held in list(self._held):
            fault, owner, theirs, release = held
            if owner == client and theirs != connection and fault.matches(route, group, client):
                with contextlib.suppress(ValueError):
                    self._held.remove(held)
                    release()
