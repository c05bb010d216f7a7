"""The faults a scenario can plan, where each strikes, and what may follow.

A fault is plain data. It is addressed by place and moment: a rank, a named point and the *nth* passage of that point by
that rank, or, for the store, a route, a client and how many matching requests to let through first. Whoever carries a
fault out records each firing in the history (event ``fault``); a planned fault that never fired makes a run *not
exercised*, never *held*.

Every fault says what may follow:

- ``tolerate``: the job succeeds and nothing is lost;
- ``fail-loudly``: the job may fail, but says so, names the rank, and ends within the scenario's deadlines.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from .scenario import Scenario

#: Greatest size of any number in a fault: 300 years in seconds, which every clock and counter can hold.
NUMBER_MAX = 1e10
Expect = Literal["tolerate", "fail-loudly"]
Policy = Literal["stop-together", "fail-loudly", "empty-batches"]

#: Named points that a rank passes, in the order of a run. The nth passage of a ``train.*`` point is lockstep step n,
#: that of ``publish.*`` the rank's own step n (the first call is passage 1), that of ``sdk.*`` the nth call of the
#: client.
POINTS: dict[str, str] = {
    "publisher.start": "just before the target's start()",
    "train.before-forward": "a batch is drawn, the forward pass not begun",
    "train.before-backward": "the forward pass (and its lookups) done, no gradient yet",
    "train.after-step": "weights are updated, the publisher not yet called",
    "publish.before": "just before after_step()",
    "publish.after": "just after after_step() returned",
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
        rank = getattr(self, "rank", None)
        if rank is not None and not 0 <= rank < scenario.world_size:
            return [f"rank {rank} does not exist in a world of {scenario.world_size}"]
        return []

    @property
    def failures(self) -> int:
        """How many attempts to send a step this fault can spoil."""
        return 0

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


class ClockOffset(Fault, frozen=True, kw_only=True, tag="clock-offset"):
    """A rank's wall clock is wrong by ``seconds`` (positive: ahead) from its first step on."""

    family: ClassVar[str] = "clock"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    seconds: float

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"


class ClockJump(Fault, frozen=True, kw_only=True, tag="clock-jump"):
    """A rank's wall clock jumps by ``seconds`` (negative: backwards) right before lockstep step ``step``."""

    family: ClassVar[str] = "clock"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "rank"
    rank: int
    step: int
    seconds: float

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

    def problems(self, scenario: Scenario) -> list[str]:
        found = super().problems(scenario)
        if self.step < 1:
            found.append(f"step is {self.step}; the first step is 1")
        return found


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


class _AtStore(Fault, frozen=True, kw_only=True):
    """A store fault strikes ``count`` matching requests after ``skip`` others; ``rank`` None means any rank's."""

    family: ClassVar[str] = "store"
    strikes: ClassVar[Literal["rank", "store", "model"]] = "store"
    rank: int | None = None
    route: str = "write"
    skip: int = 0
    count: int = 1

    def expect(self, scenario: Scenario) -> Expect:
        return "tolerate"

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


#: Routes that store faults can address, by the name the fake server gives them.
STORE_ROUTES = ("write",)


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


AnyFault = (
    Exhaustion
    | RankRaise
    | RankKill
    | ClockOffset
    | ClockJump
    | DuplicateTable
    | StoreError
    | StoreReset
    | StoreSlow
    | StorePartial
)

#: kind -> class, in the order of documentation.
REGISTRY: dict[str, type[Fault]] = {str(cls.__struct_config__.tag): cls for cls in get_args(AnyFault)}


class InjectedFault(RuntimeError):
    """Raised by a planned ``rank-raise``. The message names rank, point and passage, so it can be told from a real
    bug."""


def summary(kind: str) -> str:
    """First sentence of a fault's documentation. Raises KeyError for an unknown kind."""
    return (inspect.getdoc(REGISTRY[kind]) or "").split("\n\n")[0].replace("\n", " ")
