"""Planned faults of the server: which request they strike and what they do to it.

Order, per request that passed its own checks (a malformed request strikes no fault):
1. Faults are asked in list order; each whose route and client match counts the request as seen.
2. Every ``delay`` that is due applies. Of the others the first that is due applies; one that is due but came second
   stays due, and strikes the next matching request. So a fault fires exactly ``count`` times if enough requests come.
3. before-commit delays, then a before-commit status or reset, then the commit (whole or partial), then after-commit
   delays, then an after-commit status or reset.

No sockets here: the same plan serves the server and the in-process client.
"""

from __future__ import annotations

import _thread
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from ..errors import ERRORS, InvalidParameter, code_for_status

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
    "lookup": ("lookup_arrow",),
    "scan": ("create_snapshot", "scan_snapshot"),
    "changes": ("iterate_changes", "high_water_ts"),
    "health": ("health",),
}
_KNOWN: Final = {"*", *ROUTES}.union(*ROUTES.values())


class Fault(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every fault has: an ``id`` the request log names, and the requests it strikes.

    ``route`` is a name or a group of ``ROUTES`` ("write_arrow", "write"), or "*".
    ``client`` is a FeatureDB username, or None for any. ``skip`` matching requests pass first, the next ``count`` are
    struck.
    """

    id: str
    route: str = "write"
    client: str | None = None
    skip: int = 0
    count: int = 1

    def check(self) -> None:
        """Raise InvalidParameter if a field is out of range or contradicts the errors table."""
        if not self.id:
            raise InvalidParameter("a fault needs a non-empty id")
        if self.route not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise InvalidParameter(
                f"fault {self.id}: no route {self.route[:40]!r}, so it would never fire; want {known}"
            )
        if not 0 <= self.skip <= COUNT_MAX or not 1 <= self.count <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: skip {self.skip}, count {self.count}: want skip >= 0, count >= 1")


class StatusFault(Fault, tag="status", kw_only=True, frozen=True):
    """Answer with an HTTP status. After the commit only 5xx: the others mean "surely not applied"."""

    code: int = 503
    when: When = "before-commit"
    retry_after_s: float | None = None

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
    """Break the connection (TCP reset) instead of answering."""

    when: When = "before-commit"


class PartialFault(Fault, tag="partial", kw_only=True, frozen=True):
    """Do not apply the last ``rows_failed`` rows of a write (all, if it has fewer) and report them failed."""

    rows_failed: int

    def check(self) -> None:
        super().check()
        if self.route not in ("*", "write", *ROUTES["write"]):
            raise InvalidParameter(f"fault {self.id}: partial failures are for writes, not for route {self.route}")
        if not 1 <= self.rows_failed <= COUNT_MAX:
            raise InvalidParameter(f"fault {self.id}: rows_failed {self.rows_failed}, want at least 1")


AnyFault = StatusFault | DelayFault | ResetFault | PartialFault


class Strike(NamedTuple):
    """The faults due for one request: any number of delays and at most one other.

    ``at``: place in the plan of the one that decides the outcome, else of the first delay, else None.
    """

    delays: tuple[DelayFault, ...] = ()
    main: StatusFault | ResetFault | PartialFault | None = None
    at: int | None = None

    @property
    def ids(self) -> list[str]:
        return [fault.id for fault in (*self.delays, self.main) if fault is not None]

    def delay_s(self, when: When) -> float:
        return sum(fault.delay_ms for fault in self.delays if fault.when == when) / 1000

    @property
    def rows_failed(self) -> int:
        return self.main.rows_failed if isinstance(self.main, PartialFault) else 0


class FiredFault(msgspec.Struct, frozen=True):
    """A fault with its counts: ``seen`` matching requests and ``fired`` times."""

    fault: AnyFault
    seen: int
    fired: int


class FaultPlan:
    """The faults in force and their counts."""

    def __init__(self) -> None:
        self._faults: list[AnyFault] = []
        self._seen: list[int] = []
        self._fired: list[int] = []
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
            self._faults = list(faults)
            self._seen, self._fired = [0] * len(faults), [0] * len(faults)

    def add(self, fault: AnyFault) -> None:
        """Append one fault; the counts of the others stay. Raises InvalidParameter."""
        fault.check()
        with self._lock:
            if any(fault.id == other.id for other in self._faults):
                raise InvalidParameter(f"two faults have the id {fault.id!r}")
            self._faults.append(fault)
            self._seen.append(0)
            self._fired.append(0)

    def fired(self) -> list[FiredFault]:
        with self._lock:
            return [FiredFault(*row) for row in zip(self._faults, self._seen, self._fired, strict=True)]

    def strike(self, route: str, group: str, client: str) -> Strike:
        """Count one request and return what strikes it (see the order above). Partial faults strike writes only."""
        delays: list[DelayFault] = []
        main: StatusFault | ResetFault | PartialFault | None = None
        index: int | None = None
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.route not in (route, group, "*") or fault.client not in (None, client):
                    continue
                if isinstance(fault, PartialFault) and group != "write":
                    continue
                self._seen[number] += 1
                if self._seen[number] <= fault.skip or self._fired[number] >= fault.count:
                    continue
                if isinstance(fault, DelayFault):
                    delays.append(fault)
                    index = number if index is None else index
                elif main is None:
                    main, index = fault, number
                else:
                    continue
                self._fired[number] += 1
        return Strike(tuple(delays), main, index)
