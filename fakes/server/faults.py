"""Planned faults of the server: which request they strike and what they do to it.

A request that passed its own checks (a malformed one strikes no fault) meets the plan as ``fakes/plan.py`` says: faults
whose route and client match are asked in list order; one whose kind cannot strike the route does not match. Then:
before-commit delays; what comes before the commit (a status, a reset, an outage, a reordering, the view deleted, its
schema changed, the token revoked); the commit (whole, partial or doubled; a read may be stale); after-commit delays; an
after-commit status or reset; what befalls the reply on its way.

What a client may conclude from what it gets is ``applied`` of each fault: that of the row of ``fakes.errors.ERRORS``
which ``outcome`` names.

No sockets here: the same plan serves the server and the in-process client, and its clock is injected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, Literal, NamedTuple, cast

from ..errors import ERRORS, Applied, InvalidParameter, code_for_status
from ..plan import COUNT_MAX, DELAY_MS_MAX, Plan, Planned

When = Literal["before-commit", "after-commit"]

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


class Fault(Planned, kw_only=True, frozen=True):
    """What every fault of the server has besides: ``route``, a name or a group of ``ROUTES`` ("write_arrow", "write")
    or "*", and ``client``, a FeatureDB username, or None for any.
    """

    route: str = "write"
    client: str | None = None

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
        super().check()
        self.check_known("route", self.route, _KNOWN)
        if not any(
            self.route in (route, group, "*") and self.strikes(route, group)
            for group, routes in ROUTES.items()
            for route in routes
        ):
            kind = self.__struct_config__.tag
            raise InvalidParameter(f"fault {self.id}: {kind} means nothing for route {self.route}: it would never fire")


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
        self.check_range("status", self.code, 400, 599)
        applied = ERRORS[code_for_status(self.code)].applied
        self.check_truth(self.when, applied, f"status {self.code}", "500, 502, 503 or 504")
        if self.retry_after_s is not None:
            self.check_range("retry_after_s", self.retry_after_s, 0, DELAY_MS_MAX / 1000)


class DelayFault(Fault, tag="delay", kw_only=True, frozen=True):
    """Wait before or after the commit; the request then goes on as if nothing had happened."""

    STACKS: ClassVar[bool] = True

    delay_ms: float
    when: When = "before-commit"

    def check(self) -> None:
        super().check()
        self.check_range("delay_ms", self.delay_ms)


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
        self.check_range("rows_failed", self.rows_failed, 1, COUNT_MAX)


class TruncateFault(Fault, tag="truncate", kw_only=True, frozen=True):
    """Announce the whole reply, send at most ``bytes_kept`` bytes of it (never all), then close in an orderly way."""

    bytes_kept: int = 0

    @property
    def outcome(self) -> str:
        return "ReplyTruncated"

    def check(self) -> None:
        super().check()
        self.check_range("bytes_kept", self.bytes_kept, 0, COUNT_MAX)


class SlowBodyFault(Fault, tag="slow-body", kw_only=True, frozen=True):
    """Send the reply at ``bytes_per_s``; it arrives whole, or the client gives up first (then: perhaps applied)."""

    bytes_per_s: float

    def check(self) -> None:
        super().check()
        self.check_range("bytes_per_s", self.bytes_per_s, 1, 1e12)


class DuplicateFault(Fault, tag="duplicate", kw_only=True, frozen=True):
    """Deliver a write twice: the same rows under the same ts and request id again, ``delay_ms`` after the first time.

    The client gets one ordinary reply. The second delivery has its own line in the request log (``delivery`` 2).
    """

    delay_ms: float = 0

    def strikes(self, route: str, group: str) -> bool:
        return group == "write"

    def check(self) -> None:
        super().check()
        self.check_range("delay_ms", self.delay_ms)


class ReorderFault(Fault, tag="reorder", kw_only=True, frozen=True):
    """Hold the request until another that the fault matches, of the same client over another of its connections, has
    been committed, for at most ``hold_ms_max``; then go on as if nothing had happened.

    In process there are no connections: the client's threads take their place.
    """

    hold_ms_max: float = 1000

    def check(self) -> None:
        super().check()
        self.check_range("hold_ms_max", self.hold_ms_max)


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
        self.check_range("age_ms", self.age_ms)


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

    @property
    def lasts_ms(self) -> float:
        return self.duration_ms

    def check(self) -> None:
        super().check()
        self.check_range("duration_ms", self.duration_ms)
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


class FaultPlan(Plan[AnyFault]):
    """The faults in force and their counts."""

    def strike(self, route: str, group: str, client: str) -> Strike:
        """Count one request and return what strikes it."""
        delays, main, at = self.meet(lambda fault: fault.matches(route, group, client))
        return Strike(cast(tuple[DelayFault, ...], delays), main, at)


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
