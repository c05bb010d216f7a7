"""Which snapshots the server keeps: bounded in number and in memory, the newest always."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from deltaproof.fakes.errors import SnapshotNotFound
from deltaproof.fakes.server import state as state_module
from deltaproof.fakes.server.serve import wall_store
from deltaproof.fakes.server.state import SNAPSHOTS_BYTES_MAX, SNAPSHOTS_MAX, ServerState
from deltaproof.fakes.store import Store

from .kit import PROJECT, VERSION, VIEW, make_view

ROWS, DIM = 1000, 64
COLUMNS_BYTES = ROWS * (8 + 8 + 4 * DIM)
ORDER_BYTES = 8 * ROWS


@pytest.fixture
def state() -> ServerState:
    store = wall_store()
    make_view(store)
    return ServerState(store)


def write(store: Store, table: str = "t", first: int = 0) -> None:
    """Every row of ``table``: the first write makes them, later ones replace them."""
    values = pa.array(np.zeros(ROWS * DIM, dtype=np.float32))
    offsets = pa.array(np.arange(0, ROWS * DIM + 1, DIM, dtype=np.int32))
    columns = [pa.repeat(table, ROWS), pa.array(range(first, first + ROWS)), pa.ListArray.from_arrays(offsets, values)]
    batch = pa.RecordBatch.from_arrays(columns, ["pk", "sk", "embedding"])
    store.write(PROJECT, VIEW, batch, version=VERSION, ts=1)


def keep(state: ServerState, tables: list[str] | None = None) -> str:
    return state.keep_snapshot(PROJECT, VIEW, state.store.snapshot(PROJECT, VIEW, VERSION, tables=tables))


def kept(state: ServerState, snapshot_ids: list[str]) -> list[bool]:
    found = []
    for snapshot_id in snapshot_ids:
        try:
            state.snapshot(PROJECT, VIEW, snapshot_id)
            found.append(True)
        except SnapshotNotFound:
            found.append(False)
    return found


def test_the_oldest_go_while_the_older_ones_take_too_much_memory(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "SNAPSHOTS_BYTES_MAX", 3 * (COLUMNS_BYTES + ORDER_BYTES))
    ids = []
    for _ in range(6):
        write(state.store)
        ids.append(keep(state))
    assert kept(state, ids) == [False, False, True, True, True, True]


def test_what_snapshots_share_counts_once(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SNAPSHOTS_BYTES_MAX", 3 * ORDER_BYTES)
    write(state.store)
    assert kept(state, [keep(state) for _ in range(5)]) == [False, True, True, True, True]


def test_the_newest_stays_whatever_its_size(state: ServerState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "SNAPSHOTS_BYTES_MAX", 0)
    write(state.store)
    assert kept(state, [keep(state), keep(state)]) == [False, True]
    assert state.store.rows(PROJECT, VIEW, VERSION) == ROWS


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_counted_as_it_is(state: ServerState, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_max = 6 * COLUMNS_BYTES
    monkeypatch.setattr(state_module, "SNAPSHOTS_BYTES_MAX", bytes_max)
    chance, ids = random.Random(seed), []
    for number in range(60):
        write(state.store, chance.choice("abc"), chance.choice([0, 0, 0, ROWS * number]))
        for _ in range(chance.randrange(3)):
            ids.append(keep(state, chance.choice([None, ["a"], ["b", "c"]])))
        alive = [state.snapshot(PROJECT, VIEW, one) for one, there in zip(ids, kept(state, ids), strict=True) if there]
        distinct: dict[int, int] = {}
        for snapshot in alive:
            distinct |= snapshot.arrays()
        assert state._snapshots._bytes == sum(distinct.values())
        assert not alive or sum(distinct.values()) <= bytes_max + sum(alive[-1].arrays().values())
    assert not all(kept(state, ids))


def test_the_bounds_stand_in_the_docs() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "feature-store.md").read_text().split())
    assert f"The newest {SNAPSHOTS_MAX} snapshots are kept" in page
    assert f"no more than {SNAPSHOTS_BYTES_MAX >> 30} GiB together beside the newest" in page
