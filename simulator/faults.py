"""The faults a scenario can plan, where each strikes, and what may follow.

A fault is plain data. It is addressed by place and moment: a rank, a named point and the *nth* passage of that point by
that rank, or, for the store, a route, a client and how many matching requests to let through first. Whoever carries a
fault out records each firing in the history (event ``fault``); a planned fault that never fired makes a run *not
exercised*, never *held*.

Every fault says what may follow:

- ``tolerate``: the job succeeds and nothing is lost;
- ``fail-loudly``: the job may fail, but says so, names the rank, and ends within the scenario's deadlines. Of these,
  what ``must_fail`` may not be survived: a job that succeeds has published what it had to refuse.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import msgspec

from ..fakes.server.faults import ROUTES

if TYPE_CHECKING:
    from .scenario import Scenario

#: Greatest size of any number in a fault: 300 years in seconds, which every clock and counter can hold.
NUMBER_MAX = 1e10
Expect = Literal["tolerate", "fail-loudly"]
Policy = Literal["stop-together", "fail-loudly", "empty-batches"]

#: Named points that a rank passes, in the order of a run. The nth passage of a ``train.*`` point is lockstep step n,
#: that of ``publish.*`` the rank's own step n (the first call is passage 1), that of ``sdk.*`` the nth call of the
#: client. After a restart passages count from 1 again: the nth is then the nth step after the checkpoint.
POINTS: dict[str, str] = {
    "publisher.start": "just before the target's start()",
    "train.before-forward": "a batch is drawn, the forward pass not begun",
    "train.before-backward": "the forward pass (and its lookups) done, no gradient yet",
    "train.after-step": "weights are updated, the publisher not yet called",
    "publish.before": "just before after_step()",
    "publish.after": "just after after_step() returned",
    "checkpoint.before": "a step is over and its checkpoint due, nothing of it written",
    "checkpoint.after": "the checkpoint is complete",
    "sdk.write": "inside the client, at a write call (often on the target's own thread)",
    "sdk.flush": "inside the client, at write_flush()",
    "finish.before": "training is over, finish() not yet called",
    "finish.after": "finish() and close() returned",
}

#: HTTP statuses that a client may retry (fakes/errors.py has the whole table; 429 comes with Retry-After).
RETRIABLE_STATUSES = (429, 500, 502, 503, 504)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="fault"):
    """Base of all faults. ``family`` groups them in reports; ``strikes`` names the side that carries the fault out."""

    family: ClassVar[str]
    strikes: ClassVar[Literal["rank", "store", "model"]]

    def expect(self, scenario: Scenario) -> Expect:
        """What may follow in this scenario."""
        raise NotImplementedError(type(self).__name__)

    def problems(self, scenario: Scenario) -> list[str]:
        """Reasons why this fault makes no sense in this scenario, one line each; empty when it does."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not abs(value) <= NUMBER_MAX:
                return [f"{field.name} is {value}; it must be a number of at most {NUMBER_MAX:g} either way"]
        attempt = getattr(self, "attempt", 0)
        if not 0 <= attempt <= len(scenario.restarts):
            return [f"attempt is {attempt}, but the scenario has {len(scenario.restarts)} restarts"]
        rank, size = getattr(self, "rank", None), scenario.of_attempt(attempt).world_size
        if rank is not None and not 0 <= rank < size:
            return [f"rank {rank} does not exist in a world of {size}"]
        return []

    @property
    def failures(self) -> int:
        """How many attempts to send a step this fault can spoil."""
        return 0

    @property
    def must_fail(self) -> bool:
        """Whether no job may succeed once this struck: what it brings must be refused, not published."""
        return False

    @property
    def kind(self) -> str:
        """The name by which scenario files and reports call this fault."""
        return str(self.__struct_config__.tag)

    def describe(self) -> str:
        """One line for tables: the kind and every setting that differs from its default."""
        parts = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if field.required or value != field.default:
                parts.append(f"{field.name}={value}")
        return f"{self.kind}({', '.join(parts)})"


class _Refused:
    """A fault that brings what must be refused, not published."""

    __slots__ = ()

    def expect(self, scenario: Scenario) -> Expect:
        return "fail-loudly"

    @property
    def must_fail(self) -> bool:
        return True


class _AtStep(Fault, frozen=True, kw_only=True):
    """``attempt`` says in which start of the job a fault strikes: 0 the first, 1 the one after the first restart, …"""

    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    step: int
    attempt: int = 0

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.step < 1:
            found.append(f"step is {self.step}; the first step is 1")
        return found


class Exhaustion(Fault, frozen=True, kw_only=True, tag="exhaustion"):
    """One rank's data ends after ``batches`` batches while its peers still have some.

    ``stop-together``: ranks agree before each step and all stop when one has nothing left. ``empty-batches``: the
    exhausted rank goes on with empty batches (it still hosts rows that peers look up) without counting steps of its
    own. ``fail-loudly``: the exhausted rank raises.
    """

    family: ClassVar[str] = "exhaustion"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    batches: int
    policy: Policy = "stop-together"

    def expect(self, scenario: Scenario) -> Expect:
        return "fail-loudly" if self.policy == "fail-loudly" else "tolerate"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.batches < 0:
            found.append(f"batches is {self.batches}; it must be 0 or more")
        if scenario.restarts:
            found.append("data that ends on one rank and restarts do not go together in one scenario")
        if self.policy == "empty-batches" and any(
            t.collection == "ec" and t.sharding == "data_parallel" for t in scenario.tables
        ):
            found.append("empty batches and a data-parallel EmbeddingCollection do not go together in TorchRec on CPU")
        return found


class _AtPoint(Fault, frozen=True, kw_only=True):
    family: ClassVar[str] = "rank"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    point: str
    nth: int = 1
    attempt: int = 0

    def expect(self, scenario: Scenario) -> Expect:
        return "fail-loudly"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.point not in POINTS:
            found.append(f"unknown point {self.point!r}; known points: {', '.join(POINTS)}")
        if self.nth < 1:
            found.append(f"nth is {self.nth}; the first passage of a point is 1")
        return found


class RankRaise(_AtPoint, frozen=True, kw_only=True, tag="rank-raise"):
    """A rank raises ``InjectedFault`` at the nth passage of a point; at ``sdk.*`` the exception comes out of the
    client."""


class RankKill(_AtPoint, frozen=True, kw_only=True, tag="rank-kill"):
    """A rank is ended by SIGKILL at the nth passage of a point: nothing of it runs any more, no buffer is flushed."""


class RankStall(_AtPoint, frozen=True, kw_only=True, tag="rank-stall"):
    """All of a rank stands still for ``seconds`` at the nth passage of a point, as under SIGSTOP or in a machine
    that is moved, while its peers, the store and time go on. On the virtual engine: the thread that passes there."""

    seconds: float = 0.5

    def expect(self, scenario: Scenario) -> Expect:
        limits = scenario.publisher.flush_timeout_s, scenario.publisher.close_timeout_s
        return "tolerate" if self.seconds < min(limits) else "fail-loudly"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        most = min(30.0, scenario.deadlines.run_s / 2)
        if not 0 < self.seconds <= most:
            found.append(
                f"seconds is {self.seconds:g}; it must be over 0 and at most {most:g}, half of deadlines.run_s"
            )
        return found


class ClockOffset(Fault, frozen=True, kw_only=True, tag="clock-offset"):
    """A rank's wall clock is wrong by ``seconds`` (positive: ahead) from its first step on."""

    family: ClassVar[str] = "clock"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    seconds: float
    attempt: int = 0

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"


class ClockJump(_AtStep, frozen=True, kw_only=True, tag="clock-jump"):
    """A rank's wall clock jumps by ``seconds`` (negative: backwards) right before lockstep step ``step``."""

    family: ClassVar[str] = "clock"
    seconds: float


class ClockStall(_AtStep, frozen=True, kw_only=True, tag="clock-stall"):
    """A rank stands still for ``seconds`` right before lockstep step ``step``, by both its clocks: wall and monotonic
    time are that much later, and nothing was done in between. A paused machine, or a long checkpoint."""

    family: ClassVar[str] = "clock"
    seconds: float

    def expect(self, scenario: Scenario) -> Expect:
        # A request that is under way seems to have taken that long.
        limits = scenario.publisher.flush_timeout_s, scenario.publisher.close_timeout_s
        return "tolerate" if self.seconds < min(limits) else "fail-loudly"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.seconds <= 0:
            found.append(f"seconds is {self.seconds:g}; a monotonic clock only goes forward")
        return found


class ClockDrift(_AtStep, frozen=True, kw_only=True, tag="clock-drift"):
    """From lockstep step ``step`` on, both clocks of a rank run ``ppm`` parts in a million too fast (negative: too
    slow)."""

    family: ClassVar[str] = "clock"
    ppm: float

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 0 < abs(self.ppm) <= 900_000:
            found.append(f"ppm is {self.ppm:g}; it must be up to 900000 either way, and not 0")
        return found


class ClockFreeze(_AtStep, frozen=True, kw_only=True, tag="clock-freeze"):
    """From lockstep step ``step`` on, a rank's wall clock stands still, while its monotonic clock goes on."""

    family: ClassVar[str] = "clock"


class DuplicateTable(Fault, frozen=True, kw_only=True, tag="duplicate-table"):
    """Two or more owners hold a table of this bare name. Fires when the model that trains really has them."""

    family: ClassVar[str] = "names"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "model"
    table: str

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    def problems(self, scenario: Scenario) -> list[str]:
        owners = sorted(t.owner for t in scenario.tables if t.name == self.table)
        if len(owners) < 2:
            return [f"needs table {self.table!r} under two owners, but the scenario has it under {owners or 'none'}"]
        return []


class QuietTable(Fault, frozen=True, kw_only=True, tag="quiet-table"):
    """No rank looks up anything in the tables of this bare name during ``steps`` lockstep steps from ``step`` on; other
    tables that share their features fall quiet with them."""

    family: ClassVar[str] = "data"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "model"
    table: str
    step: int
    steps: int = 1

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        named = [t for t in scenario.tables if t.name == self.table]
        if not named:
            found.append(f"no table of the scenario is called {self.table!r}")
        if self.step < 1 or self.steps < 1:
            found.append(f"step is {self.step} and steps {self.steps}; both must be at least 1")
        features = {f for t in named for f in t.feature_names}
        if any(
            t.collection == "ec" and t.sharding == "data_parallel" and features & set(t.feature_names)
            for t in scenario.tables
        ):
            found.append("a data-parallel EmbeddingCollection cannot be quiet in TorchRec on CPU")
        return found


class BadRow(_Refused, _AtStep, frozen=True, kw_only=True, tag="bad-row"):
    """The model diverges: after the update of lockstep step ``step``, a row of ``table`` (bare name) that lives on this
    rank and that the step changed holds ``value``. Such a row must not be sent. Replicated tables are left alone: their
    copies would differ."""

    family: ClassVar[str] = "data"
    table: str
    value: Literal["nan", "inf", "-inf"] = "nan"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.table not in {t.name for t in scenario.tables if t.sharding != "data_parallel"}:
            found.append(f"no table of the scenario is called {self.table!r} and not replicated")
        return found


class ReservedKey(_Refused, _AtStep, frozen=True, kw_only=True, tag="reserved-key"):
    """In lockstep step ``step`` this rank's dynamic ``table`` (bare name) is asked for key -1 too, a padding id that
    nobody masked. The store reserves it; no row of it may be sent."""

    family: ClassVar[str] = "data"
    table: str

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.table not in {t.name for t in scenario.tables if t.sharding == "dynamic"}:
            found.append(f"no dynamic table of the scenario is called {self.table!r}")
        return found


class EvaluationRaises(_AtStep, frozen=True, kw_only=True, tag="evaluation-raises"):
    """The evaluation after lockstep step ``step`` raises on this rank, inside ``paused()`` and after its forward; the
    training loop goes on, as it does when a metric fails."""

    family: ClassVar[str] = "data"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        every = scenario.workload.eval_every_steps
        if not every or self.step % every:
            found.append(f"workload.eval_every_steps is {every}, so there is no evaluation after step {self.step}")
        return found


class RefusedVersion(_Refused, Fault, frozen=True, kw_only=True, tag="refused-version"):
    """The target is asked to publish to a version that it must refuse: none, or the one that serving reads by
    default."""

    family: ClassVar[str] = "data"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "model"
    store_version: Literal["", "default"] = "default"


class StorageReplaced(_AtStep, frozen=True, kw_only=True, tag="storage-replaced"):
    """Right before lockstep step ``step``, the weights of this rank's sharded tables move to other memory, as a restore
    or a growth may do it; their values stay."""

    family: ClassVar[str] = "restart"


class LeakyError(Fault, frozen=True, kw_only=True, tag="leaky-error"):
    """The client raises a passing error after the nth ``write_flush()`` of this rank, with the rank's credentials in
    its text."""

    family: ClassVar[str] = "credentials"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    nth: int = 1

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    @property
    def failures(self) -> int:
        return 1

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.nth < 1:
            found.append(f"nth is {self.nth}; the first flush is 1")
        return found


class _AtDisk(Fault, frozen=True, kw_only=True):
    """Strikes the ``nth`` write of a rank, in one attempt, to the shards that it retains or spills."""

    family: ClassVar[str] = "disk"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    nth: int = 1
    attempt: int = 0

    def expect(self, scenario: Scenario) -> Expect:
        return "fail-loudly"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.nth < 1:
            found.append(f"nth is {self.nth}; the first write is 1")
        if not scenario.publisher.retain and not scenario.publisher.spill:
            found.append("publisher.retain and publisher.spill are false, so there is nothing to write")
        return found


class DiskCrash(_AtDisk, frozen=True, kw_only=True, tag="disk-crash"):
    """A rank is ended by SIGKILL in the middle of its ``nth`` write to a shard or manifest: half of the bytes are
    there."""


class DiskError(_AtDisk, frozen=True, kw_only=True, tag="disk-error"):
    """The ``nth`` write of a rank to a shard or manifest, and the ``count`` - 1 after it, fail half-way: the disk is
    full (``ENOSPC``) or broken (``EIO``)."""

    count: int = 1
    error: Literal["ENOSPC", "EIO"] = "ENOSPC"

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    @property
    def failures(self) -> int:
        return self.count

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.count < 1:
            found.append(f"count is {self.count}; it must be at least 1")
        return found


class ShardCorrupted(Fault, frozen=True, kw_only=True, tag="shard-corrupted"):
    """After the job and before its readback a bit flips in the ``nth`` retained shard, by step and rank (-1: the
    last)."""

    family: ClassVar[str] = "disk"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "model"
    nth: int = 1

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.nth == 0:
            found.append("nth is 0; the first shard is 1, the last one -1")
        if not scenario.publisher.readback:
            found.append("publisher.readback is false, so nobody would notice")
        return found


class CloseRaces(Fault, frozen=True, kw_only=True, tag="close-races"):
    """Another thread calls ``close()`` ``delay_ms`` after this rank called ``finish()``, as a handler of preemption
    does."""

    family: ClassVar[str] = "rank"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    delay_ms: int = 0

    def expect(self, scenario: Scenario) -> Expect:
        return "fail-loudly"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 0 <= self.delay_ms <= 10_000:
            found.append(f"delay_ms is {self.delay_ms}; it must be 0 to 10000")
        return found


class _AtStore(Fault, frozen=True, kw_only=True):
    """A store fault strikes ``count`` matching requests after ``skip`` others; ``rank`` None means any rank's."""

    family: ClassVar[str] = "store"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "store"
    rank: int | None = None
    route: str = "write"
    skip: int = 0
    count: int = 1

    def expect(self, scenario: Scenario) -> Expect:
        # Only writes are asked to be tried again.
        return "tolerate" if not self.failures or self.route in ("write", *ROUTES["write"]) else "fail-loudly"

    @property
    def failures(self) -> int:
        # In the worst case each attempt of one step meets one failure, so only fewer failures than attempts are sure to
        # be survived; more may be, and then nothing may be lost either.
        return self.count

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.route not in STORE_ROUTES:
            found.append(f"unknown route {self.route!r}; known routes: {', '.join(STORE_ROUTES)}")
        if self.skip < 0 or self.count < 1:
            found.append(f"skip is {self.skip} and count {self.count}; skip must be 0 or more, count 1 or more")
        return found


#: Routes that store faults can address, by the name the fake server gives them; groups of routes come first.
STORE_ROUTES = ("write", "lookup", "changes", "scan", "control", *(r for routes in ROUTES.values() for r in routes))


class StoreError(_AtStore, frozen=True, kw_only=True, tag="store-error"):
    """The store answers with an HTTP error; with ``commit`` the write was applied all the same (the reply is what is
    lost)."""

    status: int = 503
    commit: bool = False
    retry_after_s: float | None = None

    def expect(self, scenario: Scenario) -> Expect:
        return super().expect(scenario) if self.status in RETRIABLE_STATUSES else "fail-loudly"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 400 <= self.status <= 599:
            found.append(f"status is {self.status}; an HTTP error is 400 to 599")
        if self.retry_after_s is not None and not 0 <= self.retry_after_s <= 600:
            found.append(f"retry_after_s is {self.retry_after_s:g}; it must be 0 to 600")
        if self.commit and self.status < 500:
            found.append(f"status {self.status} tells a client that nothing was applied; commit needs a 5xx status")
        return found


class StoreReset(_AtStore, frozen=True, kw_only=True, tag="store-reset"):
    """The connection is reset without a reply, before the write or (``commit``) after it: the client cannot know
    which."""

    commit: bool = False


class StoreSlow(_AtStore, frozen=True, kw_only=True, tag="store-slow"):
    """The store takes ``delay_ms`` longer before it commits and answers."""

    delay_ms: int = 50

    def expect(self, scenario: Scenario) -> Expect:
        limits = scenario.publisher.flush_timeout_s, scenario.publisher.close_timeout_s
        return "tolerate" if self.delay_ms * self.count / 1000 < min(limits) else "fail-loudly"

    @property
    def failures(self) -> int:
        return 0

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 0 <= self.delay_ms <= 30_000:
            found.append(f"delay_ms is {self.delay_ms}; it must be 0 to 30000, for clients give up on slower answers")
        elif (delay_s := self.delay_ms * self.count / 1000) > scenario.deadlines.run_s / 2:
            found.append(f"may add up to {delay_s:g} s, over half of deadlines.run_s ({scenario.deadlines.run_s:g} s)")
        return found


class StorePartial(_AtStore, frozen=True, kw_only=True, tag="store-partial"):
    """The store applies a batch but for its last ``rows_failed`` rows and says so in its reply."""

    rows_failed: int = 1

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.rows_failed < 1:
            found.append(f"rows_failed is {self.rows_failed}; it must be at least 1")
        return found


class StoreTruncated(_AtStore, frozen=True, kw_only=True, tag="store-truncated"):
    """The store commits, begins its reply and breaks off after at most ``bytes_kept`` bytes of the body."""

    bytes_kept: int = 0

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.bytes_kept < 0:
            found.append(f"bytes_kept is {self.bytes_kept}; it must be 0 or more")
        return found


class StoreSlowBody(_AtStore, frozen=True, kw_only=True, tag="store-slow-body"):
    """The store commits and sends its reply at ``bytes_per_s``; a reply to a write has about 100 bytes."""

    bytes_per_s: float = 1000

    @property
    def failures(self) -> int:
        return 0

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.bytes_per_s < 10:
            found.append(f"bytes_per_s is {self.bytes_per_s:g}; it must be at least 10, for clients give up on less")
        return found


class StoreDuplicated(_AtStore, frozen=True, kw_only=True, tag="store-duplicated"):
    """The network delivers a write twice: the same rows under the same ts again, ``delay_ms`` after the first time."""

    delay_ms: int = 0

    @property
    def failures(self) -> int:
        return 0

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 0 <= self.delay_ms <= 30_000:
            found.append(f"delay_ms is {self.delay_ms}; it must be 0 to 30000")
        return found


class StoreReordered(_AtStore, frozen=True, kw_only=True, tag="store-reordered"):
    """A request is held until a later one of the same rank has been committed, for at most ``hold_ms_max``."""

    hold_ms_max: int = 200

    @property
    def failures(self) -> int:
        return 0

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 0 <= self.hold_ms_max <= 30_000:
            found.append(f"hold_ms_max is {self.hold_ms_max}; it must be 0 to 30000")
        return found


class StoreOutage(_AtStore, frozen=True, kw_only=True, tag="store-outage"):
    """From the request that it strikes on, the store refuses every matching one for ``duration_ms``: with ``status``,
    or (none) by a reset."""

    duration_ms: int = 100
    status: int | None = 503

    def expect(self, scenario: Scenario) -> Expect:
        retriable = self.status is None or self.status in RETRIABLE_STATUSES
        patient = self.duration_ms * self.count < scenario.publisher.patience_ms
        return super().expect(scenario) if retriable and patient else "fail-loudly"

    @property
    def failures(self) -> int:
        return 0

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if not 0 <= self.duration_ms <= 600_000:
            found.append(f"duration_ms is {self.duration_ms}; it must be 0 to 600000")
        if self.status is not None and not 400 <= self.status <= 599:
            found.append(f"status is {self.status}; an HTTP error is 400 to 599")
        return found


class _ViewGone(_Refused, _AtStore, frozen=True, kw_only=True):
    """What the view held, and the log of it, is gone with the view."""


class StoreViewDeleted(_ViewGone, frozen=True, kw_only=True, tag="store-view-deleted"):
    """Somebody deletes the view, with its rows, before the write is committed: this and later requests find none."""


class StoreSchemaChanged(_ViewGone, frozen=True, kw_only=True, tag="store-schema-changed"):
    """Somebody makes the view anew, empty and for rows of another type, before the write is committed: this and later
    writes are refused."""


class StoreTokenRevoked(_AtStore, frozen=True, kw_only=True, tag="store-token-revoked"):
    """The datasource's token is replaced before the write is committed: the old one is refused from then on, the new
    one is the datasource's to tell."""

    family: ClassVar[str] = "credentials"


AnyStoreFault = (
    StoreError
    | StoreReset
    | StoreSlow
    | StorePartial
    | StoreTruncated
    | StoreSlowBody
    | StoreDuplicated
    | StoreReordered
    | StoreOutage
    | StoreViewDeleted
    | StoreSchemaChanged
    | StoreTokenRevoked
)
AnyFault = (
    Exhaustion
    | RankRaise
    | RankKill
    | RankStall
    | CloseRaces
    | ClockOffset
    | ClockJump
    | ClockStall
    | ClockDrift
    | ClockFreeze
    | DuplicateTable
    | QuietTable
    | BadRow
    | ReservedKey
    | EvaluationRaises
    | RefusedVersion
    | StorageReplaced
    | LeakyError
    | DiskCrash
    | DiskError
    | ShardCorrupted
    | AnyStoreFault
)

#: kind -> class, in the order of documentation.
REGISTRY: dict[str, type[Fault]] = {str(cls.__struct_config__.tag): cls for cls in get_args(AnyFault)}


class InjectedFault(RuntimeError):
    """Raised by a planned ``rank-raise``. The message names rank, point and passage, so it can be told from a real
    bug."""


def summary(kind: str) -> str:
    """First sentence of a fault's documentation. Raises KeyError for an unknown kind."""
    return (inspect.getdoc(REGISTRY[kind]) or "").split("\n\n")[0].replace("\n", " ")
