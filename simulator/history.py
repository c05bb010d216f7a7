"""What was observed in one run: events of every rank, of the store and of the supervisor, and the ground-truth ledger.

The ledger is kept by the simulator from the model's own weights, step by step, and never from the target's tracker.
A history is written while the run goes on, one file per rank, each record flushed as it happens, so that a rank killed
by SIGKILL leaves everything up to its last record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pyarrow as pa

from .disk import Shard
from .scenario import Scenario, Table

#: One row of a ledger file. ``what``: 0 initial value, 1 value after the step changed it, 2 looked up by this rank's
#: own training batch (no embedding). ``table`` indexes ``scenario.tables``; ``step`` is the lockstep step, 0 for
#: initial values.
LEDGER_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("what", pa.int8()),
        ("table", pa.int32()),
        ("key_id", pa.int64()),
        ("embedding", pa.list_(pa.float32())),
    ]
)
INITIAL, CHANGED, LOOKED_UP = 0, 1, 2

#: Accepted rows of the store, in arrival order: the log that the fake keeps (fakes/store.py).
WRITES_SCHEMA = pa.schema(
    [
        ("arrival", pa.int64()),
        ("t_ms", pa.float64()),
        ("version", pa.string()),
        ("pk", pa.string()),
        ("sk", pa.int64()),
        ("ts", pa.int64()),
        ("embedding", pa.list_(pa.float32())),
        ("client", pa.string()),
        ("request_id", pa.string()),
    ]
)

#: What a reader of the store sees after the run.
FINAL_SCHEMA = pa.schema(
    [("pk", pa.string()), ("sk", pa.int64()), ("embedding", pa.list_(pa.float32())), ("ts", pa.int64())]
)


def told_by_target(final: pa.Table, t_ms: float, version: str) -> tuple[pa.Table, pa.Table]:
    """``History.final`` and ``writes`` of a store that keeps no log: each row as if it had arrived at ``t_ms``."""
    rows = final.num_rows
    constant = {"t_ms": t_ms, "version": version, "client": "", "request_id": ""}
    columns = {name: pa.array([value] * rows, WRITES_SCHEMA.field(name).type) for name, value in constant.items()}
    columns |= {name: final[name] for name in ("pk", "sk", "ts", "embedding")}
    columns["arrival"] = pa.array(range(rows), pa.int64())
    return final, pa.table([columns[name] for name in WRITES_SCHEMA.names], schema=WRITES_SCHEMA)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened. ``t_ms``: milliseconds on the host's monotonic clock, comparable between processes of a
    host.

    ``who`` is ``rank3``, ``store`` or ``supervisor``. ``attempt`` counts the starts of the job that the event's writer
    took part in (the store: 0 always); ``step`` is that attempt's own count. Kinds written by a rank: ``rank-start``,
    ``model-ready``, ``restored``, ``publisher-started``, ``step``, ``after-step``, ``evaluation``, ``checkpoint``,
    ``sdk-write``, ``sdk-flush``, ``finished``, ``closed``, ``readback``, ``fault``, ``error``, ``rank-end``. By the
    supervisor: ``rank-exit``, ``hang`` (where a rank was when somebody's time was over: ``says``), ``fault``,
    ``rank-ended-by-supervisor``. By the store: ``request``, ``fault``.
    """

    t_ms: float
    who: str
    kind: str
    rank: int | None = None
    step: int | None = None
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    attempt: int = 0

    def line(self, start_ms: float = 0.0) -> str:
        """One line for a timeline: milliseconds since ``start_ms``, who, what."""
        where = "" if self.step is None else f" step {self.step}"
        details = " ".join(
            f"{k}={one_line(v)}" for k, v in self.data.items() if k != "traceback" and v not in ("", [], {})
        )
        who = f"{self.who} (attempt {self.attempt})" if self.attempt else self.who
        return f"{self.t_ms - start_ms:10.1f} ms  {who:<10} {self.kind}{where}  {details}".rstrip()


def one_line(value: object) -> str:
    """Any value as at most 160 characters without a line break."""
    text = " ".join(str(value).split())
    return text if len(text) <= 160 else text[:157] + "..."


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Around every record a rank writes. When the disk is full or broken, the process ends with ``os.EX_IOERR``.

    At once, because the target would otherwise meet the harness's own error, and because a run that was not recorded
    cannot be judged.
    """
    try:
        yield
    except OSError as error:
        os.write(2, f"deltaproof: cannot record this run: {error}\n".encode(errors="replace"))
        os._exit(os.EX_IOERR)


class EventWriter:
    """Appends events of one rank to a JSON-lines file, each flushed to the kernel before the call returns;
    thread-safe.

    The host's clock is taken at construction: what is put in place of it later is for the target to read.
    """

    def __init__(self, path: Path, who: str, rank: int | None, attempt: int = 0) -> None:
        self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115  (open as long as the rank lives)
        self._who, self._rank, self._attempt = who, rank, attempt
        self._monotonic_s = time.monotonic
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._lock = threading.Lock()

    def write(self, kind: str, *, step: int | None = None, rank: int | None = None, **data: Any) -> None:
        """``rank``: of whom the event tells, where that is not the writer's own."""
        about = self._rank if rank is None else rank
        event = Event(t_ms=self._monotonic_s() * 1000, who=self._who, kind=kind, rank=about, step=step, data=data)
        if self._attempt:
            event = msgspec.structs.replace(event, attempt=self._attempt)
        line = self._encoder.encode(event) + b"\n"
        with self._lock, recording():
            self._file.write(line)

    def close(self) -> None:
        self._file.close()


def append_event(path: Path, event: Event) -> None:
    """Write an event behind those of a file that `read_events` reads."""
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(event, enc_hook=str) + b"\n")


def read_events(path: Path) -> list[Event]:
    """All whole events of a file; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    decoder = msgspec.json.Decoder(Event)
    *lines, last = path.read_bytes().split(b"\n")
    events = [decoder.decode(line) for line in lines]
    with contextlib.suppress(msgspec.MsgspecError):
        events.append(decoder.decode(last))
    return events


def embedding_column(rows: np.ndarray | None, n: int) -> pa.Array:
    """list<float32> (n,) of float32 rows (n, dim), or n nulls."""
    if rows is None:
        return pa.nulls(n, LEDGER_SCHEMA.field("embedding").type)
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * rows.shape[1])
    return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(rows, np.float32).ravel()))


class LedgerWriter:
    """Appends ledger batches of one rank to an Arrow IPC stream, each flushed to the kernel as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        with recording():
            self._writer = pa.ipc.new_stream(self._file, LEDGER_SCHEMA)

    def write(self, step: int, entries: Iterable[tuple[int, int, np.ndarray, np.ndarray | None]]) -> None:
        """``entries``: (what, table index, int64 keys (n,), float32 rows (n, dim) or None), all of one step."""
        for what, table, keys, rows in entries:
            n = len(keys)
            if n == 0:
                continue
            columns = [np.full(n, step, np.int64), np.full(n, what, np.int8), np.full(n, table, np.int32), keys]
            batch = pa.record_batch([*map(pa.array, columns), embedding_column(rows, n)], schema=LEDGER_SCHEMA)
            with recording():
                self._writer.write_batch(batch)

    def close(self) -> None:
        with recording():
            self._writer.close()
        self._file.close()


def read_ledger(path: Path) -> list[pa.RecordBatch]:
    """All whole batches of a ledger file; one cut short by a kill is left out. An absent file gives none."""
    batches: list[pa.RecordBatch] = []
    if path.exists():
        with (
            contextlib.suppress(pa.ArrowInvalid, OSError, StopIteration),
            pa.ipc.open_stream(path.read_bytes()) as reader,
        ):
            while True:
                batches.append(reader.read_next_batch())
    return batches


@dataclass
class LedgerTable:
    """Ground truth of one table. ``rows``, ``dim`` from the scenario; values are float32, compared bit by bit.

    Keys are row numbers here, whatever the store calls them (``key_ids``, ``numbers``).
    ``initial`` (rows, dim); ``steps`` (m,), ``keys`` (m,), ``values`` (m, dim): each change, in step order, once;
    ``lookup_steps``, ``lookup_ranks``, ``lookup_keys`` (n,): each training lookup; ``host`` (rows,): hosting rank, -1
    every. Where the job was restarted, steps count on (``Attempt``), the restore of a checkpoint is a change like any
    other, and ``host`` and ``responsible`` speak of the last attempt, which began after step ``since``.
    """

    table: Table
    embedding_name: str
    initial: np.ndarray
    steps: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    lookup_steps: np.ndarray
    lookup_ranks: np.ndarray
    lookup_keys: np.ndarray
    host: np.ndarray
    since: int = 0

    @cached_property
    def key_ids(self) -> np.ndarray:
        """int64 (rows,): the store's key of each row number, by which everything here is known."""
        return self.table.key_ids(np.arange(len(self.initial)))

    def numbers(self, key_ids: np.ndarray) -> np.ndarray:
        """int64 (n,): row numbers of the store's keys; what is no key of the table is outside of it."""
        if self.table.sharding != "dynamic":
            return key_ids
        order = np.argsort(self.key_ids)
        at = np.minimum(np.searchsorted(self.key_ids[order], key_ids), len(order) - 1)
        return np.where(self.key_ids[order][at] == key_ids, order[at], -1)

    @cached_property
    def final(self) -> np.ndarray:
        """float32 (rows, dim): what the model held last, as far as the ledger was written."""
        final = self.initial.copy()
        final[self.keys] = self.values  # the last of equal keys wins, and changes are in step order
        return final

    @cached_property
    def _changes_by_key(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.keys, kind="stable")
        return order, self.keys[order]

    def versions(self, key: int) -> list[tuple[int, bytes]]:
        """(step, bytes of the float32 row) for every value this key ever held, the initial one at step 0 first."""
        order, keys = self._changes_by_key
        lo, hi = np.searchsorted(keys, [key, key + 1])
        return [(0, self.initial[key].tobytes())] + [
            (int(self.steps[i]), self.values[i].tobytes()) for i in order[lo:hi]
        ]

    @cached_property
    def last_lookup(self) -> dict[int, int]:
        """key -> last step at which any rank looked it up in training."""
        order = np.argsort(self.lookup_steps, kind="stable")
        return dict(zip(self.lookup_keys[order].tolist(), self.lookup_steps[order].tolist(), strict=True))

    def responsible(self, rank: int) -> np.ndarray:
        """int64 sorted keys that ``rank`` had to publish in the last attempt: touched rows it hosts; of a replicated
        table, those it looked up."""
        recent = self.lookup_steps > self.since
        if self.table.sharding == "data_parallel":
            return np.unique(self.lookup_keys[recent & (self.lookup_ranks == rank)])
        touched = np.unique(self.lookup_keys[recent])
        return touched[self.host[touched] == rank]


@dataclass
class RankOutcome:
    """How one rank ended. ``status``: ``ok``, ``error`` (it raised), ``killed`` (a signal the supervisor did not send),
    ``ended`` (by the supervisor after a peer failed), ``deadline`` (by the supervisor, which had waited too long),
    ``vanished`` (it exited without an error and without finishing). ``error`` is what it said, ``where`` the call of
    the target that raised it (``factory``, ``start``, ``after_step``, ``paused``, ``finish``, ``close``, …), or
    ``train`` for the loop's own."""

    rank: int
    status: str
    exitcode: int | None = None
    error: str = ""
    where: str = ""
    unacknowledged: tuple[int, ...] = ()
    attempt: int = 0


@dataclass
class Attempt:
    """One start of the job.

    ``shift``: what to add to its own lockstep steps to get the history's, which never go back. ``checkpoint_of`` and
    ``restored``: the attempt and its own step that the checkpoint was made in (None and 0: there was none); the restore
    is the history's step ``since``. ``begin_ms``, ``end_ms``: on the host's monotonic clock.
    """

    world_size: int
    outcomes: list[RankOutcome]
    shift: int = 0
    checkpoint_of: int | None = None
    restored: int = 0
    begin_ms: float = float("-inf")
    end_ms: float = float("inf")

    @property
    def since(self) -> int:
        """The history's step after which this attempt began to train; 0 for the first."""
        return self.shift + self.restored


@dataclass(frozen=True)
class Leak:
    """A planted secret, by name, in a file of the run; ``line`` is the text around it without the secret's value."""

    secret: str
    file: str
    line: str


def find_leaks(folder: Path, secrets: Mapping[str, str]) -> list[Leak]:
    """Where the values of ``secrets`` appear in the files of ``folder``: at most once per secret and file."""
    leaks = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # the last rank to leave a process group removes the file that they met at
        for name, value in secrets.items():
            at = content.find(value.encode())
            if at >= 0:
                begin, end = content.rfind(b"\n", 0, at) + 1, content.find(b"\n", at)
                line = content[max(begin, at - 200) : min(end if end >= 0 else len(content), at + 200)]
                text = line.decode(errors="replace")
                for other, hidden in secrets.items():
                    text = text.replace(hidden, f"[{other}]")
                leaks.append(Leak(name, str(path.relative_to(folder)), text))
    return leaks


@dataclass
class History:
    """Everything observed in one run. ``writes``: WRITES_SCHEMA; ``final``: FINAL_SCHEMA; ``strays``: accepted writes
    to versions that are not the run's (``writes`` and ``final`` are of the run's own); ``fired``: firings per fault
    index; ``schedule``: the choices of the virtual engine's scheduler, which repeat the run; ``planted``: names of the
    secrets that were planted, and searched for in every file that the run left; ``leaks``: where one was found;
    ``attempts``: all starts of the job, when there were several (``starts`` has them always); ``outcomes`` are those of
    the last one; ``retained``: the copies of acknowledged deltas that the ranks left, None when they kept none;
    ``incomplete``: why this is not all that there was to observe, so that nothing can be judged by it; ``launcher``:
    ``own`` or ``torchrun``, on how many ``nodes``; ``supervision``: ``torchrun``, which ends the peers of a rank that
    failed, or ``strict``, under which each rank must end by itself; ``store_log``: whether ``writes`` says what was
    accepted and when: a target's own store only tells what it holds, which then stands in ``writes`` too."""

    scenario: Scenario
    target: str
    engine: str
    events: list[Event]
    outcomes: list[RankOutcome]
    tables: dict[str, LedgerTable]
    manifest: dict[str, str]
    writes: pa.Table
    final: pa.Table
    fired: list[int]
    wall_s: float = 0.0
    strays: pa.Table = field(default_factory=WRITES_SCHEMA.empty_table)
    stacks: dict[int, str] = field(default_factory=dict)
    schedule: list[int] | None = None
    planted: tuple[str, ...] = ()
    leaks: list[Leak] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    retained: list[Shard] | None = None
    incomplete: str = ""
    launcher: str = "own"
    nodes: int = 1
    supervision: str = "torchrun"
    store_log: bool = True

    def save(self, folder: Path) -> Path:
        """Write everything into a folder, which is made. Raises ScenarioError where there is a history, and OSError."""
        from . import recorded

        return recorded.save(self, folder)

    @classmethod
    def load(cls, folder: Path) -> History:
        """Read what ``save`` wrote, or the folder of a run that was cut short. Raises ScenarioError with one line."""
        from . import recorded

        return recorded.load(folder)

    @property
    def starts(self) -> list[Attempt]:
        """All starts of the job; usually one."""
        *earlier, last = self.attempts or [Attempt(self.scenario.world_size, [])]
        return [*earlier, dataclasses.replace(last, outcomes=self.outcomes)]

    @property
    def restarted(self) -> bool:
        return len(self.attempts) > 1

    @property
    def ranks_max(self) -> int:
        """The greatest number of ranks that the job ever had."""
        return max(attempt.world_size for attempt in self.starts)

    def moment(self, event: Event) -> int | None:
        """The history's lockstep step of an event of a rank, which counts its attempt's own."""
        shift = self.attempts[event.attempt].shift if self.attempts else 0
        return None if event.step is None else event.step + shift

    @property
    def succeeded(self) -> bool:
        """The job as its launcher sees it: every rank ended, in the last attempt, by itself and without an error."""
        return bool(self.outcomes) and all(o.status == "ok" for o in self.outcomes)

    def of(self, who: str, *kinds: str) -> Iterator[Event]:
        """Events of one source in time order, of the given kinds (all kinds when none is given)."""
        return (e for e in self.events if e.who == who and (not kinds or e.kind in kinds))

    @property
    def start_ms(self) -> float:
        return self.events[0].t_ms if self.events else 0.0

    @cached_property
    def by_name(self) -> dict[str, LedgerTable]:
        """embedding_name -> table."""
        return {t.embedding_name: t for t in self.tables.values()}


def build_tables(
    scenario: Scenario, manifest: dict[str, str], ledgers: Sequence[Sequence[pa.RecordBatch]]
) -> dict[str, LedgerTable]:
    """Merge the ranks' ledgers (index = rank). Raises ValueError when replicas of one row disagree at one step."""
    parts: dict[tuple[int, int], list[tuple[int, pa.RecordBatch]]] = {}
    for rank, batches in enumerate(ledgers):
        for batch in batches:
            parts.setdefault((batch["table"][0].as_py(), batch["what"][0].as_py()), []).append((rank, batch))

    def columns(index: int, what: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        found = parts.get((index, what), [])
        ranks = [np.full(b.num_rows, rank, np.int32) for rank, b in found]
        steps = [b["step"].to_numpy() for _, b in found]
        keys = [b["key_id"].to_numpy() for _, b in found]
        values = [b["embedding"].flatten().to_numpy().reshape(-1, dim) for _, b in found if what != LOOKED_UP]
        return (
            np.concatenate(ranks or [np.empty(0, np.int32)]),
            np.concatenate(steps or [np.empty(0, np.int64)]),
            np.concatenate(keys or [np.empty(0, np.int64)]),
            np.concatenate(values or [np.empty((0, dim), np.float32)]),
        )

    tables: dict[str, LedgerTable] = {}
    for index, table in enumerate(scenario.tables):
        ranks, _, keys, values = columns(index, INITIAL, table.dim)
        initial = np.full((table.rows, table.dim), np.nan, np.float32)
        initial[keys] = values
        host = np.full(table.rows, -1, np.int32)
        if table.sharding != "data_parallel":
            host[keys] = ranks
        _, steps, keys, values = columns(index, CHANGED, table.dim)
        order = np.lexsort((keys, steps))
        steps, keys, values = steps[order], keys[order], values[order]
        if table.sharding == "data_parallel" and len(keys):
            twin = (np.diff(keys) == 0) & (np.diff(steps) == 0)
            if (values[1:][twin].view(np.uint32) != values[:-1][twin].view(np.uint32)).any():
                raise ValueError(f"replicas of data-parallel table {table.fqn} hold different values after one step")
            keep = np.concatenate([[True], ~twin])
            steps, keys, values = steps[keep], keys[keep], values[keep]
        lookup_ranks, lookup_steps, lookup_keys, _ = columns(index, LOOKED_UP, table.dim)
        tables[table.fqn] = LedgerTable(
            table=table,
            embedding_name=manifest[table.fqn],
            initial=initial,
            steps=steps,
            keys=keys,
            values=values,
            lookup_steps=lookup_steps,
            lookup_ranks=lookup_ranks,
            lookup_keys=lookup_keys,
            host=host,
        )
    return tables


def append_attempt(
    tables: dict[str, LedgerTable],
    mine: dict[str, LedgerTable],
    attempt: Attempt,
    earlier: Sequence[Attempt],
    restored: Event | None,
) -> dict[str, LedgerTable]:
    """The ledger of a job with one more attempt in it: ``mine``, by that attempt's own count of steps.

    ``restored``: the event of that name of one of its ranks, if any came that far. Notes in ``attempt`` how its steps
    are counted. Raises ValueError when the restore gave anything but what the model held at the checkpoint: then the
    ledger is worth nothing.
    """
    last = max(int(np.max(steps, initial=t.since)) for t in tables.values() for steps in (t.steps, t.lookup_steps))
    if restored is not None:
        attempt.restored, attempt.checkpoint_of = restored.step or 0, restored.data["checkpoint_of"]
    attempt.shift = last + 1 - attempt.restored
    moment = 0
    if attempt.checkpoint_of is not None:
        moment = attempt.restored + earlier[attempt.checkpoint_of].shift
    for fqn, ledger in tables.items():
        found, wanted = mine[fqn].initial, values_at(ledger, moment)
        known = ~np.isnan(found).all(axis=1)
        if found[known].tobytes() != wanted[known].tobytes():
            raise ValueError(f"table {fqn} was not restored to what it held at the checkpoint after step {moment}")
    return continue_tables(tables, mine, attempt.shift, attempt.restored)


def continue_tables(
    earlier: dict[str, LedgerTable], later: dict[str, LedgerTable], shift: int, restored: int
) -> dict[str, LedgerTable]:
    """The ledger of a job that was restarted: ``later``, of the attempt that began with the restore of the checkpoint
    made after its own step ``restored``, appended to ``earlier`` with steps moved on by ``shift``.

    What the restore changed is a change at step ``shift + restored``. Rows of ``later`` that nobody wrote down (NaN)
    count as unchanged: that attempt ended before it had a model.
    """
    tables = {}
    for fqn, new in later.items():
        old = earlier[fqn]
        bits = [np.ascontiguousarray(rows).view(np.uint32) for rows in (old.final, new.initial)]
        written = ~np.isnan(new.initial).all(axis=1)
        changed = np.flatnonzero(written & (bits[0] != bits[1]).any(axis=1))
        tables[fqn] = LedgerTable(
            table=old.table,
            embedding_name=old.embedding_name,
            initial=old.initial,
            steps=np.concatenate([old.steps, np.full(len(changed), shift + restored), new.steps + shift]),
            keys=np.concatenate([old.keys, changed, new.keys]),
            values=np.concatenate([old.values, new.initial[changed], new.values]),
            lookup_steps=np.concatenate([old.lookup_steps, new.lookup_steps + shift]),
            lookup_ranks=np.concatenate([old.lookup_ranks, new.lookup_ranks]),
            lookup_keys=np.concatenate([old.lookup_keys, new.lookup_keys]),
            host=new.host,
            since=shift + restored,
        )
    return tables


def values_at(ledger: LedgerTable, step: int) -> np.ndarray:
    """float32 (rows, dim): what the model held at the end of ``step``."""
    rows, until = ledger.initial.copy(), np.searchsorted(ledger.steps, step, side="right")
    rows[ledger.keys[:until]] = ledger.values[:until]
    return rows
