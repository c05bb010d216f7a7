"""Histories as files: what was observed in one run, to be shown, judged again, compared or read by any Arrow library.

A saved history is a folder: ``scenario.json`` (which ``deltaproof run`` takes), ``events.arrow``, ``ledger.arrow``,
``writes.arrow``, ``strays.arrow``, ``final.arrow``, ``shards/*.arrow`` where copies were retained, and ``meta.json``,
written last: everything else that a `History` holds, and the sha256 of every file (docs/histories.md has the columns).
A folder without ``meta.json`` may be that of a run whose supervisor was ended: what its ranks wrote is read as far as
it goes, and the history says in ``incomplete`` why it proves nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from .disk import Shard, read_shards
from .errors import ScenarioError
from .history import (
    CHANGED,
    FINAL_SCHEMA,
    INITIAL,
    LEDGER_SCHEMA,
    LOOKED_UP,
    WRITES_SCHEMA,
    Attempt,
    Event,
    History,
    LedgerTable,
    RankOutcome,
    append_attempt,
    build_tables,
    embedding_column,
    read_events,
    read_ledger,
)
from .scenario import Scenario, Table

#: The version of saved histories that this package writes and the newest it reads.
HISTORY_VERSION = 1
META, SCENARIO, RUN = "meta.json", "scenario.json", "run.json"

#: ``data`` is JSON.
EVENTS_SCHEMA = pa.schema(
    [
        ("t_ms", pa.float64()),
        ("who", pa.string()),
        ("kind", pa.string()),
        ("rank", pa.int32()),
        ("step", pa.int64()),
        ("attempt", pa.int32()),
        ("data", pa.string()),
    ]
)
#: As the ranks wrote it, merged: ``table`` indexes meta.json's ``tables``, ``key_id`` is a row number, and ``rank`` is
#: the row's host (initial values; -1: every rank) or the rank that looked it up.
MERGED_SCHEMA = LEDGER_SCHEMA.append(pa.field("rank", pa.int32()))

#: What of a history has a file of its own; everything else is in meta.json.
_IN_FILES = {"scenario", "events", "tables", "writes", "strays", "final", "retained"}


def save(history: History, folder: Path) -> Path:
    """Write a history into ``folder``, which is made. Raises ScenarioError where there is one already, and OSError."""
    if (folder / META).exists():
        raise ScenarioError(f"{folder} already holds a history; name another folder")
    files = dict(_files(history))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    meta = _meta(history)
    meta["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    unfinished = folder / f"{META}.unfinished"
    unfinished.write_text(json.dumps({**meta, "sha256": _digest(meta)}, indent=1, ensure_ascii=False) + "\n")
    os.replace(unfinished, folder / META)
    return folder


def load(folder: Path) -> History:
    """Read what ``save`` wrote, or what a run left that was cut short. Raises ScenarioError with one line."""
    if not folder.is_dir():
        raise ScenarioError(f"{folder} is {'not a folder' if folder.exists() else 'not there'}; name a saved history")
    if (folder / META).exists():
        return _Saved(folder).history()
    if (folder / RUN).exists():
        return _run_cut_short(folder)
    raise ScenarioError(f"{folder} holds no history: there is neither {META} nor {RUN} in it")


def find(folder: Path) -> list[Path]:
    """The folder itself when it holds a history, else those of its folders that do, by name."""
    if any((folder / name).exists() for name in (META, RUN)):
        return [folder]
    return sorted({path.parent for name in (META, RUN) for path in folder.glob(f"*/{name}")})


def slug(text: str) -> str:
    """What a file's name can say of any text, in at most 100 characters; "" where nothing is left."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")[:100]


def folder_name(text: str) -> str:
    """A scenario's name as one that any folder can have."""
    return slug(text) or "history"


def fingerprint(history: History) -> str:
    """sha256 of everything observed but ``wall_s``: equal for runs of the virtual engine that are equal."""
    digest = hashlib.sha256(_digest({**_meta(history), "wall_s": 0}).encode())
    for name, content in _files(history):
        digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------- writing
def _files(history: History) -> Iterator[tuple[str, bytes]]:
    yield SCENARIO, history.scenario.to_json().encode()
    yield "events.arrow", _arrow(_events_table(history.events))
    yield "ledger.arrow", _arrow(_ledger_table(list(history.tables.values())))
    for name in ("writes", "strays", "final"):
        yield f"{name}.arrow", _arrow(getattr(history, name))
    for index, shard in enumerate(history.retained or ()):
        if shard.rows is not None:
            yield _retained_name(index), _arrow(shard.rows)


def _retained_name(index: int) -> str:
    return f"shards/{index:05d}.arrow"


def _arrow(table: pa.Table) -> bytes:
    """An Arrow IPC file; of equal tables, equal bytes, however they were cut into batches."""
    sink = pa.BufferOutputStream()
    # One chunk each, except of the ledger, whose batches are of one table and kind each.
    with pa.ipc.new_file(sink, table.schema) as writer:
        for batch in table.to_batches() if table.schema.equals(MERGED_SCHEMA) else table.combine_chunks().to_batches():
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _events_table(events: list[Event]) -> pa.Table:
    encoder = msgspec.json.Encoder(enc_hook=str)
    plain = [
        (e.t_ms, e.who, e.kind, e.rank, e.step, e.attempt, encoder.encode(e.data).decode(errors="replace"))
        for e in events
    ]
    columns = zip(*plain, strict=True) if plain else ([] for _ in EVENTS_SCHEMA)
    return pa.table(
        [pa.array(column, kind.type) for column, kind in zip(columns, EVENTS_SCHEMA, strict=True)], schema=EVENTS_SCHEMA
    )


def _ledger_table(tables: list[LedgerTable]) -> pa.Table:
    batches = []
    for index, table in enumerate(tables):
        rows = len(table.initial)
        for what, steps, keys, values, ranks in (
            (INITIAL, np.zeros(rows, np.int64), np.arange(rows), table.initial, table.host),
            (CHANGED, table.steps, table.keys, table.values, np.full(len(table.steps), -1)),
            (LOOKED_UP, table.lookup_steps, table.lookup_keys, None, table.lookup_ranks),
        ):
            if not len(keys):
                continue
            embedding = embedding_column(values, len(keys))
            numbers = (steps, np.int64), (np.full(len(keys), what), np.int8), (np.full(len(keys), index), np.int32)
            columns = [pa.array(np.asarray(c, kind)) for c, kind in (*numbers, (keys, np.int64))]
            batches.append(
                pa.record_batch([*columns, embedding, pa.array(np.asarray(ranks, np.int32))], schema=MERGED_SCHEMA)
            )
    return pa.Table.from_batches(batches, schema=MERGED_SCHEMA)


def _meta(history: History) -> dict[str, Any]:
    """What has no file of its own, as JSON can hold it."""
    fields = (f.name for f in dataclasses.fields(History) if f.name not in _IN_FILES)
    plain = {name: msgspec.to_builtins(getattr(history, name), str_keys=True, enc_hook=str) for name in fields}
    plain["tables"] = [
        {
            "fqn": fqn,
            "table": msgspec.to_builtins(t.table),
            "embedding_name": t.embedding_name,
            "dim": t.initial.shape[1],
            "since": t.since,
        }
        for fqn, t in history.tables.items()
    ]
    if history.retained is not None:
        plain["retained"] = [
            {"path": s.path, "manifest": s.manifest, "damage": s.damage, "readable": s.rows is not None}
            for s in history.retained
        ]
    found = {"deltaproof_history": HISTORY_VERSION, **_finite(plain)}
    # What is read back is what was digested: JSON knows no tuples and no float that is not finite.
    return typing.cast(dict[str, Any], json.loads(json.dumps(found)))


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text, which msgspec reads as a float again."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------- reading
class _Saved:
    """Reads one folder; whatever is wrong in it is a ScenarioError that names the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.meta = json.loads((folder / META).read_bytes())
            told = self.meta.pop("sha256")
        except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise self._damaged(META, f"cannot be read ({type(error).__name__})") from None
        version = self.meta.get("deltaproof_history")
        if isinstance(version, int) and version > HISTORY_VERSION:
            raise ScenarioError(
                f"{folder} is a history of version {version}, newer than this deltaproof reads ({HISTORY_VERSION}); "
                "upgrade deltaproof"
            )
        if told != _digest(self.meta):
            raise self._damaged(META, "is not what was saved")

    def _damaged(self, name: str, why: str) -> ScenarioError:
        return ScenarioError(f"{self.folder}: this history is damaged: {name} {why}")

    def _bytes(self, name: str) -> bytes:
        try:
            content = (self.folder / name).read_bytes()
        except OSError as error:
            raise self._damaged(name, f"cannot be read: {error.strerror or error}") from None
        if hashlib.sha256(content).hexdigest() != self.meta["files"].get(name):
            raise self._damaged(name, "is not what was saved")
        return content

    def _table(self, name: str) -> pa.Table:
        with pa.ipc.open_file(self._bytes(name)) as reader:
            return reader.read_all()

    def history(self) -> History:
        try:
            return self._history()
        except (KeyError, TypeError, ValueError, pa.ArrowException) as error:  # ScenarioError is a ValueError
            if isinstance(error, ScenarioError):
                raise
            raise self._damaged(META, f"does not fit its files ({type(error).__name__}: {error})") from None

    def _history(self) -> History:
        types = typing.get_type_hints(History)
        fields = {
            f.name: msgspec.convert(self.meta[f.name], types[f.name], strict=False, str_keys=True)
            for f in dataclasses.fields(History)
            # A field that is younger than the file has its default.
            if f.name not in _IN_FILES and f.name in self.meta
        }
        shards: list[Shard] | None = None
        if "retained" in self.meta:
            shards = [
                Shard(s["path"], s["manifest"], self._table(_retained_name(i)) if s["readable"] else None, s["damage"])
                for i, s in enumerate(self.meta["retained"])
            ]
        return History(
            scenario=Scenario.from_json(self._bytes(SCENARIO), where=str(self.folder / SCENARIO)),
            events=self._events(),
            tables=self._tables(),
            writes=self._table("writes.arrow"),
            strays=self._table("strays.arrow"),
            final=self._table("final.arrow"),
            retained=shards,
            **fields,
        )

    def _events(self) -> list[Event]:
        rows = self._table("events.arrow").to_pylist()
        return [Event(**{**row, "data": msgspec.json.decode(row["data"])}) for row in rows]

    def _tables(self) -> dict[str, LedgerTable]:
        parts = {}
        with pa.ipc.open_file(self._bytes("ledger.arrow")) as reader:
            for batch in (reader.get_batch(i) for i in range(reader.num_record_batches)):
                parts[batch["table"][0].as_py(), batch["what"][0].as_py()] = batch
        empty = pa.RecordBatch.from_pylist([], schema=MERGED_SCHEMA)
        tables = {}
        for index, told in enumerate(self.meta["tables"]):
            initial, changed, looked_up = (parts.get((index, w), empty) for w in (INITIAL, CHANGED, LOOKED_UP))
            values = [b["embedding"].flatten().to_numpy().reshape(-1, told["dim"]) for b in (initial, changed)]
            tables[told["fqn"]] = LedgerTable(
                table=msgspec.convert(told["table"], Table),
                embedding_name=told["embedding_name"],
                initial=values[0],
                steps=changed["step"].to_numpy(),
                keys=changed["key_id"].to_numpy(),
                values=values[1],
                lookup_steps=looked_up["step"].to_numpy(),
                lookup_ranks=looked_up["rank"].to_numpy(),
                lookup_keys=looked_up["key_id"].to_numpy(),
                host=initial["rank"].to_numpy(),
                since=told["since"],
            )
        return tables


# --------------------------------------------------------------------------------------------- runs that were cut short
def begin_run(folder: Path, scenario: Scenario, **meta: Any) -> None:
    """Write down what a run's folder is, before its ranks write theirs: it can be loaded from then on."""
    (folder / SCENARIO).write_text(scenario.to_json())
    (folder / RUN).write_text(json.dumps({"deltaproof_run": HISTORY_VERSION, **meta}) + "\n")


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Where the ranks of one start of the job leave their files: the run's own folder, or one in it."""
    return folder / f"attempt-{attempt}" if attempt else folder


def _run_cut_short(folder: Path) -> History:
    scenario = Scenario.load(folder / SCENARIO)
    try:
        run = json.loads((folder / RUN).read_bytes())
        target, engine = str(run["target"]), str(run["engine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{folder}: {RUN} cannot be read ({type(error).__name__})") from None
    missing = "the run was cut short, and the store's log and content are lost"
    events: list[Event] = []
    attempts: list[Attempt] = []
    tables: dict[str, LedgerTable] = {}
    try:
        for number in range(1 + len(scenario.restarts)):
            place = attempt_folder(folder, number)
            if not place.is_dir():
                break
            told, mine = _attempt(place, scenario.of_attempt(number), number)
            restored = next((e for e in told if e.kind == "restored"), None)
            began = min((e.t_ms for e in told), default=float("-inf"))
            attempt = Attempt(scenario.of_attempt(number).world_size, _outcomes(told, scenario, number), begin_ms=began)
            try:
                tables = append_attempt(tables, mine, attempt, attempts, restored) if attempts else mine
            except ValueError:
                missing += f", and the ledger of attempt {number} is not whole"
            events += told
            attempts.append(attempt)
    except (msgspec.MsgspecError, ValueError, OSError, pa.ArrowException) as error:
        raise ScenarioError(f"{folder}: what the ranks wrote is damaged: {error}") from None
    events.sort(key=lambda e: e.t_ms)
    fired = [0] * len(scenario.faults)
    for event in events:
        if event.kind == "fault" and event.data.get("index", -1) in range(len(fired)):
            fired[event.data["index"]] += 1
    return History(
        scenario=scenario,
        target=target,
        engine=engine,
        events=events,
        outcomes=attempts[-1].outcomes,
        tables=tables,
        manifest=scenario.manifest(),
        writes=WRITES_SCHEMA.empty_table(),
        final=FINAL_SCHEMA.empty_table(),
        fired=fired,
        attempts=attempts if len(attempts) > 1 else [],
        retained=read_shards(folder / "retained") if scenario.publisher.retain else None,
        incomplete=missing,
    )


def _attempt(place: Path, scenario: Scenario, number: int) -> tuple[list[Event], dict[str, LedgerTable]]:
    ranks = range(scenario.world_size)
    names = ["supervisor", *(f"rank{rank}" for rank in ranks)]
    events = [event for name in names for event in read_events(place / f"{name}.events.jsonl")]
    ledgers = [read_ledger(place / f"rank{rank}.ledger.arrows") for rank in ranks]
    return events, build_tables(scenario, scenario.manifest(), ledgers)


def _outcomes(events: list[Event], scenario: Scenario, number: int) -> list[RankOutcome]:
    """How each rank ended, as far as it was written down."""
    found = []
    for rank in range(scenario.of_attempt(number).world_size):
        mine = {e.kind: e for e in events if e.rank == rank}
        error, exit_ = mine.get("error"), mine.get("rank-exit")
        code = None if exit_ is None else exit_.data.get("exitcode")
        if error is not None:
            told = f"{error.data.get('type')}: {error.data.get('message')}"
            outcome = RankOutcome(rank, "error", code, told, error.data.get("where", ""), attempt=number)
        elif "rank-end" in mine:
            outcome = RankOutcome(rank, "ok", code, attempt=number)
        else:
            why = "" if exit_ else "it was not written down how this rank ended"
            outcome = RankOutcome(rank, "killed" if exit_ else "vanished", code, why, attempt=number)
        found.append(outcome)
    return found
