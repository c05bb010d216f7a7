"""Compares retained shards with the store (readback), and sends spilled rows that the store still lacks (resend).

Of each key, the shards' row of the greatest ts counts. Shards are read row group by row group, three times: to verify
them, to find the greatest ts of each key, and to compare or send those rows. Besides one row group only keys and ts are
held, of `Survey.keys_max` keys or twice that: where there are more, the last two readings are repeated, each time for
another share of the keys.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .delta import SCHEMAS, Mask
from .shards import Damaged, Entry, Files, Found, State, folder_name, verify
from .uploader import Uploader, UploadError

LOOKUP_ROWS = 5_000
EXAMPLES_MAX = 10  # per verdict
ABSENT, UNTOLD = -1, -2  # in place of a ts: the store has no row; the SDK does not say
# Where several shards have a key's greatest ts the store may hold any of them: the later of these verdicts counts.
VERDICTS = ("CORRUPT_LOCAL", "DIFFERENT", "MISSING", "UNDECIDED", "SUPERSEDED", "MATCH")
CORRUPT_LOCAL, DIFFERENT, MISSING, UNDECIDED, SUPERSEDED, MATCH = range(len(VERDICTS))
BAD = VERDICTS[:SUPERSEDED]

Int64s = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]


class ReadbackError(ValueError):
    """What cannot be compared or sent again. The message says what to do."""


class Report(msgspec.Struct):
    """What a readback found. `verdicts` counts keys; CORRUPT_LOCAL counts every row of a damaged shard too."""

    damaged: dict[str, str]
    unverified: list[str]
    shards: int
    rows: int
    compared: int = 0
    maybe_expired: int = 0  # of MISSING: so old that the store need not have them any more
    verdicts: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    examples: list[dict[str, Any]] = []

    @property
    def agrees(self) -> bool:
        """Something was compared, and nothing speaks against the store or the shards."""
        return self.compared > 0 and not self.damaged and not any(self.verdicts[name] for name in BAD)


class ResendReport(msgspec.Struct):
    """What was sent. `superseded`: the store has a row as new or newer, or a later spilled row of the key was sent."""

    damaged: dict[str, str]
    unverified: list[str]
    shards: int
    rows: int
    sent: int = 0
    superseded: int = 0


class Newest:
    """Greatest ts (ms) of each key of one table: int64 each, keys ascending, once `settle` was called."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Int64s, Int64s]] = []

    def add(self, keys: Int64s, ts: Int64s) -> None:
        self._waiting.append((keys, ts))

    def settle(self) -> None:
        keys, ts = (np.concatenate(columns) for columns in zip(*self._waiting, strict=True))
        order = np.lexsort((ts, keys))
        self.keys, self.ts = keys[order], ts[order]
        self.keep(np.append(self.keys[1:] != self.keys[:-1], True)[: len(keys)])

    def keep(self, mask: Mask) -> None:
        self.keys, self.ts = self.keys[mask], self.ts[mask]
        self.verdicts = np.full(len(self.keys), CORRUPT_LOCAL, np.uint8)
        self._waiting = [(self.keys, self.ts)]

    def find(self, keys: Int64s, ts: Int64s) -> tuple[Places, Places]:
        """(places here, places in the arguments) of rows that are their key's newest; of equal ones the last."""
        at = np.searchsorted(self.keys, keys)
        rows = np.flatnonzero(at < len(self.keys))
        rows = rows[(self.keys[at[rows]] == keys[rows]) & (self.ts[at[rows]] == ts[rows])][::-1]
        places, first = np.unique(at[rows], return_index=True)
        return places, rows[first]


class Rows(NamedTuple):
    """Newest rows of one table, keys ascending, out of one row group; `places` are theirs in `newest`."""

    entry: Entry
    name: str
    newest: Newest
    places: Places
    keys: Int64s
    ts: Int64s
    embeddings: pa.ListArray


class Survey:
    """The newest row of each key in the shards of one state, every one of which is verified first.

    Args:
        sample: so many keys, drawn by `seed`, held together; None for all.
    """

    keys_max = 1 << 23  # held at a time, besides as many that wait to be merged with them

    def __init__(self, files: Files, found: Found, state: State, sample: int | None = None, seed: int = 0) -> None:
        self._files, self._sample, self._seed = files, sample, seed
        self.damaged, self.rows_damaged = dict(found.damaged), 0
        self.entries = [e for e in found.entries if e.manifest.state == state and self._is_sound(e)]
        self.rows = sum(entry.manifest.rows for entry in self.entries)

    def _is_sound(self, entry: Entry) -> bool:
        try:
            verify(self._files, entry)
        except Damaged as error:
            self.damaged[entry.path] = str(error)
            self.rows_damaged += entry.manifest.rows
        return entry.path not in self.damaged

    def shares(self) -> Iterator[dict[str, Newest]]:
        """By table, the newest of each key: of all keys or, one after the other, of as many as may be held."""
        todo = [(1, 0)]
        while todo:
            count, which = todo.pop()  # the keys whose number leaves `which` when divided by `count`, a power of two
            newest: defaultdict[str, Newest] = defaultdict(Newest)
            waiting = 0
            for name, keys, ts in self._keys():
                mine = self._numbers(name, keys) % np.uint64(count) == which
                newest[name].add(keys[mine], ts[mine])
                waiting += int(np.count_nonzero(mine))
                if waiting > self.keys_max:
                    count, waiting = self._settle(newest, count, which, todo), 0
            self._settle(newest, count, which, todo)
            yield newest

    def _settle(self, newest: dict[str, Newest], count: int, which: int, todo: list[tuple[int, int]]) -> int:
        """Keep each key's newest; and of the keys the sample, or half of them, and the other half is left to do.

        Returns into how many shares the keys are divided by then.
        """
        for table in newest.values():
            table.settle()
        if self._sample is not None:
            numbers = [self._numbers(name, table.keys) for name, table in newest.items()]
            least = np.sort(np.concatenate([np.empty(0, np.uint64), *numbers]))[: self._sample]
            for table, its_numbers in zip(newest.values(), numbers, strict=True):
                table.keep(np.isin(its_numbers, least))
            return count
        while sum(len(table.keys) for table in newest.values()) > self.keys_max:
            todo.append((2 * count, which + count))
            count *= 2
            for name, table in newest.items():
                table.keep(self._numbers(name, table.keys) % np.uint64(count) == which)
        return count

    def _numbers(self, name: str, keys: Int64s) -> npt.NDArray[np.uint64]:
        """A number for each key of a table, wherever it is found: as good as random, but given by the seed."""
        salt = hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8]
        mixed = keys.view(np.uint64) ^ np.frombuffer(salt, np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # SplitMix64's last steps
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed

    def _keys(self) -> Iterator[tuple[str, Int64s, Int64s]]:
        """Table, keys and ts of all rows."""
        for _, _, _, keys, ts, tables in self._groups():
            for name, at in tables:
                yield name, keys[at], ts[at]

    def newest_rows(self, newest: dict[str, Newest]) -> Iterator[Rows]:
        """The rows themselves, at most LOOKUP_ROWS at a time; nothing is read of row groups that have none of them."""
        for entry, shard, group, keys, ts, tables in self._groups():
            embeddings: Any = None
            for name, at in tables:
                places, rows = newest[name].find(keys[at], ts[at])
                if len(places) and embeddings is None:
                    embeddings = shard.read_row_group(group, columns=["embedding"])["embedding"].combine_chunks()
                for start in range(0, len(places), LOOKUP_ROWS):
                    part = slice(start, start + LOOKUP_ROWS)
                    which = at[rows[part]]
                    taken = embeddings.take(pa.array(which))
                    yield Rows(entry, name, newest[name], places[part], keys[which], ts[which], taken)

    def _groups(self) -> Iterator[tuple[Entry, pq.ParquetFile, int, Int64s, Int64s, list[tuple[str, Places]]]]:
        """Row group after row group: its keys, their ts, and for each table which of the rows are its."""
        for entry in self.entries:
            with self._files.open(entry.shard) as file, pq.ParquetFile(file) as shard:
                for group in range(shard.num_row_groups):
                    columns = shard.read_row_group(group, columns=["embedding_name", "key_id", "ts"])
                    names = columns["embedding_name"].combine_chunks().dictionary_encode()
                    order = np.argsort(names.indices.to_numpy(), kind="stable")
                    ends = np.flatnonzero(np.diff(names.indices.to_numpy()[order])) + 1
                    tables = list(zip(names.dictionary.to_pylist(), np.split(order, ends), strict=True))
                    yield entry, shard, group, columns["key_id"].to_numpy(), columns["ts"].to_numpy(), tables


class StoreReader(Uploader):
    """An uploader that can also ask, as patiently, and with the same care for credentials."""

    def look_up(self, rows: Rows) -> tuple[Int64s, Places, pa.ListArray]:
        """What the store has for these keys: ts (or ABSENT, UNTOLD) of each; which were found, and their embeddings.

        Raises:
            AttemptError: the store does not answer. ReadbackError: it answers what it was not asked.
        """
        ask = functools.partial(self._ask, rows.name, rows.keys, rows.embeddings.type)
        found, found_ts, embeddings = self._persist(f"reading {rows.name!r}", ask)
        places, ts = np.searchsorted(rows.keys, found), np.full(len(rows.keys), ABSENT)
        if (np.diff(places) <= 0).any() or not np.isin(found, rows.keys).all():
            raise ReadbackError(f"the store answered for other keys of {rows.name!r} than it was asked for")
        ts[places] = found_ts
        return ts, places, embeddings

    @property
    def tells_ts(self) -> bool:
        """Whether the SDK can say how new a row is."""
        return hasattr(self._view, "lookup_arrow")

    def _ask(self, name: str, keys: Int64s, kind: pa.DataType) -> tuple[Int64s, Int64s, pa.ListArray]:
        """Keys found, ascending as the keys asked for are, their ts and embeddings."""
        if self.tells_ts:
            table = self._view.lookup_arrow(self._settings.version, pa.repeat(name, len(keys)), pa.array(keys))
            return table["sk"].to_numpy(), table["ts"].to_numpy(), table["embedding"].combine_chunks()
        rows = self._view.get_online_features(name, keys.tolist(), self._settings.version)
        by_key = {row.get("sk", row.get(self._view.sk_field)): row[self._view.embedding_field] for row in rows}
        found = sorted(key for key, row in by_key.items() if row is not None)
        return np.array(found, np.int64), np.full(len(found), UNTOLD), pa.array([by_key[key] for key in found], kind)

    def _wall_ms(self) -> int:
        """No clock: what is sent again gets ts just above the store's, so that a publisher at work has greater ones."""
        return 0


class Readback:
    """Compares acknowledged shards with the store, key by key and bit by bit."""

    def __init__(
        self, files: Files, found: Found, reader: StoreReader, *, sample: int | None = None, seed: int = 0
    ) -> None:
        self._found, self._reader, self._shown = found, reader, Counter[int]()
        self._survey = Survey(files, found, "acknowledged", sample=sample, seed=seed)

    def run(self, expired_ms: int = -1) -> Report:
        """Compare. `expired_ms`: rows of this ts (ms) or a smaller one may have left the store for their age.

        Raises:
            AttemptError, ReadbackError: the store does not answer, or not what it was asked. OSError: nor do the files.
        """
        survey, counts = self._survey, np.zeros(len(VERDICTS), np.int64)
        counts[CORRUPT_LOCAL] = survey.rows_damaged
        report = Report(survey.damaged, self._found.unverified, len(survey.entries), survey.rows)
        for share in survey.shares():
            shown = [example for rows in survey.newest_rows(share) for example in self._compare(rows)]
            for newest in share.values():
                counts += np.bincount(newest.verdicts, minlength=len(VERDICTS))
                report.compared += int(np.count_nonzero(newest.verdicts != CORRUPT_LOCAL))
                report.maybe_expired += int(np.sum((newest.verdicts == MISSING) & (newest.ts <= expired_ms)))
            report.examples += [example for newest, at, code, example in shown if newest.verdicts[at] == code]
        report.verdicts = dict(zip(VERDICTS, counts.tolist(), strict=True))
        return report

    def _compare(self, rows: Rows) -> Iterator[tuple[Newest, int, int, dict[str, Any]]]:
        """Note the verdict of each row; yields examples of the bad ones, with the place of their final verdict."""
        store_ts, places, embeddings = self._reader.look_up(rows)
        same = np.zeros(len(rows.keys), bool)
        same[places] = same_bits(rows.embeddings.take(pa.array(places)), embeddings)
        codes, verdicts = self._verdicts(rows.ts, store_ts, same), rows.newest.verdicts
        verdicts[rows.places] = np.maximum(verdicts[rows.places], codes)
        for code in range(SUPERSEDED):
            for row in np.flatnonzero(codes == code)[: EXAMPLES_MAX - self._shown[code]].tolist():
                self._shown[code] += 1
                found = np.flatnonzero(places == row).tolist()
                example = {
                    "verdict": VERDICTS[code],
                    "table": rows.name,
                    "key": str(rows.keys[row]),  # text: as a JSON number other programs would round it
                    "ts": int(rows.ts[row]),
                    "store_ts": int(store_ts[row]) if store_ts[row] >= 0 else None,
                    "retained": rows.embeddings[row].as_py(),
                    "stored": embeddings[found[0]].as_py() if found else None,
                    "shard": rows.entry.shard,
                }
                yield rows.newest, int(rows.places[row]), code, example

    def _verdicts(self, ts: Int64s, store_ts: Int64s, same: Mask) -> npt.NDArray[np.int64]:
        """Verdict of each row: its ts, the store's (or ABSENT, UNTOLD), and whether all their bits are the same."""
        cases = {
            MISSING: store_ts == ABSENT,
            UNDECIDED: (store_ts == UNTOLD) & ~same,
            SUPERSEDED: store_ts > ts,
            MATCH: ((store_ts == ts) | (store_ts == UNTOLD)) & same,
        }
        return np.select(list(cases.values()), list(cases), DIFFERENT)


class Resend:
    """Sends spilled rows that are newer than the store's, and then says so in their manifests.

    To run it again is safe, also after it was killed: what arrived has a ts above the spilled one by then.
    """

    def __init__(self, files: Files, found: Found, reader: StoreReader) -> None:
        if not reader.tells_ts:
            raise ReadbackError("this SDK does not say how new a row is, so old rows could replace newer ones")
        self._files, self._found, self._reader = files, found, reader
        self._survey = Survey(files, found, "spilled")

    def run(self, dry_run: bool = False) -> ResendReport:
        """Send them, above every ts that the store or a spilled row has.

        Raises:
            UploadError: some were not acknowledged; no manifest was marked. And what `Readback.run` raises.
        """
        survey, reader = self._survey, self._reader
        report = ResendReport(survey.damaged, self._found.unverified, len(survey.entries), survey.rows)
        reader.start()
        try:
            reader.catch_up(max((entry.manifest.ts_last for entry in survey.entries), default=0))
            for share in survey.shares():
                for rows in survey.newest_rows(share):
                    due = self._is_due(rows.ts, reader.look_up(rows)[0])
                    due &= rows.newest.verdicts[rows.places] != MATCH  # of several rows with a key's newest ts, one
                    rows.newest.verdicts[rows.places[due]] = MATCH
                    report.sent += int(np.count_nonzero(due))
                    if due.any() and not dry_run:
                        reader.submit(rows.entry.manifest.step, _delta(rows, due))
            reader.drain()
        finally:
            with contextlib.suppress(UploadError):  # raised already
                reader.close(drain=False)
        report.superseded = report.rows - report.sent
        for path, manifest in () if dry_run else survey.entries:
            self._files.write(path, msgspec.structs.replace(manifest, state="resent").encode())
        return report

    def _is_due(self, ts: Int64s, store_ts: Int64s) -> Mask:
        """Which rows the store has in no version as new."""
        return store_ts < ts


def _delta(rows: Rows, which: Mask) -> pa.Table:
    """Some of the rows as a delta, whose table FQNs are the published names."""
    manifest, count = rows.entry.manifest, int(np.count_nonzero(which))
    columns = {
        "global_step": manifest.step,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "feature_name": "",
        "table_fqn": rows.name,
        "source": "resend",
    }
    schema = SCHEMAS["int8" if rows.embeddings.type == pa.list_(pa.uint8()) else "float32"]
    arrays = {name: pa.repeat(pa.scalar(value, schema.field(name).type), count) for name, value in columns.items()}
    arrays |= {"key_id": pa.array(rows.keys[which]), "embedding": rows.embeddings.filter(pa.array(which))}
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def same_bits(one: pa.ListArray, other: pa.ListArray) -> Mask:
    """Whether each pair of lists has the same bits, so that -0.0 is not 0.0 and a NaN is itself."""
    if one.type.value_type != other.type.value_type:
        return np.zeros(len(one), bool)
    return pc.equal(_as_bytes(one), _as_bytes(other)).to_numpy(zero_copy_only=False)


def _as_bytes(lists: pa.ListArray) -> pa.LargeBinaryArray:
    width = lists.type.value_type.bit_width // 8
    ends = (lists.offsets.to_numpy().astype(np.int64) + lists.values.offset) * width
    return pa.Array.from_buffers(pa.large_binary(), len(lists), [None, pa.py_buffer(ends), lists.values.buffers()[1]])


def choose(found: Found, generation: str | None = None, **wanted: str | None) -> Found:
    """Only the shards of one project, view and version, those in `wanted` or the only ones there are.

    What cannot be read is told apart by its path.

    Raises:
        ReadbackError: there are several to choose from, or none such.
    """
    wanted = {name: text for name, text in {**wanted, "generation": generation}.items() if text is not None}
    entries = [e for e in found.entries if all(getattr(e.manifest, name) == text for name, text in wanted.items())]
    homes = sorted({(e.manifest.project, e.manifest.view, e.manifest.version) for e in entries or found.entries})
    listed = ", ".join(f"project {project!r} view {view!r} version {version!r}" for project, view, version in homes)
    if found.entries and not entries:
        raise ReadbackError(f"no manifest has {wanted}; there are shards of {listed}")
    if len(homes) > 1:
        raise ReadbackError(f"there are shards of {listed}: choose one of them")

    def concerns(path: str) -> bool:
        *_, view, version, _, name = ["", "", "", *path.split("/")]  # as far as the folder that was read has these
        home = all(
            folder in ("", folder_name(text)) for text, folder in zip(homes[0][1:], (view, version), strict=True)
        )
        return home and f".{generation or ''}" in name

    if not homes:
        return found
    damaged = {path: why for path, why in found.damaged.items() if concerns(path)}
    return Found(entries, damaged, list(filter(concerns, found.unverified)))
