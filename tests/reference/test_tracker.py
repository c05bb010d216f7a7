"""The tracker on real sharded TorchRec models, two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# With the engine's tests: a process has one forkserver, and it takes seconds to start.
pytestmark = pytest.mark.xdist_group("processes")

EBC, DEEP, EC = "ebc.embedding_bags.", "deep.ebc.embedding_bags.", "ec.embeddings."
#: table FQN -> (features, row ranges per rank; None: not there)
LAYOUT: dict[str, tuple[list[str], list[range | None]]] = {
    EBC + "a": (["fa"], [range(26), range(26, 51)]),
    EBC + "b": (["fb", "fa"], [None, range(51)]),
    EBC + "c": (["fc"], [range(51), range(51)]),
    EBC + "e": (["fa", "fb"], [range(26), range(26, 51)]),
    EBC + "fp16": (["fc"], [range(51), None]),
    DEEP + "a": (["fb"], [range(51), None]),
    EC + "a": (["fa"], [range(26), range(26, 51)]),
    EC + "d": (["fa"], [range(51), None]),
}


@pytest.fixture(scope="module")
def drawn() -> Callable[[int, int], dict[str, tuple[list[int], list[int]]]]:
    """The batches of tracker_rank.py, without its imports."""

    def batch(rank: int, step: int) -> dict[str, tuple[list[int], list[int]]]:
        rng = np.random.default_rng([rank, step])
        found = {}
        for feature in ("fa", "fb", "fc"):
            lengths = rng.integers(0, 4, 3)
            found[feature] = (lengths.tolist(), rng.integers(0, 51, lengths.sum()).tolist())
        return found

    return batch


def expected_keys(drawn: Any, fqn: str, rank: int, steps: tuple[int, ...], quiet: tuple[str, ...] = ()) -> list[int]:
    features, ranges = LAYOUT[fqn]
    hosted = ranges[rank]
    sources = [rank] if fqn == EBC + "c" else [0, 1]  # a data-parallel table sees the rank's own batch
    ids = [
        key
        for source in sources
        for step in steps
        for feature in features
        if feature not in quiet
        for key in drawn(source, step)[feature][1]
    ]
    return sorted({key for key in ids if hosted is not None and key in hosted})


def keys_of(drained: dict[str, np.ndarray]) -> dict[str, list[int]]:
    assert all(keys.dtype == np.int64 for keys in drained.values())
    return {fqn: keys.tolist() for fqn, keys in drained.items()}


def test_the_ids_of_every_sharding_become_global_keys_of_their_own_table(ranks: Any, drawn: Any) -> None:
    for rank, (infos, intervals, hosted) in enumerate(ranks("follow")):
        assert hosted == {fqn: list(of[rank] or ()) for fqn, (_, of) in LAYOUT.items()} | {"ec.embeddings.unknown": []}
        assert {fqn: (hosted, features) for fqn, (_, hosted, _, features) in infos.items()} == {
            fqn: (ranges[rank] is not None, tuple(features)) for fqn, (features, ranges) in LAYOUT.items()
        }
        shardings = {fqn: sharding for fqn, (sharding, *_) in infos.items()}
        assert shardings[EBC + "a"] == shardings[EC + "a"] == "row_wise"
        assert shardings[EBC + "b"] == shardings[DEEP + "a"] == "table_wise"
        assert shardings[EBC + "c"] == "data_parallel"
        for steps, (drained, rows, before, after) in zip(((1, 2), (3, 4)), intervals, strict=True):
            expected = {fqn: expected_keys(drawn, fqn, rank, steps) for fqn in LAYOUT}
            assert keys_of(drained) == {fqn: keys for fqn, keys in expected.items() if keys}
            for fqn, keys in drained.items():
                first, held = after[fqn]
                assert rows[fqn].dtype == np.float32
                assert rows[fqn].tobytes() == held[keys - first].tobytes()
            for fqn, (first, held) in after.items():
                changed = np.flatnonzero((held != before[fqn][1]).any(axis=1)) + first
                seen = set(drained.get(fqn, np.array([])).tolist())
                if fqn == EBC + "c":  # replicas move by every rank's ids; each rank reports its own
                    seen = {key for other in (0, 1) for key in expected_keys(drawn, fqn, other, steps)}
                assert set(changed.tolist()) <= seen
                assert len(changed), f"{fqn} never changed: the test shows nothing"


def test_evaluation_quiet_tables_broken_forwards_and_new_storage(ranks: Any, drawn: Any) -> None:
    for rank, seen in enumerate(ranks("live")):
        assert seen["evaluated"] == {}
        assert seen["broke"] == "injected"
        quiet, after = keys_of(seen["quiet"]), keys_of(seen["after"])
        for fqn in LAYOUT:
            assert after.get(fqn, []) == expected_keys(drawn, fqn, rank, (5,))
        assert DEEP + "a" not in quiet
        assert EBC + "a" in quiet
        assert np.allclose(seen["grown"], 1.0, atol=1e-5)
        first_row = 26 * rank
        assert f"DeltaError: id outside this rank's {26 - rank} rows from row {first_row}" in seen["outside"]
        assert f"key {26 + first_row}" in seen["outside"]


def test_two_real_ranks_publish_every_changed_row_bitwise(ranks: Any) -> None:
    published = ranks("publish")
    compared = 0
    store: dict[tuple[str, int], Any] = {}
    for stored, _, _ in published:
        store |= stored
    for _, before, after in published:
        for fqn, (first, held) in after.items():
            for row in np.flatnonzero((held != before[fqn][1]).any(axis=1)):
                assert np.array(store[fqn, int(row) + first], np.float32).tobytes() == held[row].tobytes()
                compared += 1
    assert compared > 200
    assert {fqn for fqn, _ in store} == set(LAYOUT)


def test_models_that_cannot_be_followed_are_refused_with_the_reason(ranks: Any) -> None:
    (messages,) = ranks("refuse", world_size=1)
    assert "is sharded column_wise; only row_wise, table_wise, data_parallel" in messages["column"]
    assert "'ebc' is not sharded" in messages["unsharded"]
    assert "has no sharded EmbeddingBagCollection" in messages["none"]
    assert "two tables have the name 'x._dmp_wrapped_module.ebc.embedding_bags.a'" in messages["twice"]
    assert "remaps ids" in messages["collision"]
    assert "in kernel key_value" in messages["kernel"]
    assert messages["folded"] == (8, [1, 2, 3], 0)  # never more ids than the bound
    assert messages["chained"] == "[1, 1]"
    assert "another tracker was registered after this one" in messages["replaced"]
    assert "'ebc.embedding_bags.b' has no rows on this rank" in messages["elsewhere"]
