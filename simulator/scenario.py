"""A scenario: everything that determines one run, as plain data with JSON in and out.

``Scenario.from_json`` checks what it reads and raises ``ScenarioError`` with one line a person can act on. Files carry
``version``; a file of a newer version is refused rather than half understood.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ..reference.contract import ContractError, TableRef, embedding_names
from .errors import ScenarioError
from .faults import REGISTRY, AnyFault, Expect

#: The version of scenario files this package writes and the newest it reads.
SCENARIO_VERSION = 1

Devices = Literal["cpu", "per-rank", "shared"]
Backend = Literal["gloo", "nccl"]

SHARDINGS = ("row_wise", "table_wise", "data_parallel", "dynamic")


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Table(_Data, frozen=True, kw_only=True):
    """One embedding table.

    ``owner`` is the module path of its collection (``ebc``, ``tower.ebc``); ``features`` default to the table's name,
    so tables of equal name under several owners look up the same ids. ``rank`` places a table-wise table.

    A ``dynamic`` table has keys anywhere in int64 instead of row numbers: ``rows`` different ones can be looked up, of
    which each rank has room for ``capacity`` (0: all), and serving uses ``missing`` in place of a row that is
    not there.
    """

    name: str
    owner: str = "ebc"
    collection: Literal["ebc", "ec"] = "ebc"
    rows: int = 64
    dim: int = 4
    sharding: str = "row_wise"
    rank: int = 0
    features: tuple[str, ...] = ()
    capacity: int = 0
    missing: float = 0.0

    @property
    def fqn(self) -> str:
        """Owner-qualified name, as TorchRec's state dict spells it without ``.weight``."""
        return f"{self.owner}.{'embedding_bags' if self.collection == 'ebc' else 'embeddings'}.{self.name}"

    def key_ids(self, numbers: np.ndarray) -> np.ndarray:
        """int64 keys of int64 row numbers: themselves or, in a dynamic table, scattered over all of int64 but -1."""
        if self.sharding != "dynamic":
            return numbers
        mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # odd: no two meet
        return mixed.view(np.int64)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (self.name,)


class Workload(_Data, frozen=True, kw_only=True):
    """What is trained on: ``steps`` batches of ``batch_size`` samples per rank.

    Ids are Zipf-distributed with exponent ``zipf_exponent`` (0: uniform) over each table's rows, up to
    ``ids_per_sample_max`` per sample and feature; or they come from the int64 columns of the Parquet file ``data``,
    taken modulo the table's rows, rank r reading rows r, r + world_size, and so on. ``eval_every_steps`` > 0 runs an
    evaluation forward on other ids after each such step, inside the publisher's ``paused()``. ``warmup_batches`` are
    trained on before the publisher's ``start()`` and undone by a restore of the initial weights. Both clocks of every
    rank run ahead by ``step_seconds`` at each step, so that minutes pass without waiting. Model and publisher are saved
    after every ``checkpoint_every_steps`` steps (0: never).
    """

    steps: int = 10
    batch_size: int = 4
    ids_per_sample_max: int = 3
    zipf_exponent: float = 1.1
    data: str | None = None
    eval_every_steps: int = 0
    warmup_batches: int = 0
    step_seconds: float = 0.0
    checkpoint_every_steps: int = 0


class PublisherConfig(_Data, frozen=True, kw_only=True):
    """How the target is asked to publish: every ``every_steps`` steps or, when given, every ``every_minutes`` minutes.

    ``embedding_type`` int8: rows of one byte a number, with a scale and an offset (docs/tables.md). ``batch_size`` rows
    per request; ``retry_attempts_max`` tries per step; deltas wait in a queue of at most
    ``queue_steps_max`` steps and ``queue_bytes_max`` bytes; ``flush_timeout_s`` for one answer, ``close_timeout_s`` for
    everything that is left at the end; ``settle_s`` that a restarted job waits for the last requests of the one before.
    With ``retain`` a copy of every acknowledged delta is kept in a folder of the run, with ``spill`` of every one that
    could not be delivered; with ``readback`` rank 0 compares the former with the store when the job is done.
    """

    every_steps: int = 3
    every_minutes: float | None = None
    upload_format: Literal["arrow", "json"] = "arrow"
    naming: Literal["fqn", "role"] = "fqn"
    embedding_type: Literal["float32", "int8"] = "float32"
    batch_size: int = 16
    max_workers: int = 2
    retry_attempts_max: int = 6
    retry_delay_ms_min: int = 5
    retry_delay_ms_max: int = 100
    queue_steps_max: int = 8
    queue_bytes_max: int = 1 << 30
    flush_timeout_s: float = 300.0
    close_timeout_s: float = 600.0
    settle_s: float = 0.1
    retain: bool = False
    spill: bool = False
    readback: bool = False

    @property
    def patience_ms(self) -> float:
        """The shortest time that all attempts for one step together wait: exponential backoff, halved by jitter."""
        low, high = self.retry_delay_ms_min, self.retry_delay_ms_max
        return sum(min(high, low * 2.0**n) for n in range(self.retry_attempts_max - 1)) / 2


class Restart(_Data, frozen=True, kw_only=True):
    """The job is started again when it has failed: from its newest checkpoint, on ``world_size`` ranks (none: as many
    as before), on batches that no attempt before it had."""

    world_size: int | None = None


class Deadlines(_Data, frozen=True, kw_only=True):
    """Seconds of real time: each attempt, and how long peers may take to end once one rank has failed."""

    run_s: float = 60.0
    grace_s: float = 5.0


class Scenario(_Data, frozen=True, kw_only=True):
    """Everything that determines one run. Two runs of equal scenarios train on equal ids from equal weights.

    ``devices``: where the model is: ``cpu``, a CUDA device for each rank (``per-rank``), or the first CUDA device for
    all of them (``shared``). ``backend``: of the process group; gloo takes the tensors of any device, nccl those of
    CUDA.
    """

    version: int = SCENARIO_VERSION
    name: str = "unnamed"
    seed: int = 0
    world_size: int = 2
    tables: tuple[Table, ...] = (Table(name="item"),)
    workload: Workload = Workload()
    publisher: PublisherConfig = PublisherConfig()
    faults: tuple[AnyFault, ...] = ()
    restarts: tuple[Restart, ...] = ()
    deadlines: Deadlines = Deadlines()
    devices: Devices = "cpu"
    backend: Backend = "gloo"

    # ------------------------------------------------------------------------------------------------ in and out
    def to_json(self) -> str:
        """Indented JSON without the fields that have their default value, but with the version."""
        plain = _without_defaults(self)
        plain = {"version": self.version, "name": self.name, "seed": self.seed, **plain}
        return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "scenario") -> Scenario:
        """Decode and check. Raises ScenarioError with one line naming ``where`` and the field."""
        try:
            raw: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"{where}: not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ScenarioError(f"{where}: a scenario is a JSON object, not {type(raw).__name__}")
        try:
            json.dumps(raw, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise ScenarioError(f"{where}: holds text that is not valid Unicode, or is nested too deeply") from None
        version = raw.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ScenarioError(f"{where}: field 'version' is {version!r}; write \"version\": {SCENARIO_VERSION}")
        if version > SCENARIO_VERSION:
            raise ScenarioError(
                f"{where}: scenario version {version} is newer than this deltaproof reads ({SCENARIO_VERSION}); "
                "upgrade deltaproof"
            )
        faults = raw.get("faults")
        for index, fault in enumerate(faults if isinstance(faults, list) else ()):
            kind = fault.get("fault") if isinstance(fault, dict) else None
            if not isinstance(kind, str) or kind not in REGISTRY:
                raise ScenarioError(
                    f"{where}: faults[{index}]: unknown fault {kind!r}; known faults: {', '.join(REGISTRY)}"
                )
        try:
            scenario = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise ScenarioError(f"{where}: {error}") from None
        except RecursionError:
            raise ScenarioError(f"{where}: nested too deeply") from None
        return scenario.checked(where=where)

    @classmethod
    def load(cls, path: str | Path) -> Scenario:
        """Read a scenario file; a Parquet path in it is relative to the file. Raises ScenarioError."""
        path = Path(path)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ScenarioError(f"cannot read {path}: {error.strerror or error}") from None
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise ScenarioError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
        scenario = cls.from_json(text, where=str(path))
        data = scenario.workload.data
        if data is not None:
            found = next((p for p in (path.parent / data, Path(data)) if p.exists()), path.parent / data)
            # Absolute, because a failure file may be replayed from another folder.
            workload = msgspec.structs.replace(scenario.workload, data=str(found.resolve()))
            scenario = msgspec.structs.replace(scenario, workload=workload)
        return scenario

    # ------------------------------------------------------------------------------------------------ meaning
    @property
    def expect(self) -> Expect:
        """``fail-loudly`` when one fault allows the job to fail, or the store's together may exhaust the retries.

        What brings down an attempt that is followed by a restart does not bring down the job.
        """
        last = len(self.restarts)
        if any(f.expect(self) == "fail-loudly" and getattr(f, "attempt", last) >= last for f in self.faults):
            return "fail-loudly"
        failures = sum(f.failures for f in self.faults)
        return "fail-loudly" if failures >= self.publisher.retry_attempts_max else "tolerate"

    def of_attempt(self, attempt: int) -> Scenario:
        """This scenario as one attempt runs it, 0 the first: with its number of ranks. Not ``checked`` again."""
        sizes = [self.world_size]
        for restart in self.restarts:
            sizes.append(sizes[-1] if restart.world_size is None else restart.world_size)
        size = sizes[attempt]
        tables = tuple(msgspec.structs.replace(t, rank=t.rank % size) for t in self.tables)
        return msgspec.structs.replace(self, world_size=size, tables=tables)

    def manifest(self) -> dict[str, str]:
        """table FQN -> embedding_name, as an exporter of this model derives it. Raises ContractError on a collision."""
        tables = [TableRef(owner=t.owner, collection=t.collection, table=t.name) for t in self.tables]
        names = embedding_names(tables, naming=self.publisher.naming)
        shared = sorted(name for name, count in Counter(names.values()).items() if count > 1)
        if shared:
            raise ContractError(f"two trained tables would both be published as {shared[0]!r}")
        return names

    def checked(self, *, where: str = "scenario") -> Scenario:
        """Return self. Raises ScenarioError naming the first thing that makes this scenario impossible."""
        for problem in self._problems():
            raise ScenarioError(f"{where}: {problem}")
        return self

    def _problems(self) -> list[str]:
        found: list[str] = []

        def at_least(field: str, value: float, low: float, high: float = float("inf")) -> None:
            if not low <= value <= high:
                wanted = f"at least {low:g}" if high == float("inf") else f"{low:g} to {high:g}"
                found.append(f"{field} is {value:g}; it must be {wanted}")

        at_least("world_size", self.world_size, 1, 64)
        at_least("seed", self.seed, 0, 2**63 - 1)
        at_least("workload.steps", self.workload.steps, 1, 1_000_000)
        at_least("workload.batch_size", self.workload.batch_size, 1, 1_000_000)
        at_least("workload.ids_per_sample_max", self.workload.ids_per_sample_max, 1, 10_000)
        at_least("workload.zipf_exponent", self.workload.zipf_exponent, 0, 20)
        at_least("workload.eval_every_steps", self.workload.eval_every_steps, 0)
        at_least("workload.warmup_batches", self.workload.warmup_batches, 0, 1_000)
        at_least("workload.step_seconds", self.workload.step_seconds, 0, 86_400)
        at_least("workload.checkpoint_every_steps", self.workload.checkpoint_every_steps, 0)
        at_least("publisher.settle_s", self.publisher.settle_s, 0, 600)
        at_least("publisher.every_steps", self.publisher.every_steps, 1)
        if self.publisher.every_minutes is not None:
            at_least("publisher.every_minutes", self.publisher.every_minutes, 1e-6, 1e6)
        at_least("publisher.queue_steps_max", self.publisher.queue_steps_max, 1, 1_000_000)
        at_least("publisher.queue_bytes_max", self.publisher.queue_bytes_max, 1, 1 << 50)
        at_least("publisher.flush_timeout_s", self.publisher.flush_timeout_s, 0.01, 86_400)
        at_least("publisher.close_timeout_s", self.publisher.close_timeout_s, 0.01, 86_400)
        at_least("publisher.batch_size", self.publisher.batch_size, 1, 1_000_000)
        at_least("publisher.max_workers", self.publisher.max_workers, 1, 64)
        at_least("publisher.retry_attempts_max", self.publisher.retry_attempts_max, 1, 100)
        at_least("publisher.retry_delay_ms_min", self.publisher.retry_delay_ms_min, 0, 60_000)
        at_least(
            "publisher.retry_delay_ms_max",
            self.publisher.retry_delay_ms_max,
            self.publisher.retry_delay_ms_min,
            600_000,
        )
        at_least("deadlines.run_s", self.deadlines.run_s, 1, 86_400)
        at_least("deadlines.grace_s", self.deadlines.grace_s, 0.1, 3_600)
        if self.backend == "nccl" and self.devices == "cpu":
            found.append(
                "backend 'nccl' needs CUDA tensors: set devices to 'per-rank' or 'shared', or backend to 'gloo'"
            )
        for index, restart in enumerate(self.restarts):
            if restart.world_size is not None:
                at_least(f"restarts[{index}].world_size", restart.world_size, 1, 64)
        dynamic = [t for t in self.tables if t.sharding == "dynamic"]
        if dynamic and len(dynamic) == len(self.tables):
            found.append("all tables are dynamic; a model needs one at least that TorchRec shards")
        if dynamic and (self.restarts or self.workload.warmup_batches):
            found.append("dynamic tables make no checkpoints here: leave out restarts and workload.warmup_batches")
        if self.publisher.readback and not self.publisher.retain:
            found.append("publisher.readback needs publisher.retain: there is nothing to compare with the store")
        if not self.tables:
            found.append("tables is empty; a model needs at least one table")
        found += self._table_problems()
        if not found:
            for attempt in range(1, len(self.restarts) + 1):
                found += [f"after restart {attempt}: {p}" for p in self.of_attempt(attempt)._table_problems()]
        if not found:
            try:
                self.manifest()
            except ContractError as error:
                found.append(f"publisher.naming {self.publisher.naming!r}: {error}")
        if (
            sum(f.kind == "exhaustion" for f in self.faults)
            and len({getattr(f, "policy", None) for f in self.faults if f.kind == "exhaustion"}) != 1
        ):
            found.append("exhaustion faults of one scenario must share one policy")
        for index, fault in enumerate(self.faults):
            found += [f"faults[{index}] ({fault.kind}): {problem}" for problem in fault.problems(self)]
        return found

    def _table_problems(self) -> list[str]:
        found: list[str] = []
        seen: set[str] = set()
        collections: dict[str, Table] = {}
        for index, table in enumerate(self.tables):
            where = f"tables[{index}] ({table.owner}/{table.name})"
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", table.owner, re.ASCII):
                found.append(f"{where}: owner must be a module path such as 'ebc' or 'tower.ebc'")
            if not table.name or "." in table.name or "/" in table.name:
                found.append(f"{where}: a table name is not empty and has no '.' or '/'")
            if table.fqn in seen:
                found.append(f"{where}: owner {table.owner!r} already has a table {table.name!r}")
            seen.add(table.fqn)
            if table.sharding in ("column_wise", "table_column_wise", "grid_shard"):
                found.append(
                    f"{where}: {table.sharding} sharding is refused: a row's values lie on several ranks, so no rank "
                    f"can publish the row; use one of {', '.join(SHARDINGS)}"
                )
            elif table.sharding not in SHARDINGS:
                found.append(f"{where}: unknown sharding {table.sharding!r}; use one of {', '.join(SHARDINGS)}")
            if not 1 <= table.rows <= 2**31 - 1:
                found.append(f"{where}: rows is {table.rows}; it must be 1 to 2147483647")
            share = -(-table.rows // max(1, self.world_size))
            if table.sharding == "row_wise" and share * (self.world_size - 1) >= table.rows:
                found.append(
                    f"{where}: TorchRec gives each rank {share} of the {table.rows} rows, which leaves the last of "
                    f"{self.world_size} ranks with none, and its CPU kernel refuses an empty shard; use more rows"
                )
            if table.capacity < 0 or not abs(table.missing) < float("inf"):
                found.append(
                    f"{where}: capacity is {table.capacity} and missing {table.missing:g}; want 0 or more, finite"
                )
            if table.dim < 4 or table.dim % 4 or table.dim > 2048:
                found.append(f"{where}: dim is {table.dim}; TorchRec's kernels take multiples of 4 up to 2048")
            if table.sharding == "table_wise" and not 0 <= table.rank < self.world_size:
                found.append(f"{where}: placed on rank {table.rank}, which a world of {self.world_size} does not have")
            first = collections.setdefault(table.owner, table)
            if first.collection != table.collection:
                found.append(
                    f"{where}: owner {table.owner!r} is an {first.collection.upper()} for table {first.name!r}"
                )
            elif table.collection == "ec" and first.dim != table.dim:
                found.append(f"{where}: an EmbeddingCollection has one dim; {first.name!r} has {first.dim}")
            if (first.sharding == "dynamic") != (table.sharding == "dynamic"):
                found.append(f"{where}: owner {table.owner!r} holds dynamic tables and others; give each its own owner")
            for outer in collections:
                if outer != table.owner and table.owner.startswith(outer + "."):
                    found.append(f"{where}: owner lies inside the collection {outer!r}")
            if len(set(table.feature_names)) != len(table.feature_names) or not all(table.feature_names):
                found.append(f"{where}: features must be distinct and not empty")
        return found


def _without_defaults(struct: msgspec.Struct) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    config = struct.__struct_config__
    if config.tag is not None and config.tag_field:
        plain[config.tag_field] = config.tag
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if not field.required and value == field.default:
            continue
        if isinstance(value, msgspec.Struct):
            plain[field.name] = _without_defaults(value)
        elif isinstance(value, tuple):
            plain[field.name] = [_without_defaults(v) if isinstance(v, msgspec.Struct) else v for v in value]
        else:
            plain[field.name] = value
    return plain
